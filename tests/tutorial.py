"""A tutorial as somebody would follow it: its blocks in their order, word for word, in terminals of machines.

What stands behind a block's language says what it is for; neither a forge nor the site shows it.

    ```bash              typed; has to end with 0
    ```bash exit=2       has to end with 2
    ```bash terminal=b   typed in another terminal, while the tutorial goes on; has to end with 0 in the end
    ```bash types=store  typed behind the lines that begin with `export` in what the terminal `store` printed
    ```bash elsewhere    not run: it needs another machine, or has been done
    ```text terminal=b   Ctrl-C, pressed in that terminal
    ```toml file=NAME    saved under that name on every machine; any language
    ```console           what the command before it prints: these lines, in their order, between others. Numbers and
                         hashes may be others, `…` stands for anything

The ports of the tutorials become others that are free, and on several machines the address of the first one is its own.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tests.hosts import hosts

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
LINKED = "configs", "examples", "scripts", "src"
PORTS = "8420", "9400"
ADDRESS = "127.0.0.1"
"""Of the first machine, in the tutorials."""
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Block:
    """A fenced block of a tutorial."""

    place: str
    """File and line, for people."""
    language: str
    words: Mapping[str, str]
    text: str

    def only(self, command: str, **words: str) -> Block:
        """Its line that has this command, with other words behind the language."""
        (text,) = [line for line in self.text.splitlines(keepends=True) if f" {command} " in line]
        return replace(self, text=text, words={**self.words, **words})

    def after(self, line: str) -> Block:
        """It, typed behind a line."""
        return replace(self, text=f"{line}\n{self.text}")


def blocks_of(path: Path) -> list[Block]:
    """The blocks of a tutorial in their order."""
    return blocks_in(path.read_text(encoding="utf-8"), path.name)


def blocks_in(text: str, name: str) -> list[Block]:
    """The blocks of a text in their order. `name`: of its file."""
    found: list[Block] = []
    for match in re.finditer(r"^```(\w+)([^\n]*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        words = {word.partition("=")[0]: word.partition("=")[2] for word in match[2].split()}
        found.append(Block(f"{name}:{text.count(chr(10), 0, match.start()) + 1}", match[1], words, match[3]))
    return found


def shows(printed: str, expected: str) -> bool:
    """Whether the lines of a `console` block are among what was printed, in their order."""
    lines = iter([_loosely(line) for line in printed.splitlines()])
    patterns = [".*".join(map(re.escape, _loosely(line).split("…"))) for line in expected.splitlines() if line.strip()]
    return all(any(re.fullmatch(pattern, line) for line in lines) for pattern in patterns)


def _loosely(line: str) -> str:
    return " ".join(re.sub(r"\b(?:[0-9a-f]{8,}|\d[\d.:]*[kMG]?)\b", "#", line).split())


@dataclass(frozen=True)
class Machine:
    """A folder with what a clone has, which is HOME as well. `prefix`: before a command to run it there."""

    folder: Path
    inside: Path
    """The same folder, as its own processes see it."""
    prefix: tuple[str, ...] = ()

    def fill(self) -> None:
        for name in LINKED:
            (self.folder / name).symlink_to(ROOT / name)
        (self.folder / ".venv").symlink_to(Path(sys.prefix), target_is_directory=True)
        (self.folder / "blocks").mkdir()


class Terminals:
    """Terminals of machines, and what was typed in them.

    `machines`: by terminal; "" has those that are not named. `replaced`: texts that are others here than in a tutorial.
    """

    def __init__(
        self, machines: Mapping[str, Machine], replaced: Mapping[str, str], env: Mapping[str, str] | None = None
    ) -> None:
        self._machines = machines
        self._terminals: dict[str, subprocess.Popen[str]] = {}
        self._typed: list[tuple[Block, Path]] = []
        self._replaced = replaced
        self._env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "ZERO_BAND_TRAIN__THREADS": "1",
            "ZERO_BAND_TRAIN__DEVICE": "cpu",
            "ZERO_BAND_FAULT__INJECT": "inner@+0=TAKES0.02",  # most of a step is sleep, so that CI has the cores
            **(env or {}),
        }
        for machine in {machine.folder: machine for machine in machines.values()}.values():
            machine.fill()

    def _machine(self, terminal: str) -> Machine:
        return self._machines.get(terminal, self._machines[""])

    def follow(self, *paths: Path) -> None:
        """Do what tutorials say, one after the other. Raises AssertionError where it comes out otherwise."""
        for path in paths:
            for block in blocks_of(path):
                if "file" in block.words:
                    for machine in self._machines.values():
                        (machine.folder / block.words["file"]).write_text(block.text, encoding="utf-8")
                elif "elsewhere" in block.words:
                    continue
                elif block.language == "bash":
                    self.type(block)
                elif block.language == "text":
                    self.press_ctrl_c(block.words["terminal"])
                elif block.language == "console":
                    self.expect(block)
                else:
                    raise AssertionError(f"{block.place}: {block.language} is neither run nor saved nor for elsewhere")
        self.wait_for_all()

    def wait_for_all(self) -> None:
        """Wait until what was typed anywhere has ended. Raises AssertionError where it ended otherwise than said."""
        self.wait_for(*self._terminals)

    def wait_for(self, *terminals: str) -> None:
        """The same, of what was typed in some terminals."""
        for block, name in self._typed:
            if block.words["terminal"] in terminals:
                self._until_ended(block, name)

    def output(self, terminal: str = "") -> str:
        """What the last block that was typed in a terminal has printed."""
        return self._last(terminal).with_suffix(".out").read_text()

    def _last(self, terminal: str) -> Path:
        return next(name for block, name in reversed(self._typed) if block.words["terminal"] == terminal)

    def type(self, block: Block, terminal: str | None = None) -> None:
        """Type a block, and wait for its end where it is in no terminal of a name. `terminal`: another than its own."""
        terminal = block.words.get("terminal", "") if terminal is None else terminal
        machine = self._machine(terminal)
        number = f"blocks/{len(self._typed)}"
        text = re.sub("|".join(map(re.escape, self._replaced)), lambda match: self._replaced[match[0]], block.text)
        if "types" in block.words:
            text = "".join(self.printed(block.words["types"])) + text
        (machine.folder / number).with_suffix(".sh").write_text(text, encoding="utf-8")
        stdin, name = self._terminal(terminal).stdin, machine.inside / number
        typed = replace(block, text=text, words={**block.words, "terminal": terminal})
        self._typed.append((typed, machine.folder / number))
        assert stdin is not None
        stdin.write(f". {name}.sh > {name}.out 2>&1; echo $? > {name}.tmp; mv {name}.tmp {name}.rc\n")
        stdin.flush()
        if not terminal:
            self._until_ended(*self._typed[-1])

    def printed(self, terminal: str) -> list[str]:
        """The lines to be typed elsewhere that a terminal printed last, when they are there."""
        out, found = self._last(terminal).with_suffix(".out"), list[str]()

        def are_there() -> bool:
            lines = out.read_text().splitlines(keepends=True) if out.exists() else []
            found[:] = [line for line in lines if line.startswith("export ")]
            return len(found) == 3

        self._wait(are_there, f"terminal {terminal} does not print what is typed elsewhere")
        return found

    def press_ctrl_c(self, terminal: str) -> None:
        """End what runs in a terminal's foreground."""
        shell = self._terminals[terminal].pid
        for child in Path(f"/proc/{shell}/task/{shell}/children").read_text().split():
            os.kill(int(child), signal.SIGINT)

    def _terminal(self, name: str) -> subprocess.Popen[str]:
        if name not in self._terminals:
            machine = self._machine(name)
            env = {**self._env, "HOME": str(machine.inside), "TMPDIR": str(machine.inside)}
            self._terminals[name] = subprocess.Popen(
                [*machine.prefix, "bash"], stdin=subprocess.PIPE, text=True, env=env, start_new_session=True
            )
            stdin = self._terminals[name].stdin
            assert stdin is not None
            stdin.write(f"cd {machine.inside}\n")
        return self._terminals[name]

    def _until_ended(self, block: Block, name: Path) -> None:
        ended = name.with_suffix(".rc")
        self._wait(ended.exists, f"{block.place} has not ended")
        code, expected = ended.read_text().strip(), block.words.get("exit", "0")
        assert code == expected, f"{block.place} ended with {code}, not {expected}\n{self._told()}"

    def expect(self, block: Block) -> None:
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
def opened(
    machines: Mapping[str, Machine], replaced: Mapping[str, str], env: Mapping[str, str] | None = None
) -> Iterator[Terminals]:
    """Terminals, until the context ends."""
    found = Terminals(machines, replaced, env)
    try:
        yield found
    finally:
        found.close()


@contextmanager
def terminals(folder: Path, env: Mapping[str, str] | None = None) -> Iterator[Terminals]:
    """Terminals of this machine alone."""
    with ExitStack() as stack:  # all at once, so that they differ
        probes = [stack.enter_context(socket.create_server((ADDRESS, 0))) for _ in ("store", *PORTS)]
        store, *ports = [str(probe.getsockname()[1]) for probe in probes]
    replaced = {"zeroband store": f"zeroband store --port {store}", **dict(zip(PORTS, ports, strict=True))}
    with opened({"": Machine(folder, folder)}, replaced, env) as found:
        yield found


@contextmanager
def two_hosts(
    folder: Path,
    second: Collection[str],
    *,
    hostnames: Sequence[str] = ("one", "two"),
    env: Mapping[str, str] | None = None,
) -> Iterator[Terminals]:
    """Terminals of two machines without a common disk. `second`: those of the second one."""
    with hosts(folder, hostnames) as found:
        one, two = (Machine(host.folder, host.disk, tuple(host.prefix)) for host in found)
        machines = {"": one, **dict.fromkeys(second, two)}
        with opened(machines, {ADDRESS: found[0].address, "10.0.0.1": found[0].address}, env) as typed:
            yield typed
