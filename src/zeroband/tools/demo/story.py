"""The script of the demo: start four nodes, kill one, restart it, finish together, print a summary and next steps."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import ExitStack
from enum import Enum
from pathlib import Path

from zeroband.config import RunConfig, load_config
from zeroband.config.outer import RoundsConfig
from zeroband.errors import ConfigError, ZerobandError
from zeroband.node.page import open_page
from zeroband.observe.facts import REPORT_FILE
from zeroband.observe.status import sent_in_words
from zeroband.observe.view import RunView
from zeroband.observe.words import typed
from zeroband.tools.arguments import parser_of
from zeroband.tools.cluster import LocalCluster
from zeroband.tools.cluster.forked import load_server
from zeroband.tools.cluster.interrupts import Interrupts, counted_interrupts
from zeroband.tools.cluster.local import TRAINER
from zeroband.tools.cluster.simulate import asked_cluster
from zeroband.tools.top.command import process_words
from zeroband.tools.top.scene import Note, Scene, notes_of
from zeroband.tools.top.screen import Screen, open_screen

NODES = tuple(f"node{number}" for number in range(4))
VICTIM = "node2"
KILL_AT, RESTART_AT = 0.3, 0.42
"""Fractions of all inner steps. On shared cores the others make up to a third of the steps while the node starts, so it
is back for the last quarter."""

_CONFIG = Path(__file__).parents[4] / "configs" / "demo.toml"
_SAMPLE = "sample.txt"
_PAGE_PORT = 8420
_FRAME_S = 0.25
_DEADLINE_S = 1800.0
_EXIT_FAILED, _EXIT_CONFIG, _EXIT_DIVERGED = 1, 2, 3
_FOR_REAL = """\
To train on several machines, run on one that all others reach at the address HOST:
  uv run zeroband store --host HOST --run-id first
and on every machine, after typing the three lines that it prints:
  uv run zeroband launch @150M
Machines may join later, and the run survives lost ones. This demo with other texts and settings:
  ./scripts/demo.sh --data.source.paths 'my/texts/*.txt' --train.total_steps 1000"""


class DemoFailed(ZerobandError):
    """A node ended unexpectedly."""


class Act(Enum):
    """The phases of the demo, with the text that announces the next one."""

    TOGETHER = f"Next: {VICTIM} is killed with SIGKILL at step {{kill_step}}."
    WITHOUT = f"{VICTIM} is dead, the others continue. Next: it is restarted at step {{restart_step}}."
    BACK = f"{VICTIM} was restarted; it fetches the others' state and trains with them to step {{total_steps}}."


def turning_points(total_steps: int) -> tuple[int, int]:
    """Return the others' steps at which the victim is killed and restarted."""
    return round(KILL_AT * total_steps), round(RESTART_AT * total_steps)


def main(argv: Sequence[str]) -> int:
    """Run the demo. Returns the exit code: 0 if all nodes finished with the same outer state."""
    _, overrides = _parser().parse_known_args(argv)
    try:
        with ExitStack() as stack, counted_interrupts() as interrupts, open_cluster(overrides) as cluster:
            address = open_page(cluster.run_dir, cluster.run_dir, port=_PAGE_PORT, stack=stack)
            if address is not None:
                print(f"Watch it in a browser: {address}\n", flush=True)
            story = Story(cluster, load_config(cluster.arguments, cluster.environment(NODES[0], 1)))
            with open_screen(sys.stdout) as screen:
                story.play(screen, interrupts)
            if interrupts.count:
                return interrupts.exit_code
            run = cluster.view()
            print(f"\n{epilogue(run, cluster.run_dir, took_s=story.took_s)}")
            return 0 if is_one_state(run) else _EXIT_DIVERGED
    except ConfigError as error:
        print(f"zeroband: {error}", file=sys.stderr)
        return _EXIT_CONFIG
    except DemoFailed as error:
        print(f"zeroband: {error}", file=sys.stderr)
        return _EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    return parser_of(
        "demo",
        "Four nodes on this machine train a small model on real text; one is killed and returns. "
        f"Settings: configs/{_CONFIG.name}, overridden by those given here.",
        usage="zeroband demo [@file.toml ...] [--section.key value ...]",
    )


def open_cluster(overrides: Sequence[str]) -> LocalCluster:
    """Return the demo's nodes, not started yet. Raises ConfigError."""
    if not _CONFIG.is_file():
        raise ConfigError(f"no {_CONFIG}: the demo runs from a clone of the repository")
    return asked_cluster(len(NODES), TRAINER, [f"@{_CONFIG}", *overrides])


