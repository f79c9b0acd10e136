"""`zeroband launch --nproc-per-node N [SCRIPT] ...`: starts and supervises the ranks of a node on this machine.

Without a SCRIPT the ranks train: `zeroband launch --nproc-per-node N @150M ...`. Takes torchrun's single-node options,
but opens no port: the ranks meet in an unnamed file, whereas torchrun's store is open to the whole network. A script
that calls torch's `init_process_group` itself finds a free local port in MASTER_PORT, as under torchrun. Ends as
Docker, Slurm and systemd expect: the first SIGTERM or SIGUSR1 makes the ranks hand over their work and leave (exit code
0, or `--exit-code-left`); a second one ends them at once (143). No rank outlives its launcher.

With `--nnodes` 2 or more, one launcher on each machine, the machines are one node (`node/machines.py`). The node ends
with any of them.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from zeroband.errors import ConfigError
from zeroband.node.gpus import visible_gpus
from zeroband.node.launched import LEAVING_SIGNALS, MACHINES, RANKS_FILE, LeaveRequests, is_count, say
from zeroband.node.machines import DONE, LEAVE, ONE_MACHINE, MachineLink, MachineLost, Place, Word
from zeroband.node.process_start import ignore_closed_streams, load_unwinder, open_standard_streams
from zeroband.node.processes import Child, start_child
from zeroband.node.processors import share_processors, usable_processors

_TIMEOUT_S = 30.0
"""Seconds between the signal that ends a rank at once, and SIGKILL."""
_LOST_TIMEOUT_S = 2.0
"""Shorter once a machine of the node is lost: the ranks then wait for one another in vain."""
_POLL_S = 0.05
_EXIT_FAILED, _EXIT_CONFIG, _EXIT_LEARNS_NOTHING = 1, 2, 4
_EXITS_AGAIN = (_EXIT_CONFIG, _EXIT_LEARNS_NOTHING)
"""Exit codes that a restart would most likely repeat."""

_RANKS_MEANING = "ranks: a number, gpu, cpu or auto; left out: one for each GPU, or one"
_FROM_TORCHRUN = {"nproc_per_node": "", "max_restarts": "0", "nnodes": "1"}
"""Options that torchrun also reads from the environment, and their defaults."""


@dataclass(frozen=True)
class Launch:
    """The ranks to start, and their command."""

    ranks: int
    max_restarts: int
    command: tuple[str, ...]
    exit_code_left: int = 0
    """Exit code after the node left as a signal asked."""
    place: Place = ONE_MACHINE

    def environment(self, rank: int, restarts: int, *, meeting: int, port: int) -> dict[str, str]:
        """Return the environment of a local rank: torchrun's variables, and the file in which zeroband's ranks meet.

        `meeting`: descriptor of that file; the ranks of several machines meet at `port` of the first one. `port`: also
        for a script that calls torch's `init_process_group` itself.
        """
        number, ranks = self.place.number * self.ranks + rank, self.place.machines * self.ranks
        several = {MACHINES: str(self.place.machines)} if self.place.machines > 1 else {}
        env = dict(os.environ)
        share_processors(env, ranks=self.ranks)
        for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", MACHINES, RANKS_FILE):
            env.pop(name, None)  # set by an outer launcher
        return env | {
            "MASTER_ADDR": self.place.host,
            "MASTER_PORT": str(port),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            **{name: str(number) for name in ("RANK", "ROLE_RANK")},
            **{name: str(ranks) for name in ("WORLD_SIZE", "ROLE_WORLD_SIZE")},
            "GROUP_RANK": str(self.place.number),
            "GROUP_WORLD_SIZE": str(self.place.machines),
            "ROLE_NAME": "default",
            "TORCHELASTIC_RUN_ID": "zeroband",
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            **(several or {RANKS_FILE: f"/proc/self/fd/{meeting}"}),
        }


def main(argv: Sequence[str]) -> int:
    """Run a script according to the arguments, and return the exit code."""
    load_unwinder()
    try:
        return Launcher(parse(argv)).run()
    except ConfigError as error:
        say(str(error))
        return _EXIT_CONFIG


def parse(argv: Sequence[str]) -> Launch:
    """Parse the command line and torchrun's variables. Raises ConfigError."""
    asked, unknown = _parser().parse_known_args(argv)
    ranks, restarts, nodes = (_given(name, getattr(asked, name), os.environ) for name in _FROM_TORCHRUN)
    if unknown:
        raise ConfigError(f"zeroband launch does not take {' '.join(unknown)}: it starts the ranks of one machine")
    place = _place(asked, nodes)
    if not is_count(restarts.value):
        raise ConfigError(f"{restarts} is not a number of restarts: 0 or more{restarts.way_out}")
    count = count_of(ranks.value, said=str(ranks), way_out=ranks.way_out)
    if not 0 <= asked.exit_code_left <= 255:
        raise ConfigError(f"--exit-code-left {asked.exit_code_left} is no exit code: 0 to 255; 75 asks for a restart")
    if asked.script.startswith("@"):
        runs: tuple[str, ...] = (sys.executable, "-u", "-m", "zeroband.train")
    else:
        runs = () if asked.no_python else (sys.executable, "-u", *(("-m",) if asked.module else ()))
    command = (*runs, asked.script, *asked.arguments)
    if place.machines > 1 and int(restarts.value):
        raise ConfigError(
            f"{restarts} does not go with --nnodes {place.machines}: the node ends with a rank or a machine; have the "
            f"service manager of each machine start its launcher again{restarts.way_out}"
        )
    return Launch(count, int(restarts.value), command, asked.exit_code_left, place)


