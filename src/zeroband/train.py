"""One rank of the trainer, from arguments to exit code. Loads torch only after the configuration is validated.

    zeroband launch --nproc_per_node 2 src/zeroband/train.py @configs/debug/normal.toml --train.micro_bs 4

Start it once on every machine; with [outer] and store.url the machines train one model together.
SIGTERM, SIGUSR1 or SIGHUP asks a node to leave: within `fault.grace_s` it hands over its update, or returns its
samples, and exits with 0. A second signal ends it at once.
Exit codes: 0 done, or left as asked; 2 wrong configuration, or refused at join; 3 the machine lacks what the
configuration needs; 4 updates stayed non-finite; 130 after Ctrl-C; 143 after a second SIGTERM or SIGUSR1; 1 anything
else. torchrun turns every failure of its ranks into 1.
"""

from __future__ import annotations

if __name__ == "__main__":  # torch takes seconds to load
    from zeroband.node.launched import exit_on_signals
    from zeroband.node.process_start import load_unwinder, open_standard_streams

    open_standard_streams()
    load_unwinder()
    exit_on_signals()

import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from zeroband.checks.checklist import asked_config, quick_checks
from zeroband.checks.finding import require_start
from zeroband.checks.memory import gpu_memory, out_of_gpu_memory
from zeroband.checks.needs import Needs
from zeroband.config import RunConfig
from zeroband.elastic.membership.departure import Departure
from zeroband.errors import ConfigError, LearnsNothing, Leaving, MachineUnfit, RunOver, ZerobandError
from zeroband.node.launched import (
    RANKS_FILE,
    exit_on_signals,
    local_rank,
    local_world_size,
    rank_and_world_size,
    require_one_task,
    torch_variable_errors,
    use_expandable_segments,
    write_torchrun_error,
)
from zeroband.node.names import named, node_dir_of, node_id_of
from zeroband.node.process_start import ensure_home, ignore_closed_streams, load_uncollected
from zeroband.node.processes import end_with_parent
from zeroband.node.processors import share_processors
from zeroband.observe.log import get_logger, setup_logging
from zeroband.runtime.signals import SignalHandling

_EXIT_FAILED = 1
_EXIT_CODES: dict[type[ZerobandError], int] = {
    RunOver: 0,
    Leaving: 0,
    MachineUnfit: 3,
    ConfigError: 2,
    LearnsNothing: 4,
}
_FIRST_RANK_SPEAKS_S = 10.0

_log = get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Train with these arguments. Returns the exit code."""
    code = _main(argv)
    gc.collect()  # an error's frames hold process groups, whose threads can abort the exiting process
    return code


def _main(argv: Sequence[str] | None) -> int:
    ignore_closed_streams(stdout=True)
    die_with_launcher()
    exit_on_signals()
    use_expandable_segments(os.environ)
    try:
        rank, ranks = rank_and_world_size(os.environ)
    except ConfigError as error:  # printed by each process, as ranks are unknown
        say(f"zeroband: {error}")
        return _EXIT_CODES[ConfigError]
    if (said := ensure_home(os.environ)) and rank == 0:
        say(said)
    try:
        asked = asked_config(sys.argv[1:] if argv is None else argv)
        require_one_task(os.environ, are_told_apart=_is_named(asked))
        share_processors(os.environ, ranks=local_world_size(os.environ))
        is_only_process = ranks == 1 and "TORCHELASTIC_RUN_ID" not in os.environ
        config = named(asked, is_only_process=is_only_process)
        if config is not asked and rank == 0:
            say(f"zeroband: this run is {config.run.id}")
        departure = Departure(config.fault.grace_s)
        with SignalHandling(departure, ranks=ranks, announces="TORCHELASTIC_RUN_ID" not in os.environ) as signals:
            survived = require_start(quick_checks(config, os.environ))
            start_logging(config)
            for finding in survived:
                _log.warning(str(finding))
            with torch_variable_errors():
                loop = load_uncollected("zeroband.runtime.loop")
                survived = require_start(gpu_memory(Needs(config), ranks, rank=rank))
            for finding in survived:
                _log.warning(str(finding))
            try:
                summary = import_module("zeroband.runtime.run_summary").RunSummary(config, departure, say)
                with summary, torch_variable_errors():
                    loop.run(config, departure)
            except RuntimeError as error:  # out of GPU memory, or communication with another rank of this node failed
                if unfit := out_of_gpu_memory(error, Needs(config), ranks):
                    raise unfit from error
                code = signals.exit_code_of_failure()
                if code is None:
                    wait_for_failing_rank(error)
                    raise
                return code
    except ZerobandError as error:
        return explain(error)
    return 0


def wait_for_failing_rank(error: RuntimeError) -> None:
    """If another rank of this node has failed, wait for the launcher to end this one."""
    if rank_and_world_size(os.environ)[1] > 1 and "onnection" in str(error):
        _log.debug("another rank of this node is gone", exc_info=error)
        time.sleep(_FIRST_RANK_SPEAKS_S)


def say(text: str) -> None:
    """Print to the console, in addition to the log."""
    print(text, file=sys.stderr, flush=True)


def start_logging(config: RunConfig) -> None:
    """Log to this rank's file in the node's folder, and to the console. Raises ConfigError if it is not writable."""
    node_dir, number = node_dir_of(config), rank_and_world_size(os.environ)[0]
    try:
        setup_logging(config.log_level, node_id_of(config), number, node_dir / f"rank{number}.log")
    except OSError as error:
        raise ConfigError(
            f"cannot write to {node_dir}: {error.strerror}; set run.dir to a folder that this user may write to"
        ) from error


def explain(error: ZerobandError) -> int:
    """Print why this rank ends, once per node. Returns the exit code.

    The first rank prints; the others wait, because torchrun ends all ranks as soon as one has failed.
    """
    _log.debug("ended by an error", exc_info=error)
    code = next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), _EXIT_FAILED)
    is_first = local_rank(os.environ) == 0
    if code and not is_first:
        time.sleep(_FIRST_RANK_SPEAKS_S)
    message = f"zeroband: {error}"
    if is_first and code and write_torchrun_error(message, os.environ):
        return code
    if code or is_first:
        say(message)
    return code


def die_with_launcher() -> None:
    """Have the kernel kill this process when its launcher dies, so that no orphan keeps training. Linux only."""
    if sys.platform == "linux":
        end_with_parent(signal.SIGKILL)
        if _is_orphan():  # the launcher died before the call
            raise SystemExit(_EXIT_FAILED)


def _is_orphan() -> bool:
    """Whether torchrun is gone, unless it is process 1 of a container. `zeroband launch` ends its ranks itself."""
    if os.getppid() != 1 or "TORCHELASTIC_RUN_ID" not in os.environ or RANKS_FILE in os.environ:
        return False
    return b"torch" not in Path("/proc/1/cmdline").read_bytes()


def _is_named(config: RunConfig) -> bool:
    """Whether the user distinguishes this process from others by node id, or by its own run."""
    return "id" in config.node.model_fields_set or (config.outer is None and "id" in config.run.model_fields_set)


if __name__ == "__main__":
    sys.path.pop(0)  # torchrun puts this folder first, where `data` and `model` would shadow other packages
    sys.exit(main())
