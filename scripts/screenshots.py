"""Take the pictures of a run's page for the documents: run the demo, longer than usual, with a page beside it.

    .venv/bin/python scripts/screenshots.py docs

Writes board-start.png, board-kill.png and board-healed.png into the folder: all four nodes train, one is lost, all have
ended with one state. Takes about ten minutes on 2 cores. Debian: apt-get install chromium fonts-inter.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

RUN_ID = "harbour"
DEMO = (
    *("--train.total-steps", "720", "--outer.inner-steps", "10", "--eval.every-steps", "40", "--data.hold-out", "0.02"),
    *("--ckpt.path", "checkpoints", "--ckpt.every-rounds", "8", "--observe.report", "false"),
)
"""Many short rounds make smooth curves; with held-out samples and checkpoints nothing on the page is empty."""

WIDTH, HEIGHT = 1280, 900
PATIENCE_S = 900.0
COLOURS = 256
CHROMIUM = ("chromium", "google-chrome", "chromium-browser")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]

State = Mapping[str, Any]


def is_whole(state: State) -> bool:
    """Whether all nodes train, after some rounds, and have measured their links."""
    rates = [link["mbit_s"] for link in state["links"]]
    trains = {node["state"] for node in state["nodes"]} == {"training"}
    return trains and (state["run"]["round"] or 0) >= 12 and len(rates) == 12 and None not in rates


def is_short(state: State) -> bool:
    """Whether a node is lost."""
    return any(node["state"] == "lost" for node in state["nodes"])


def is_healed(state: State) -> bool:
    """Whether all nodes have finished, one of them in its second life, and there is a sample."""
    nodes = state["nodes"]
    is_over = {node["state"] for node in nodes} == {"finished"}
    return is_over and any(node["starts"] > 1 for node in nodes) and state["sample"] is not None


SCENES: Mapping[str, Callable[[State], bool]] = {"start": is_whole, "kill": is_short, "healed": is_healed}


@contextmanager
def started(folder: Path, module: str, *arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A command of the package in this folder."""
    command = [sys.executable, "-m", f"zeroband.tools.{module}", *arguments]
    with subprocess.Popen(command, cwd=folder, text=True, **options) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextmanager
def opened(folder: Path, page: Page) -> Iterator[None]:
    """The page of the run in this folder."""
    with started(folder, "board", f"runs/{RUN_ID}", "--port", "0", stdout=subprocess.PIPE) as board:
        assert board.stdout is not None
        page.goto(board.stdout.readline().split(" is at ")[1].split()[0])
        yield


def wait_until(page: Page, holds: Callable[[State], bool]) -> None:
    """Ask the board until its run is so, and the page shows it. Raises TimeoutError."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        state = page.evaluate("fetch('/api/state').then(answer => answer.json())")
        shown = page.evaluate("[...document.querySelectorAll('.node')].map(card => card.dataset.state)")
        if holds(state) and sorted(shown) == sorted(node["state"] for node in state["nodes"]):
            return
        page.wait_for_timeout(200)
    raise TimeoutError(f"not within {PATIENCE_S:g} s: {holds.__doc__}")


def take(page: Page, path: Path) -> None:
    """Write all that the page shows, with few colours: a picture for documents."""
    page.wait_for_timeout(5000)  # curves are asked for every four seconds
    page.set_viewport_size({"width": WIDTH, "height": page.evaluate("document.documentElement.scrollHeight")})
    page.wait_for_timeout(500)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    few = picture.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})


def main(argv: Sequence[str]) -> int:
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if len(argv) != 1 or chromium is None:
        print(__doc__, file=sys.stderr)
        return 2
    folder, env = Path(argv[0]).resolve(), {**os.environ, "ZERO_BAND_RUN__ID": RUN_ID}
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=chromium, args=FLAGS).new_page()
        page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        with started(Path(place), "demo", *DEMO, env=env) as demo:
            with opened(Path(place), page):
                for name in ("start", "kill"):
                    wait_until(page, SCENES[name])
                    take(page, folder / f"board-{name}.png")
            demo.wait(PATIENCE_S)
        with opened(Path(place), page):
            wait_until(page, SCENES["healed"])
            take(page, folder / "board-healed.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