def _place(asked: argparse.Namespace, nodes: Given) -> Place:
    """Return this machine's place in its node; one machine unless `--nnodes` says more. Raises ConfigError."""
    if nodes.value in ("1", "1:1"):
        return ONE_MACHINE
    given = (asked.node_rank, asked.master_addr)
    if nodes.variable or not is_count(nodes.value) or None in given:
        raise ConfigError(
            f"zeroband launch does not take {nodes} alone: start it on every machine without, and join them by [outer] "
            f"and store.url{nodes.way_out}; or make machines of one place one node by --nnodes, --node-rank and "
            "--master-addr"
        )
    machines, number = int(nodes.value), asked.node_rank
    if not 0 <= number < machines:
        raise ConfigError(f"--node-rank {number} is no machine of --nnodes {machines}: 0 to {machines - 1}")
    return Place(number, machines, asked.master_addr, asked.master_port)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zeroband launch",
        description="Start the ranks of this machine, with torchrun's options but without a port.",
        epilog="example: zeroband launch --nproc-per-node gpu @150M --run.id first-try",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nproc-per-node", "--nproc_per_node", metavar="N", help=_RANKS_MEANING)
    add("--max-restarts", "--max_restarts", metavar="N", help="restarts after a failure (0)")
    left = "exit code after a signal asked the node to leave (0); 75 asks schedulers for a restart"
    add("--exit-code-left", "--exit_code_left", type=int, default=0, metavar="CODE", help=left)
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    add("--no-python", "--no_python", action="store_true", help="SCRIPT is a program, not Python")
    add("--nnodes", metavar="N", help="machines of this node, each with a launcher (1)")
    add("--node-rank", "--node_rank", type=int, metavar="R", help="number of this machine in its node, from 0")
    add("--master-addr", "--master_addr", metavar="HOST", help="address of machine 0 for the others of the node")
    add("--master-port", "--master_port", type=int, default=29500, metavar="PORT", help="its launcher's port (29500)")
    add("--standalone", action="store_true", help="accepted for torchrun's sake: always the case")
    add("--local-addr", "--local_addr", metavar="HOST", help="accepted for torchrun's sake: ranks need no port")
    add("script", metavar="[SCRIPT]", help="program of each rank; may be omitted before an @: the trainer")
    add("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


@dataclass(frozen=True)
class Given:
    """The value of an option of torchrun, and its origin. As text: the place where the user would look for it."""

    value: str
    option: str
    variable: str = ""
    """Environment variable that set it; empty if it was on the command line, or is a default."""

    @property
    def way_out(self) -> str:
        """How to unset a variable that somebody else may have set."""
        return f"; unset {self.variable} for it (`env -u {self.variable} zeroband launch ...`)" if self.variable else ""

    def __str__(self) -> str:
        return f"{self.variable}={self.value} of the environment" if self.variable else f"{self.option} {self.value}"


def _given(name: str, value: str | None, environ: Mapping[str, str]) -> Given:
    """Return an option's value. Like torchrun, reads PET_... if it is not on the command line; Kubeflow sets that."""
    option, variable = f"--{name.replace('_', '-')}", f"PET_{name.upper()}"
    if value is None and environ.get(variable):
        return Given(environ[variable], option, variable)
    return Given(_FROM_TORCHRUN[name] if value is None else value, option)


def count_of(ranks: str, *, said: str = "--nproc-per-node", way_out: str = "") -> int:
    """Return the number of ranks of `ranks`: a number, gpu, cpu or auto; empty: one per GPU, or one.

    Raises ConfigError, which begins with `said` and ends with `way_out`.
    """
    gpus = len(visible_gpus(os.environ))
    if not ranks:
        return gpus or 1
    if ranks in ("gpu", "auto"):
        if gpus:
            return gpus
        if ranks == "gpu":
            raise ConfigError(f"{said}: no GPU is visible (nvidia-smi, CUDA_VISIBLE_DEVICES); name a number{way_out}")
    if ranks in ("cpu", "auto"):
        return usable_processors()
    if not is_count(ranks) or int(ranks) < 1:
        raise ConfigError(f"{said} is not a number of ranks: 1 or more, gpu, cpu or auto{way_out}")
    return int(ranks)


class Launcher:
    """Owns the ranks, and this process's signal handlers while they run. Main thread.

    `start`: starts a rank, as `start_child` does.
    """

    def __init__(self, launch: Launch, *, start: Callable[..., Child] = start_child) -> None:
        self._launch, self._start_rank = launch, start
        self._ranks: list[Child] = []
        self._signals: list[int] = []
        """Received, and not handled yet."""
        self._asked = LeaveRequests()
        self._ended_by = 0
        """The signal by which the ranks were ended at once; 0 while they may end on their own."""
        self._kill_at_s = math.inf
        self._link: MachineLink | None = None
        self._lost_code: int | None = None
        """Exit code once a machine of this node is lost, or its ranks failed."""

    def run(self) -> int:
        """Start the ranks, and restart them after failures as often as asked. Returns the exit code."""
        for number in (*LEAVING_SIGNALS, signal.SIGINT):
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._on_signal)
        if self._launch.place.machines > 1:
            self._link = MachineLink(self._launch.place, self._launch.ranks, say)
        try:
            return self._run_with_restarts()
        finally:
            if self._link is not None:
                self._link.close()

    def _run_with_restarts(self) -> int:
        restarts, failed = 0, self._run_once(0)
        while failed is not None and self._should_restart(restarts, self._code(failed)):
            restarts += 1
            say(f"{self._fate(failed)}; restarting the ranks, {restarts} of {self._launch.max_restarts} times")
            failed = self._run_once(restarts)
        if self._ended_by:
            return 128 + self._ended_by
        if self._lost_code is not None:
            return self._lost_code if self._lost_code in _EXITS_AGAIN else _EXIT_FAILED
        if failed is None:
            return self._launch.exit_code_left if self._asked.count else 0
        code = self._code(failed)
        if self._asked.count and code == -signal.SIGTERM:  # killed before its handler was set
            return 128 + signal.SIGTERM
        if code < 0:  # the rank could not report it
            say(self._fate(failed))
        return code if code in _EXITS_AGAIN else _EXIT_FAILED

    def _should_restart(self, restarts: int, code: int) -> bool:
        is_over = self._asked.count > 0 or self._ended_by != 0
        is_over |= code in _EXITS_AGAIN
        return not is_over and restarts < self._launch.max_restarts

    def _run_once(self, restarts: int) -> int | None:
        """Start the ranks and wait for their end. Returns the one that failed first; None if all ended with 0."""
        port = free_port()
        if self._link is not None and not (port := self._link.meet(port, lambda: bool(self._signals))):
            self._ended_by = self._signals[0]
            return None
        self._start(restarts, port)
        failed: int | None = None
        while True:
            codes = [rank.poll() for rank in self._ranks]
            if failed is None:
                failed = next((number for number, code in enumerate(codes) if code), None)
                if failed is not None and self._lost_code is None:
                    self._tell(self._code(failed))
                    self._end(signal.SIGTERM)
            if None not in codes:
                self._tell(DONE)
                return failed
            if failed is None:
                self._hear()
            self._apply_signals()
            if time.monotonic() >= self._kill_at_s:
                self._signal(signal.SIGKILL)
            time.sleep(_POLL_S)

    def _tell(self, word: Word) -> None:
        """Tell the launchers of this node's other machines."""
        if self._link is not None:
            self._link.tell(word)

    def _hear(self) -> None:
        """Do what the other launchers of this node say, and end the ranks if one of them is gone."""
        if self._link is None or self._lost_code is not None:
            return
        try:
            for word in self._link.poll():
                if word == LEAVE and self._asked.add(time.monotonic()):
                    self._signal(signal.SIGTERM)
                if isinstance(word, int):
                    self._end_with_node(word, "another machine of this node ended its ranks")
        except MachineLost as lost:
            self._end_with_node(_EXIT_FAILED, str(lost))

    def _end_with_node(self, code: int, why: str) -> None:
        say(f"{why}; the ranks end here, too")
        self._lost_code = code
        self._end(signal.SIGTERM, within_s=_LOST_TIMEOUT_S)

    def _start(self, restarts: int, port: int) -> None:
        self._kill_at_s = math.inf
        meeting = os.memfd_create("zeroband-ranks")
        try:
            self._ranks = [
                self._start_rank(
                    self._launch.command,
                    env=self._launch.environment(rank, restarts, meeting=meeting, port=port),
                    output=None,
                    death_signal=signal.SIGKILL,
                    pass_fds=(meeting,),
                )
                for rank in range(self._launch.ranks)
            ]
        finally:
            os.close(meeting)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)

    def _apply_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if self._ended_by:
                self._kill_at_s = 0.0
            elif number in LEAVING_SIGNALS and not self._asked.add(time.monotonic()):
                continue
            elif number in LEAVING_SIGNALS and self._asked.count == 1:
                self._tell(LEAVE)
                self._signal(signal.SIGTERM)
            else:
                if number == signal.SIGINT:
                    say("interrupted; the ranks shut down. Ctrl-C again kills them")
                self._ended_by = int(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
                self._tell(_EXIT_FAILED)
                self._end(signal.SIGINT)  # ranks could merge a second SIGTERM with the first

    def _end(self, number: int, *, within_s: float = _TIMEOUT_S) -> None:
        """End all ranks at once; SIGKILL follows after a timeout."""
        self._signal(number)
        self._kill_at_s = time.monotonic() + within_s

    def _signal(self, number: int) -> None:
        for rank in self._ranks:
            rank.send_signal(number)

    def _code(self, rank: int) -> int:
        code = self._ranks[rank].returncode
        assert code is not None, "it has ended"
        return code

    def _fate(self, rank: int) -> str:
        code = self._code(rank)
        if code >= 0:
            return f"rank {rank} ended with exit code {code}"
        hint = "; out of memory?" if code == -signal.SIGKILL else ""
        return f"rank {rank} was ended by {signal.Signals(-code).name}{hint}"


def free_port() -> int:
    """Return a port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    open_standard_streams()
    ignore_closed_streams(stdout=True)
    sys.exit(main(sys.argv[1:]))