class Story:
    """Runs the demo."""

    def __init__(self, cluster: LocalCluster, config: RunConfig) -> None:
        self._cluster = cluster
        self._total_steps = config.train.total_steps
        self._kill_step, self._restart_step = turning_points(self._total_steps)
        steps_per_round = config.outer.phase_steps if isinstance(config.outer, RoundsConfig) else 1
        self._total_rounds = -(-self._total_steps // steps_per_round)
        self._started_at_s = time.time()
        self._from_s = time.monotonic()
        self._notes: list[Note] = []
        """What this demo itself did."""
        self._act = Act.TOGETHER
        self._starts: dict[str, tuple[int, float]] = {}
        """Number of starts of each node, and the monotonic time of the last."""

    def play(self, screen: Screen, interrupts: Interrupts) -> None:
        """Run until every node has ended or the user interrupts. Raises DemoFailed."""
        self._say(f"starting {len(NODES)} nodes, each with its own launcher")
        loaded = load_server()
        screen.show(self._scene())
        while not interrupts.count and not loaded.wait(_FRAME_S):
            screen.show(self._scene())
        for node_id in () if interrupts.count else NODES:
            self._start(node_id)
        while not interrupts.count:
            is_over = not self._cluster.running
            scene = self._scene()
            screen.show(scene)
            if is_over:
                if not has_returned(scene.run):
                    raise self._too_short
                return
            self._check(scene.run)
            self._advance(scene.run.step)
            time.sleep(_FRAME_S)

    def _scene(self) -> Scene:
        view = self._cluster.view()
        notes = [*self._notes, *notes_of(view.events, self._started_at_s)]
        return Scene(
            title="zeroband demo",
            run=view,
            elapsed_s=self.took_s,
            node_ids=NODES,
            down=frozenset([VICTIM]) if self._act is Act.WITHOUT else frozenset(),
            total_rounds=self._total_rounds,
            notes=tuple(sorted(notes, key=lambda note: note.at_s)),
            starting=self._starting(view),
            footer=self._act.value.format(
                kill_step=self._kill_step, restart_step=self._restart_step, total_steps=self._total_steps
            ),
        )

    def _say(self, text: str) -> None:
        self._notes.append(Note(time.time() - self._started_at_s, text))

    def _starting(self, run: RunView) -> dict[str, tuple[str, float]]:
        """Describe the nodes whose trainers have recorded nothing since their newest start."""
        if not self._starts:
            return dict.fromkeys(NODES, ("loading torch, once for all nodes", self.took_s))
        starts = {node.node_id: node.starts for node in run.nodes}
        words: dict[str, tuple[str, float]] = {}
        for node_id, (count, from_s) in self._starts.items():
            node = self._cluster.nodes.get(node_id)
            if node is not None and node.is_running and starts.get(node_id, 0) < count:
                words[node_id] = (process_words(node.rank_pids), time.monotonic() - from_s)
        return words

    def _start(self, node_id: str) -> None:
        count, _ = self._starts.get(node_id, (0, 0.0))
        self._starts[node_id] = (count + 1, time.monotonic())
        if count:
            self._cluster.restart(node_id)
        else:
            self._cluster.start(node_id)

    def _advance(self, step: int) -> None:
        """Switch to the next act at its step."""
        if self._act is Act.TOGETHER and step >= self._kill_step:
            self._cluster.nodes[VICTIM].kill()
            self._say(f"SIGKILL: every process of {VICTIM} was killed")
            self._act = Act.WITHOUT
        elif self._act is Act.WITHOUT and step >= self._restart_step:
            self._start(VICTIM)
            self._say(f"{VICTIM} is restarted")
            self._act = Act.BACK

    def _check(self, run: RunView) -> None:
        """Raise DemoFailed if a node failed, the victim can no longer rejoin, or the deadline has passed."""
        for node_id, node in self._cluster.nodes.items():
            is_killed = node_id == VICTIM and self._act is Act.WITHOUT
            if node.exit_code and not is_killed:
                code, tail = node.exit_code, node.console_tail()
                raise DemoFailed(f"{node_id} ended with exit code {code}; the end of {node.console}:\n{tail}")
        is_last = [node.node_id for node in self._cluster.running] == [VICTIM]
        if is_last and not any(node.node_id == VICTIM and node.starts > 1 and node.member_id for node in run.nodes):
            raise self._too_short
        if self.took_s > _DEADLINE_S:
            raise DemoFailed(f"not finished after {_DEADLINE_S:g} s\n{self._cluster.describe()}")

    @property
    def _too_short(self) -> DemoFailed:
        longer = f"--train.total_steps {2 * self._total_steps}"
        return DemoFailed(f"the run finished before {VICTIM} returned; make it longer: {longer}")

    @property
    def took_s(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self._from_s


# -- summary ------------------------------------------------------------------------------------------------------


def final_digests(run: RunView) -> dict[str, str | None]:
    """Return the digest of each node's last outer state; None for a node without one."""
    held = {node.node_id: node.digest for node in run.nodes}
    return {node_id: held.get(node_id) for node_id in NODES}


def has_returned(run: RunView) -> bool:
    """Return whether the victim was in the last round. If not, it was ready again too late, and left with code 0."""
    return any(node.node_id == VICTIM and node.round == run.round for node in run.nodes)


def is_one_state(run: RunView) -> bool:
    """Return whether every node holds the same outer state at the end."""
    digests = set(final_digests(run).values())
    return None not in digests and len(digests) == 1


def epilogue(run: RunView, run_dir: Path, *, took_s: float) -> str:
    """Return the summary that the demo prints at its end, with the first node's sample."""
    first, last = ("-" if loss is None else f"{loss:.3f}" for loss in (run.first_loss, run.loss))
    verdict = f"equal on all {len(NODES)} nodes" if is_one_state(run) else "DIFFERENT: this is a bug"
    lines = [
        f"Done in {took_s:.0f} s.",
        "",
        f"loss         {first} -> {last} nats per token",
        f"sent         {sent_in_words(run)}",
        f"outer state  at the end, {verdict}:",
        *(f"             {node_id}  {digest or 'none'}" for node_id, digest in final_digests(run).items()),
        f"files        {run_dir}",
        f"             show them again: {typed('board', run_dir)} or {typed('status', run_dir)}",
    ]
    if (report := run_dir / REPORT_FILE).exists():
        lines.append(f"report       {report}")
    if (sample := run_dir / NODES[0] / _SAMPLE).exists():
        text = sample.read_text(errors="replace").rstrip()
        lines += ["", "What the model writes:", textwrap.indent(text, "  | ", lambda line: True)]
    return "\n".join([*lines, "", _FOR_REAL])
