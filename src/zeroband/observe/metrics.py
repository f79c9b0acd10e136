"""Metrics: the one table of names and units, and the log that writes them. Local rank 0, main thread."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zeroband.observe.events import EVENTS, EVENTS_FILE
from zeroband.observe.sinks import MetricValue, RecordLog, Sink
from zeroband.observe.words import markdown_table

METRICS_FILE = "metrics.jsonl"
"""Name of the file inside a node's folder of the run directory."""

_HEAD = """\
# Metrics and events

Made by `python -m zeroband.observe.metrics > docs/metrics.md` from the tables in
`src/zeroband/observe/`; a test keeps it in step.

Every node writes two files into `<run.dir>/<run.id>/<node id>/`. They are the truth about a run: the console, Weights &
Biases, the demo and `zeroband status` show what is in them. Each line is one JSON object, written with one system call,
so a killed node leaves whole lines. A node that starts again appends. The line of an inner step is written when the
next one is under way, with an outer step at once.

- `at_s`: wall clock of the node in seconds since 1970, for people. No two nodes' clocks are ever compared.
- Numbers that JSON lacks are the strings `"nan"`, `"inf"` and `"-inf"`.
- A member id is `<node id>#<incarnation>.<public key>`: a node that comes back is another member, with the same key.
"""


_SERIES_HEAD = """\
## `/metrics`

With `[observe.prometheus]` ([operations.md](operations.md#watching-with-prometheus)) a node exports every metric of the
first table under the name in its last column, and these as well. All have the labels `run` and `node`, those of a
source `source`. A name that ends with `_total` adds up what is in the lines since this trainer started, and is 0 again
when it starts again, and so are histograms; the others show the newest line that had them. `nan` and infinities are
what Prometheus has for them.
"""

_CONVENTIONS = """\
Names follow [Prometheus's conventions](https://prometheus.io/docs/practices/naming/) but for these:

- `zeroband_train_tokens` and `zeroband_step` are gauges: the run's figures fall where it goes back to a checkpoint;
  `zeroband_tokens_total` and `zeroband_steps_total` are this trainer's own, which only grow.
- `zeroband_train_loss`, `zeroband_eval_loss` and `..._bits_per_byte` have the units of the field, by which it compares.
- `zeroband_outer_digest` has none: the first 12 hexadecimal digits of the digest as a number, to compare nodes by.
- `zeroband_train_tokens_per_second` and `zeroband_train_mfu_ratio` are what the console and the page show;
  `rate(zeroband_tokens_total[5m])` gives the mean over any time.
- `zeroband_node_up` is the node's own word; where nothing answers, `up` of the scrape is 0, and it is absent.
- `zeroband_comm_bytes_total` lacks `{dir="sent",kind="state"}`: who fetches a state counts it, who serves it does not.
"""


