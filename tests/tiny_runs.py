"""The smallest runs of nodes that are real processes: their settings, and how a test waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from zeroband.tools.cluster import LocalCluster
from zeroband.tools.cluster.forked import forked_if_possible

DEADLINE_S = 120.0

TINY_MODEL = ("--model.d-model", "32", "--model.n-layers", "1", "--model.n-heads", "2", "--model.d-ff", "64")
TINY_RUN = (
    *TINY_MODEL,
    *("--data.seq-length", "32", "--data.hold-out", "0", "--data.source.type", "synthetic"),
    *("--data.source.documents", "200", "--train.dtype", "float32", "--train.threads", "1"),
    *("--train.batch-size", "4", "--train.micro-bs", "4"),
)
ENDLESS = ("--train.total-steps", "1000000")
"""No end of its own: the run lasts as long as its test lets it."""

ForkedCluster = partial(LocalCluster, node=forked_if_possible)
"""A LocalCluster whose nodes start in a tenth of the time. Not for a script that changes modules before they load."""


def until(cluster: LocalCluster, is_so: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end_s, f"not so: {what}\n{cluster.describe()}"
        time.sleep(0.05)
