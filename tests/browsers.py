"""A headless Chromium for tests of pages: the machine's own, Chrome too, or Debian's, which root may install."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = "chromium", "google-chrome"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find_chromium() -> str:
    """Path of Chromium; it is installed if there is none and this is root on a machine with apt-get, else skipped."""
    if found := next(filter(None, map(shutil.which, NAMES)), None):
        return found
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("no chromium here, and only root with apt-get can install it")
    command = ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    if found := shutil.which("chromium"):
        return found
    pytest.skip(f"no chromium here, and apt-get cannot install it: {(done.stderr or done.stdout)[-200:]}")


@contextmanager
def open_browser() -> Iterator[Browser]:
    """One browser without a window; close what is opened in it."""
    path = find_chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        yield browser
        browser.close()