@dataclass(frozen=True)
class Metric:
    """What a number means to its reader."""

    unit: str
    meaning: str
    adds_up: bool = False
    """Whether a reader adds the numbers of all lines up, instead of taking the newest."""
    series: str | None = None
    """Its name in Prometheus, where it differs from what `prometheus_name` makes of the metric's own."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """What tells it from the other metrics of that series."""


METRICS: Mapping[str, Metric] = {
    "train/loss": Metric("nats/token", "Mean cross entropy of this node's batch, without z-loss."),
    "train/loss/<source>": Metric(
        "nats/token",
        "train/loss of one of data.sources, by its name; absent where the step had no target of it, or the model has a "
        "different loss.",
    ),
    "train/perplexity": Metric("1", "exp(train/loss)."),
    "train/lr": Metric("1", "Learning rate of the inner optimizer in this step."),
    "train/lr_muon": Metric("1", "Learning rate of Muon's matrices in this step, where optim.muon.lr sets one apart."),
    "train/grad_norm": Metric("1", "Global norm of the gradient before clipping."),
    "train/tokens": Metric(
        "tokens", "Tokens trained on in the whole run: all nodes' committed ones and this node's since."
    ),
    "train/tokens_per_s": Metric("tokens/s", "Tokens of this node for each second of this step, waits included."),
    "train/step_s": Metric("s", "Duration of this inner step, outer step included.", adds_up=True),
    "train/data_s": Metric("s", "Part of it spent on waiting for data.", adds_up=True),
    "train/mfu": Metric(
        "ratio", "Model FLOP/s of this node over the bfloat16 peak of its GPUs; absent where that is unknown."
    ),
    "outer/round": Metric("index", "Newest committed round; 0 is the founding of the run."),
    "outer/epoch": Metric(
        "index", "Number of the membership in which it was committed.", series="zeroband_membership_epoch"
    ),
    "outer/nodes": Metric("nodes", "Members of that epoch."),
    "outer/digest": Metric("hex", "Digest of the outer state after that round; equal on all members."),
    "outer/blocked_s": Metric(
        "s", "Part of the step in which training stood still for the outer algorithm.", adds_up=True
    ),
    "outer/wait_s": Metric(
        "s",
        "Part of the outer step spent on waiting for other members: at the boundary and for the verdict; like the "
        "transfer it may overlap training (outer.overlap).",
        adds_up=True,
    ),
    "outer/transfer_s": Metric("s", "Part of it spent on the reduce between nodes.", adds_up=True),
    "outer/apply_s": Metric(
        "s", "Part of it spent on the pseudo-gradient, the outer optimizer and writing parameters back.", adds_up=True
    ),
    "outer/retries": Metric("count", "Times this round was opened again before it was committed.", adds_up=True),
    "outer/weight": Metric(
        "tokens",
        "Weight of this node's update in the mean: the tokens that it contributed; with zeroband.DiLoCoOptimizer the "
        "samples.",
    ),
    "outer/trust": Metric(
        "ratio", "What this node counts for how its updates did in the rounds before, in 0..1; with outer.robust."
    ),
    "outer/gain": Metric(
        "ratio",
        "By how much this node's payload of the round before lowers the others' held-out loss, as a part of what their "
        "own payloads do, -1 to 1: their median; where it was drawn, with outer.score.",
    ),
    "outer/score_s": Metric("s", "Time for measuring what payloads are worth, with outer.score.", adds_up=True),
    "outer/sent_bytes": Metric(
        "bytes since the last line",
        "Payload that this node sent to other nodes.",
        adds_up=True,
        series="zeroband_comm_bytes_total",
        labels={"dir": "sent", "kind": "round"},
    ),
    "outer/received_bytes": Metric(
        "bytes since the last line",
        "Payload that this node received from other nodes.",
        adds_up=True,
        series="zeroband_comm_bytes_total",
        labels={"dir": "received", "kind": "round"},
    ),
    "outer/wide_bytes": Metric(
        "bytes since the last line",
        "Part of outer/sent_bytes that went to other sites; absent where there are no sites.",
        adds_up=True,
    ),
    "outer/payload_bytes": Metric(
        "bytes", "This node's payload in the round, as it goes to each node or site; absent where averages travel."
    ),
    "outer/payload_ratio": Metric("ratio", "2 bytes of each parameter over outer/payload_bytes."),
    "outer/ddp_bytes": Metric(
        "bytes since the last line",
        "What per-step data parallel would have sent instead: 2 (M-1)/M x 4 bytes x parameters for each inner step.",
        adds_up=True,
    ),
    "eval/step": Metric("index", "Inner step of the run whose outer parameters were evaluated, with [eval]."),
    "eval/loss": Metric("nats/token", "Mean cross entropy of held-out samples of the run's data."),
    "eval/bits_per_byte": Metric(
        "bits/byte", "That in bits, for each byte of their text; absent where ids stand for none."
    ),
    "eval/tokens": Metric("tokens", "Targets of the samples that were evaluated."),
    "eval/loss/<source>": Metric("nats/token", "eval/loss of one of eval.sources, by its name; so are the two below."),
    "eval/bits_per_byte/<source>": Metric("bits/byte", "Of its text."),
    "eval/tokens/<source>": Metric("tokens", "Of its samples."),
    "eval/took_s": Metric("s", "Duration of the evaluation, which is no part of train/step_s.", adds_up=True),
    "data/pass": Metric("index", "Passes over the data that the run has finished."),
    "data/pass/<source>": Metric("1", "Passes over one of data.sources that the run has made, parts of one included."),
    "data/tokens/<source>": Metric(
        "tokens",
        "Targets of one of data.sources in this step of this node, absent where there are none; `zeroband status` sums "
        "them up over all nodes, steps among them that the run lost again.",
        adds_up=True,
    ),
    "data/next": Metric(
        "index", "First sample index that no node was given yet; with private data the sum over the nodes' own."
    ),
    "data/returned_samples": Metric(
        "samples", "Samples of updates that did not count, of lost nodes for example, waiting to be given out again."
    ),
    "ckpt/stall_s": Metric(
        "s",
        "Time that training waited for the copy of the state that a checkpoint is made from, since the step before.",
        adds_up=True,
    ),
    "ckpt/durable_step": Metric("index", "Inner step of the newest checkpoint that this node has completed."),
    "ckpt/backlog_bytes": Metric(
        "bytes", "Staged and not yet written by this node; an upper bound where nodes share the work."
    ),
    "ckpt/write_bytes_per_s": Metric("bytes/s", "Rate at which the writer hands the newest checkpoint to the storage."),
    "node/rss_bytes": Metric("bytes", "Memory of local rank 0 in RAM, shared pages included."),
    "node/gpu_peak_bytes": Metric("bytes", "Most memory that torch allocated on the GPU of local rank 0."),
}
"""Every metric there is. One that is not measured in a step is absent from its line."""


@dataclass(frozen=True)
class PrometheusSeries:
    """What Prometheus finds in addition to METRICS."""

    type: Literal["gauge", "counter", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    """In addition to `run` and `node`."""


NODE_STATES = ("starting", "joining", "training", "left", "failed", "finished")
"""States that a node has by its own word."""

SERIES: Mapping[str, PrometheusSeries] = {
    "zeroband_build_info": PrometheusSeries(
        "gauge",
        "Always 1; its labels say what runs here: git: the commit of its clone (-dirty: with changes; unknown: it is "
        "none); config_hash: of what all nodes of a run share, equal on them.",
        ("version", "git", "torch", "config_hash"),
    ),
    "zeroband_started_timestamp_seconds": PrometheusSeries("gauge", "When this trainer started."),
    "zeroband_step": PrometheusSeries("gauge", "Inner steps of the run that this node has finished."),
    "zeroband_steps_total": PrometheusSeries("counter", "Inner steps of this trainer since it started."),
    "zeroband_tokens_total": PrometheusSeries(
        "counter", "Tokens that they trained on; absent with zeroband.DiLoCoOptimizer."
    ),
    "zeroband_last_step_timestamp_seconds": PrometheusSeries("gauge", "When it finished its newest inner step."),
    "zeroband_last_round_timestamp_seconds": PrometheusSeries("gauge", "When its newest round was committed."),
    "zeroband_last_checkpoint_timestamp_seconds": PrometheusSeries(
        "gauge",
        "When it completed its newest checkpoint, or its share of one; until then when it started; absent without "
        "ckpt.path.",
    ),
    "zeroband_outer_step_seconds": PrometheusSeries(
        "histogram", "Duration of its outer steps: waiting, transfer and applying, which may overlap training."
    ),
    "zeroband_recovery_seconds": PrometheusSeries(
        "histogram", "How long it took to come by the state of the run (`recovered`)."
    ),
    "zeroband_comm_bytes_total": PrometheusSeries(
        "counter",
        "Payload between this node and the others. dir: `sent` or `received`; kind: `round`, or `state` for what it "
        "fetched to join.",
        ("dir", "kind"),
    ),
    "zeroband_events_total": PrometheusSeries("counter", "Events of this trainer since it started.", ("kind",)),
    "zeroband_log_warnings_total": PrometheusSeries(
        "counter", "Lines of its log that are warnings or worse, by the part of the package that speaks.", ("part",)
    ),
    "zeroband_node_state": PrometheusSeries(
        "gauge",
        f"1 for the state that the node is in, 0 for the others: {', '.join(NODE_STATES)} (a member that is late, "
        "paused or about to leave is training).",
        ("state",),
    ),
    "zeroband_node_up": PrometheusSeries("gauge", "1 where its trainer lives and gets on (/healthz), else 0."),
    "zeroband_node_ready": PrometheusSeries("gauge", "1 where it trains as a member of its run (/readyz), else 0."),
    "zeroband_disk_free_bytes": PrometheusSeries(
        "gauge", "Free for this user where run.dir, data.cache_dir and ckpt.path lie.", ("key",)
    ),
    "zeroband_disk_size_bytes": PrometheusSeries("gauge", "Size of that file system.", ("key",)),
}


def prometheus_name(metric: str) -> str:
    """The name of a metric of METRICS in Prometheus: base units, `_total` where it adds up, `_source_` for sources.

    The digest, which is no number, is exported by its first 12 digits as one.
    """
    row = METRICS[metric]
    if row.series is not None:
        return row.series
    part, _, name = metric.removesuffix("/<source>").partition("/")
    name = re.sub("_s$", "_seconds", name.replace("_per_s", "_per_second"))
    if row.unit == "ratio" and not name.endswith("_ratio"):
        name += "_ratio"
    source = "source_" if metric.endswith("/<source>") else ""
    return f"zeroband_{part}_{source}{name}{'_total' if row.adds_up else ''}"


def metric_of(name: str) -> str:
    """The row of the table that says what a metric means: that of a source is one for all of them."""
    above, _, _ = name.rpartition("/")
    return f"{above}/<source>" if name not in METRICS and f"{above}/<source>" in METRICS else name


class MetricsLog(RecordLog):
    """Writes one line for each record to `metrics.jsonl` in the node's folder, and hands the record to other sinks."""

    def __init__(self, node_dir: Path, sinks: Sequence[Sink] = (), *, now: Callable[[], float] = time.time) -> None:
        super().__init__(node_dir / METRICS_FILE, sinks, now=now)

    def record(self, step: int, values: Mapping[str, MetricValue | None]) -> None:
        """Record what inner step `step` measured; a value of None is unknown and left out.

        `step` counts finished inner steps. Values are Python numbers: reading a tensor is the caller's wait, not ours.
        """
        unknown = sorted(name for name in values if name not in METRICS and metric_of(name) not in METRICS)
        assert not unknown, f"not in METRICS: {', '.join(unknown)}"
        odd = [name for name, value in values.items() if not _is_plain(value)]
        assert not odd, f"not a Python number: {', '.join(odd)}"
        known = {name: value for name, value in values.items() if value is not None}
        self._write({"step": step, "at_s": round(self._now(), 3), **known})


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (int, float, str))


