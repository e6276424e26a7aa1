"""A page as a headless browser shows it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]

needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no browser")


def dom_of(page: Path, seconds: int = 8) -> str:
    """The page's elements, after so many seconds of the page's own clock, which does not wait where nothing happens."""
    command = [
        str(BROWSER),
        *FLAGS,
        f"--virtual-time-budget={1000 * seconds}",
        f"--user-data-dir={page.parent / 'user'}",
    ]
    done = subprocess.run([*command, "--dump-dom", f"file://{page}"], capture_output=True, text=True, timeout=120)
    return done.stdout
