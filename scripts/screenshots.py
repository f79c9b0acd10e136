"""Take pictures of a board while a node of its run is lost and comes back.

    .venv/bin/python scripts/screenshots.py docs http://127.0.0.1:8420/

Writes board-start.png, board-kill.png and board-healed.png into the folder: all nodes train, one is lost, all train
again. Start it beside a run that is still whole, such as the demo's. Debian: apt-get install chromium fonts-inter.
"""

from __future__ import annotations

import io
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

SIZE = {"width": 1280, "height": 1660}
PATIENCE_S = 600.0
COLOURS = 256
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]

State = Mapping[str, Any]


def is_whole(state: State) -> bool:
    """Whether all nodes train, after some rounds."""
    return (state["run"]["round"] or 0) >= 3 and {node["state"] for node in state["nodes"]} == {"training"}


def is_short(state: State) -> bool:
    """Whether a node is lost."""
    return any(node["state"] == "lost" for node in state["nodes"])


def is_healed(state: State) -> bool:
    """Whether all nodes train, and one of them for the second time."""
    return is_whole(state) and any(node["starts"] > 1 for node in state["nodes"])


SCENES: Mapping[str, Callable[[State], bool]] = {"start": is_whole, "kill": is_short, "healed": is_healed}


def wait_until(page: Page, holds: Callable[[State], bool]) -> bool:
    """Ask the board until its run is so, and the page shows it; False: not within PATIENCE_S, or it ended before."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        state = page.evaluate("fetch('/api/state').then(answer => answer.json())")
        shown = page.evaluate("[...document.querySelectorAll('.node')].map(card => card.dataset.state)")
        if holds(state) and sorted(shown) == sorted(node["state"] for node in state["nodes"]):
            return True
        if state["run"]["state"] in ("finished", "failed"):
            return False
        page.wait_for_timeout(200)
    return False


def take(page: Page, path: Path) -> None:
    """Write what the page shows, with few colours: a picture for documents."""
    page.wait_for_timeout(500)  # curves are asked for after the state
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


def main(argv: Sequence[str]) -> int:
    chromium = shutil.which("chromium")
    if len(argv) != 2 or chromium is None:
        print(__doc__, file=sys.stderr)
        return 2
    folder, url = Path(argv[0]), argv[1]
    with sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=chromium, args=FLAGS).new_page(viewport=SIZE)
        page.goto(url)
        for name, holds in SCENES.items():
            if not wait_until(page, holds):
                print(f"{url} never showed: {holds.__doc__}", file=sys.stderr)
                return 1
            take(page, folder / f"board-{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
