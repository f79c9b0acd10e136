"""Run the demo and keep its screen as a picture.

    .venv/bin/python scripts/draw_demo.py docs/demo.svg [--section.key value ...]

Shows the last moment at which all nodes train, so after one was killed and came back. Arguments behind the picture's
path override configs/demo.toml.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from zeroband.config import load_config
from zeroband.tools.cluster.interrupts import counted_interrupts
from zeroband.tools.demo.story import NODES, Story, open_cluster
from zeroband.tools.top.scene import Scene
from zeroband.tools.top.screen import PlainScreen, draw

COLUMNS, LINES = 100, 30
FRAME = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-family: sans-serif; font-size: 18px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""As rich's own frame, without the font that it would fetch from a server."""


class Camera(PlainScreen):
    """The demo's plain lines, and the newest scene worth a picture."""

    taken: Scene | None = None

    def show(self, scene: Scene) -> None:
        super().show(scene)
        training = [node for node in scene.run.nodes if node.state == "training"]
        if len(training) == len(NODES) and any(node.starts > 1 for node in training):
            self.taken = scene


def picture(scene: Scene) -> str:
    """The scene as an SVG of a terminal."""
    console = Console(file=io.StringIO(), record=True, width=COLUMNS, force_terminal=True, color_system="truecolor")
    console.print(draw(scene, COLUMNS, LINES))
    return console.export_svg(title="./scripts/demo.sh", theme=MONOKAI, code_format=FRAME, unique_id="demo")


def main(argv: Sequence[str]) -> int:
    if not argv:
        print(__doc__, file=sys.stderr)
        return 2
    with counted_interrupts() as interrupts, open_cluster(argv[1:]) as cluster, Camera(sys.stdout) as camera:
        Story(cluster, load_config(cluster.arguments, cluster.environment(NODES[0], 1))).play(camera, interrupts)
    if camera.taken is None:
        print("the demo ended before its nodes were together again", file=sys.stderr)
        return 1
    Path(argv[0]).write_text(picture(camera.taken), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
