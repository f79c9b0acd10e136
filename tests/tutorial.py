"""A tutorial as somebody would follow it: its blocks in their order, word for word, in terminals of a clone.

What stands behind a block's language says what it is for; neither a forge nor the site shows it.

    ```bash              typed; has to end with 0
    ```bash exit=2       has to end with 2
    ```bash terminal=b   typed in another terminal, while the tutorial goes on; has to end with 0 in the end
    ```bash elsewhere    not run: it needs another machine, or has been done
    ```toml file=NAME    saved under that name; any language
    ```console           what the command before it prints: these lines, in their order, between others. Numbers and
                         hashes may be others, `…` stands for anything

The ports of the tutorials become others that are free.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
LINKED = "configs", "examples", "scripts", "src"
PORTS = "6379", "8420", "9400"
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Block:
    """A fenced block of a tutorial."""

    place: str
    """File and line, for people."""
    language: str
    words: Mapping[str, str]
    text: str


def blocks_of(path: Path) -> list[Block]:
    """The blocks of a tutorial in their order."""
    text = path.read_text(encoding="utf-8")
    found: list[Block] = []
    for match in re.finditer(r"^```(\w+)([^\n]*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        words = {word.partition("=")[0]: word.partition("=")[2] for word in match[2].split()}
        found.append(Block(f"{path.name}:{text.count(chr(10), 0, match.start()) + 1}", match[1], words, match[3]))
    return found


def shows(printed: str, expected: str) -> bool:
    """Whether the lines of a `console` block are among what was printed, in their order."""
    lines = iter([_loosely(line) for line in printed.splitlines()])
    patterns = [".*".join(map(re.escape, _loosely(line).split("…"))) for line in expected.splitlines() if line.strip()]
    return all(any(re.fullmatch(pattern, line) for line in lines) for pattern in patterns)


def _loosely(line: str) -> str:
    return " ".join(re.sub(r"\b(?:[0-9a-f]{8,}|\d[\d.:]*[kMG]?)\b", "#", line).split())


class Terminals:
    """Terminals of one machine, and what was typed in them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._terminals: dict[str, subprocess.Popen[str]] = {}
        self._typed: list[tuple[Block, Path]] = []
        for name in LINKED:
            (folder / name).symlink_to(ROOT / name)
        (folder / ".venv").symlink_to(Path(sys.prefix), target_is_directory=True)
        self._blocks = folder / "blocks"
        self._blocks.mkdir()
        with ExitStack() as stack:  # all at once, so that they differ
            probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in PORTS]
            self._ports = dict(zip(PORTS, (str(probe.getsockname()[1]) for probe in probes), strict=True))
        self._env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "ZERO_BAND_TRAIN__THREADS": "1",
            "ZERO_BAND_TRAIN__DEVICE": "cpu",
            "ZERO_BAND_FAULT__INJECT": "inner@+0=TAKES0.02",  # most of a step is sleep, so that CI has the cores
        }

    def follow(self, *paths: Path) -> None:
        """Do what tutorials say, one after the other. Raises AssertionError where it comes out otherwise."""
        for path in paths:
            for block in blocks_of(path):
                if "file" in block.words:
                    (self._folder / block.words["file"]).write_text(block.text, encoding="utf-8")
                elif "elsewhere" in block.words:
                    continue
                elif block.language == "bash":
                    self._type(block)
                elif block.language == "console":
                    self._expect(block)
                else:
                    raise AssertionError(f"{block.place}: {block.language} is neither run nor saved nor for elsewhere")
        for block, name in self._typed:
            self._until_ended(block, name)

    def _type(self, block: Block) -> None:
        name = self._blocks / f"{len(self._typed)}"
        text = re.sub("|".join(PORTS), lambda port: self._ports[port[0]], block.text)
        name.with_suffix(".sh").write_text(text, encoding="utf-8")
        self._typed.append((block, name))
        stdin = self._terminal(block.words.get("terminal", "")).stdin
        assert stdin is not None
        stdin.write(f". {name}.sh > {name}.out 2>&1; echo $? > {name}.tmp; mv {name}.tmp {name}.rc\n")
        stdin.flush()
        if "terminal" not in block.words:
            self._until_ended(block, name)

    def _terminal(self, name: str) -> subprocess.Popen[str]:
        if name not in self._terminals:
            self._terminals[name] = subprocess.Popen(
                ["bash"], stdin=subprocess.PIPE, text=True, cwd=self._folder, env=self._env, start_new_session=True
            )
        return self._terminals[name]

    def _until_ended(self, block: Block, name: Path) -> None:
        ended = name.with_suffix(".rc")
        self._wait(ended.exists, f"{block.place} has not ended")
        code, expected = ended.read_text().strip(), block.words.get("exit", "0")
        assert code == expected, f"{block.place} ended with {code}, not {expected}\n{self._told()}"

    def _expect(self, block: Block) -> None:
        """The command may be at it still, in another terminal."""
        command, name = self._typed[-1]
        out, ended = name.with_suffix(".out"), name.with_suffix(".rc")

        def is_decided() -> bool:
            has_ended = ended.exists()
            return (out.exists() and shows(out.read_text(), block.text)) or has_ended

        self._wait(is_decided, f"{block.place} is not what {command.place} printed")
        assert shows(out.read_text(), block.text), f"{block.place} is not what was printed\n{self._told()}"

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < end_s, f"{what} within {DEADLINE_S:g} s\n{self._told()}"
            time.sleep(0.02)

    def _told(self) -> str:
        said = [(block, name.with_suffix(".out")) for block, name in self._typed[-6:]]
        return "\n".join(f"-- {block.place}\n{out.read_text()[-2000:] if out.exists() else ''}" for block, out in said)

    def close(self) -> None:
        """End what is left, by the sessions that the terminals began."""
        for terminal in self._terminals.values():
            with suppress(ProcessLookupError):
                os.killpg(terminal.pid, signal.SIGKILL)
            terminal.communicate(timeout=10)


@contextmanager
def terminals(folder: Path) -> Iterator[Terminals]:
    opened = Terminals(folder)
    try:
        yield opened
    finally:
        opened.close()
