"""Tests of `harness.dry_run`."""