def perplexity(loss: float) -> float:
    """exp(loss), and infinity where that is no float."""
    return math.exp(loss) if not loss > 709 else math.inf


def ddp_bytes(nodes: int, parameters: int, steps: int = 1) -> int:
    """Bytes that one of `nodes` sends in `steps` of data parallel: a ring all-reduce of float32 gradients each."""
    return steps * 2 * (nodes - 1) * 4 * parameters // nodes


def document() -> str:
    """The text of docs/metrics.md."""
    metrics = markdown_table(
        ("name", "unit", "meaning", "Prometheus"),
        ((f"`{name}`", m.unit, m.meaning, f"`{prometheus_name(name)}{_own(m)}`") for name, m in METRICS.items()),
    )
    series = markdown_table(
        ("name", "type", "labels", "meaning"),
        ((f"`{n}`", s.type, ", ".join(f"`{label}`" for label in s.labels), s.meaning) for n, s in SERIES.items()),
    )
    events = markdown_table(
        ("kind", "always carries", "meaning"),
        ((f"`{kind}`", ", ".join(f"`{f}`" for f in event.fields), event.meaning) for kind, event in EVENTS.items()),
    )
    steps = "`step` counts finished inner steps. A metric that was not measured in a step is absent."
    metrics_head = f"## `{METRICS_FILE}`\n\n{steps}\n"
    events_head = f"## `{EVENTS_FILE}`\n\nOther fields may come along.\n"
    parts = [_HEAD, metrics_head, f"{metrics}\n", events_head, f"{events}\n", _SERIES_HEAD, f"{series}\n", _CONVENTIONS]
    return "\n".join(parts).rstrip() + "\n"


def _own(metric: Metric) -> str:
    """The labels of a metric as a query has them."""
    pairs = ",".join(f'{label}="{value}"' for label, value in metric.labels.items())
    return f"{{{pairs}}}" if pairs else ""


if __name__ == "__main__":
    sys.stdout.write(document())
