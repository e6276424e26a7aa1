"""Pipeline parallelism: stage boundaries, schedules, activation transfers, recomputation."""
