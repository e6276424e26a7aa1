"""A page as a headless browser shows it."""

from __future__ import annotations

import http.server
import queue
import shutil
import subprocess
import threading
from functools import partial
from pathlib import Path
from subprocess import DEVNULL

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]

needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no browser")


def dom_of(page: Path, seconds: int = 8) -> str:
    """The page's elements, after so many seconds of the page's own clock, which does not wait where nothing happens."""
    command = [*_started(page.parent), f"--virtual-time-budget={1000 * seconds}", "--dump-dom", f"file://{page}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


class Site(http.server.ThreadingHTTPServer):
    """Serves a folder on this machine, and keeps what its pages post to `/found`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
        self.folder = folder
        self.found: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        """Where it serves its folder."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def posted_by(self, page: str, seconds: float = 240, *, from_disk: bool = False) -> str:
        """What a page posts to `/found`; it may take its time, as its workers do."""
        address = f"file://{self.folder / page}" if from_disk else f"{self.address}/{page}"
        with subprocess.Popen([*_started(self.folder), address], stdout=DEVNULL, stderr=DEVNULL) as browser:
            try:
                return self.found.get(timeout=seconds)
            finally:
                browser.kill()


class _Handler(http.server.SimpleHTTPRequestHandler):
    server: Site

    def do_POST(self) -> None:
        """Keep what is posted."""
        self.server.found.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _started(folder: Path) -> list[str]:
    return [str(BROWSER), *FLAGS, f"--user-data-dir={folder / 'user'}"]
