"""The [resume] section: from which checkpoint a run goes on that nobody holds any more."""

from __future__ import annotations

from pydantic import Field

from zeroband.config.section import NODE_LOCAL, Section


class ResumeConfig(Section):
    """Where a run begins again."""

    step: int | None = Field(default=None, ge=0, json_schema_extra=NODE_LOCAL)
    """Inner step of the checkpoint to go on from. None: the newest that verifies, or a new run where there is none."""
    path: str | None = Field(default=None, min_length=1, json_schema_extra=NODE_LOCAL)
    """Checkpoints of another run, `<its ckpt.path>/<its run.id>` or one `step_N` folder in it, to begin with. Used
    until this run has checkpoints of its own, unless a step is named. None: this run's own."""
    trust: bool = Field(default=False, json_schema_extra=NODE_LOCAL)
    """Take checkpoints that run.token does not vouch for: saved without a token, or with another one. Whoever can write
    to their folder then decides what this run goes on from."""
