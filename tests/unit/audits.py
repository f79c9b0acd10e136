"""What the committed rounds of a run in this process say of the samples."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tests.unit.conftest import BATCH

from zeroband.data.ledger import Range
from zeroband.elastic.membership.progress import Progress
from zeroband.tools.data.audit import Audit, AuditedRound, audit


def audit_of(run: Any) -> Audit:
    """Audit a `FakeRun` as `zeroband data audit` does a run by the events of its nodes."""
    rounds, left_out = list[AuditedRound](), defaultdict[str, list[Range]](list)
    for verdict in run.store.verdicts:
        progress, claims = Progress.from_record(verdict.record["progress"]), dict(verdict.plan.claims)
        used = {member: steps * BATCH for member, steps in verdict.plan.contributors().items()}
        line = (progress.founding, progress.follows)
        rounds.append(AuditedRound(verdict.round, used, progress.ledgers, *line, verdict.round, claims))
        for corpus, spans in verdict.record.get("skipped", {}).items():
            left_out[corpus] += spans
    return audit(rounds, left_out)
