"""A headless Chromium for tests of pages: the machine's own, or one that apt-get may install."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

NAMES = ("chromium", "google-chrome", "chromium-browser")
"""What it is called: by Debian, by Google, whose one GitHub's machines have, and by Ubuntu."""

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

DEADLINE_S = 240.0
EXPECTED_MS = 60_000
"""Longest that a page may take for what a test expects of it, on a machine that is busy with other things."""


def find_chromium() -> str:
    """Path of a Chromium that runs. Where there is none, apt-get installs it if this user may; else skips the test."""
    if found := _installed():
        return found
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    lists, package = ["update"], ["install", "--no-install-recommends", "chromium"]
    said = ""
    with (Path(tempfile.gettempdir()) / "zeroband-chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several workers one installs it
        for arguments in (package, lists, package):
            if found := _installed():
                return found
            said = _run([*as_root, "apt-get", "-y", *arguments])[1]
    if found := _installed():
        return found
    pytest.skip(f"none of {', '.join(NAMES)} runs here, and apt-get cannot install chromium: {said[-200:]}")


def _installed() -> str | None:
    """The first that runs: Ubuntu's may be a script that says where to get it."""
    return next((path for path in map(shutil.which, NAMES) if path and _run([path, "--version"])[0]), None)


def _run(command: Sequence[str]) -> tuple[bool, str]:
    """Whether a command ends well, and what it says."""
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    return done.returncode == 0, done.stderr or done.stdout


@contextmanager
def open_browser() -> Iterator[Browser]:
    """One browser without a window; close what is opened in it."""
    path = find_chromium()
    expect.set_options(timeout=EXPECTED_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        yield browser
        browser.close()
