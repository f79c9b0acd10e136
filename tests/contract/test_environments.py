"""Every start, whatever the environment holds: it begins, or ends with an error of the user that names a variable."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zeroband.config import load_config
from zeroband.errors import ConfigError
from zeroband.node.launch import parse
from zeroband.node.launched import local_rank, local_world_size, rank_and_world_size, require_one_task

LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("PET_NNODES", "PET_NPROC_PER_NODE", "PET_MAX_RESTARTS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"),
)
KEYS = (
    *("RUN__ID", "RUN__TOKEN", "RUN__DIR", "NODE__ID", "NODE__PORT", "STORE__URL", "STORE__PEERS", "LOG_LEVEL"),
    *("MODEL", "MODEL__D_MODEL", "MODEL__TYPE", "DATA__SOURCE", "DATA__SOURCES", "DATA__SEQ_LENGTH", "DATA__HOLD_OUT"),
    *(
        "TRAIN__MICRO_BS",
        "TRAIN__DTYPE",
        "OPTIM__ADAMW__BETAS",
        "OPTIM__SCHEDULE",
        "OUTER",
        "OUTER__TYPE",
        "CKPT__PATH",
    ),
    *(
        "CKPT__SHARED",
        "FAULT__DETECT_S",
        "FAULT__INJECT",
        "EVAL",
        "OBSERVE__LOG_EVERY_STEPS",
        "NOTHING",
        "",
        "RUN__ID__X",
    ),
)
OF_TORCHRUN = tuple(name for name in LAUNCHERS if name.startswith("PET_"))
NUMBERS = st.sampled_from(["0", "1", "2", "8", "-1", "1.5", "1e99", "nan", "inf", "7" * 5000, " 3", "٣", "0x2"])
OTHERS = st.sampled_from(
    [
        "",
        " ",
        "none",
        "true",
        "diloco",
        "byte",
        "[]",
        "{}",
        "[" * 3000,
        '{"type": "text"}',
        '{"a":',
        '["a", 1]',
        "\ud800",
    ]
)
VALUES = st.one_of(NUMBERS, OTHERS, st.text(st.characters(blacklist_characters="\0"), max_size=12))


def can_be_set(value: str) -> bool:
    """Whether the environment of a process can hold it: of the surrogates it has those that stand for bytes."""
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return True


def refusal(start: Callable[[], object]) -> str:
    """What a start is refused with; empty: it is not. Any other error fails the test."""
    try:
        start()
    except ConfigError as error:
        return str(error) or "no word"
    return ""


@settings(max_examples=150)
@given(environ=st.dictionaries(st.sampled_from(LAUNCHERS), VALUES, max_size=6))
@example(environ={"RANK": "0"})
@example(environ={"SLURM_STEP_NUM_TASKS": "7" * 5000, "SLURM_STEP_NUM_NODES": "1"})
@example(environ={"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"})
def test_what_launchers_leave_behind_is_used_or_named(environ: Mapping[str, str]) -> None:
    said = refusal(lambda: require_one_task(environ, are_told_apart=False))
    said = refusal(lambda: rank_and_world_size(environ)) or said
    assert not said or any(name in said for name in environ)
    if not said:
        rank, ranks = rank_and_world_size(environ)
        assert 0 <= rank == local_rank(environ) < ranks == local_world_size(environ)


@settings(max_examples=100)
@given(environ=st.dictionaries(st.sampled_from(OF_TORCHRUN), VALUES.filter(can_be_set), min_size=1))
def test_what_torchrun_reads_of_its_environment_is_used_or_named(environ: Mapping[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        said = refusal(lambda: parse(["@debug/normal"]))
    assert not said or any(name in said for name in environ)


@settings(max_examples=150)
@given(environ=st.dictionaries(st.sampled_from(KEYS).map("ZERO_BAND_{}".format), VALUES, max_size=4))
def test_settings_of_the_environment_are_used_or_refused(environ: Mapping[str, str]) -> None:
    assert refusal(lambda: load_config(["@debug/normal"], environ=environ)) != "no word"
