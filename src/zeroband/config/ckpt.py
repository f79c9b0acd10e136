"""The [ckpt] section: where checkpoints go, how often, and which are kept."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt

from zeroband.config.section import NODE_LOCAL, Section

_STEPS_BETWEEN = 500


class CkptConfig(Section):
    """Checkpoints on disk or in an object store."""

    path: str | None = Field(default=None, min_length=1, json_schema_extra=NODE_LOCAL)
    """Folder or fsspec URL (`s3://BUCKET/...`) for checkpoints, written below `<path>/<run.id>/`. None: none are."""
    every_rounds: PositiveInt | None = None
    """Rounds between two checkpoints. None: 1, or 500 where a round is one inner step, as with DDP and for a node
    alone. The end of a run is always kept."""
    keep_last: PositiveInt = 3
    """So many of the newest checkpoints stay; older ones are removed when a newer one is complete."""
    keep_every: PositiveInt | None = None
    """Checkpoints of rounds that are a multiple of this stay for ever. None: none do."""
    shared: bool = True
    """All nodes see the same path and write one checkpoint together, each a share of it. False: each node writes a
    whole one to a path of its own."""
    peer_wait_s: PositiveFloat = 600.0
    """Longest wait of the node that completes a checkpoint for the others' shares; it then writes the rest itself. If
    it is silent for twice as long, the next node completes it. Nodes that the run lost are not waited for."""
    retry_s: PositiveFloat = Field(default=300.0, json_schema_extra=NODE_LOCAL)
    """How long one file is tried again when the storage fails, before the checkpoint is given up."""

    def rounds_between(self, *, are_rounds_steps: bool) -> int:
        """Rounds from one checkpoint to the next; the same on all nodes."""
        return self.every_rounds or (_STEPS_BETWEEN if are_rounds_steps else 1)
