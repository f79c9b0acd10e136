"""The tables of metrics and events as a page: `python -m zeroband.observe.reference > docs/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from zeroband.observe.events import EVENTS, EVENTS_FILE
from zeroband.observe.metrics import METRICS, METRICS_FILE

_HEAD = """\
# Metrics and events

Made by `python -m zeroband.observe.reference > docs/metrics.md` from the tables in
`src/zeroband/observe/`; a test keeps it in step.

Every node writes two files into `<run.dir>/<run.id>/<node id>/`. They are the truth about a run: the console, Weights &
Biases, the demo and `zeroband status` show what is in them. Each line is one JSON object, written with one system call,
so a killed node leaves whole lines. A node that starts again appends.

- `at_s`: wall clock of the node in seconds since 1970, for people. No two nodes' clocks are ever compared.
- Numbers that JSON lacks are the strings `"nan"`, `"inf"` and `"-inf"`.
- A member id is `<node id>#<incarnation>`: a node that comes back is another member.
"""


def document() -> str:
    """The text of docs/metrics.md."""
    metrics = _table(("name", "unit", "meaning"), ((f"`{name}`", m.unit, m.meaning) for name, m in METRICS.items()))
    events = _table(
        ("kind", "always carries", "meaning"),
        ((f"`{kind}`", ", ".join(f"`{f}`" for f in event.fields), event.meaning) for kind, event in EVENTS.items()),
    )
    steps = "`step` counts finished inner steps. A metric that was not measured in a step is absent."
    metrics_head = f"## `{METRICS_FILE}`\n\n{steps}\n"
    events_head = f"## `{EVENTS_FILE}`\n\nOther fields may come along.\n"
    return "\n".join([_HEAD, metrics_head, metrics, events_head, events]).rstrip() + "\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(document())
