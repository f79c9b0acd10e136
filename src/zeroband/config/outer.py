"""The [outer] section: how nodes synchronise, one tagged variant per algorithm."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from zeroband.config.section import NODE_LOCAL, Section

ValueCodingName = Literal["float32", "bfloat16", "sign", "two_bit"]
"""Encoding of a sparse payload's values."""

Uneven = Literal["pad", "divide"]
"""Handling of a length that is not a multiple of the chunk: `pad` it with zeros to equal chunks, or `divide` it into
chunks of its largest divisor up to the chunk size, as in DeMo's source; a prime length then has chunks of one."""


class OuterSGDConfig(Section):
    """SGD with momentum on pseudo-gradients."""

    lr: PositiveFloat = 0.7
    """Outer learning rate."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Outer momentum."""
    nesterov: bool = True
    """Nesterov momentum, as torch.optim.SGD(nesterov=True, dampening=0); no effect without momentum."""
    momentum_warmup_rounds: int = Field(default=0, ge=0)
    """Outer steps of linear momentum warm-up, which avoids a rise of the loss in the first rounds."""


class ClipConfig(Section):
    """Mean of contributions clipped to the median norm, in pieces of 4096 values."""

    type: Literal["clip"]


class TrimmedConfig(Section):
    """Trimmed mean, value by value. All members have equal weight; not for payloads."""

    type: Literal["trimmed"]
    trim: float = Field(default=0.25, ge=0, lt=0.5)
    """Fraction of the members to drop at each end, at least one of three or more. Must cover the fraction of faulty
    members: 0.25 tolerates 2 of 8, 0.4 tolerates 3."""


class CenteredClipConfig(Section):
    """CenteredClip: starts from the median, clips each contribution's pull to the median distance; not for payloads."""

    type: Literal["centered_clip"]
    iterations: PositiveInt = 1
    """Iterations from the median; each costs the same, and moves the result closer to the mean of the agreeing members.
    """


Robust = Annotated[ClipConfig | TrimmedConfig | CenteredClipConfig, Field(discriminator="type")]


class ScoreConfig(Section):
    """Scores payloads by how much each lowers the held-out loss, on top of the measuring member's own payload.

    Each member measures on rows that its data.hold_out keeps back, or else on its eval.sources; the score is the median
    over the members. Needs three members.
    """

    rounds: PositiveInt = 8
    """Average number of rounds per scored round, drawn when its payloads are sent. Measuring takes about a third of an
    inner step per payload, and twice that for the reference: set 50 or more for rounds of one step, as with DeMo."""
    members: int = Field(default=3, ge=2)
    """Members whose payloads are scored in such a round, drawn at random and equal for all measuring members."""
    counts: bool = False
    """Reduce the weight of a member whose payloads raise the loss, down to zero; needs outer.robust. False: only
    measure and show scores."""


class WeighedConfig(Section):
    """Common keys of algorithms that average over the nodes."""

    weights: Literal["tokens", "equal"] = "tokens"
    """Weight of a node in an average. tokens: the tokens that it trained on since the last one. equal: the same for all
    nodes, so that those with little data or slow machines are not outvoted."""


class DdpConfig(WeighedConfig):
    """Averages gradients at every step."""

    round_steps: ClassVar[int] = 1
    """Inner steps between outer steps."""
    type: Literal["ddp"]


class RoundsConfig(WeighedConfig):
    """Common keys of algorithms with many inner steps per round."""

    default_inner_steps: ClassVar[int] = 500
    """Default inner steps of a round, without inner_seconds."""

    inner_steps: PositiveInt | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Inner steps of this node between outer steps (H in arXiv:2311.08105): more steps mean less traffic and staler
    averages. Slower nodes may make fewer. None: 500, with sparseloco 30, or as many as fit into inner_seconds."""
    inner_seconds: PositiveFloat | None = None
    """Time between outer steps: slower nodes make fewer steps in it, and no node waits. With fragments, each has its
    part of it. None: only inner_steps counts."""
    straggler_deadline_s: PositiveFloat | None = None
    """Time for which a round waits for late members once a quorum of the living ones is ready; a late contribution goes
    into a later round. None: wait for every living member, unless straggler_grace is set."""
    straggler_grace: float | None = Field(default=None, gt=0, le=10)
    """Like straggler_deadline_s, but as a fraction of the quorum's time: with 0.1, stragglers cost the others at most a
    tenth of a round. If a member's link would exceed it, another member fetches its contribution and counts it in a
    later round. None: only straggler_deadline_s counts."""
    quorum: float = Field(default=0.5, gt=0, le=1)
    """Fraction of the last round's weight, over living members, that must be ready before a member can be late."""
    robust: Robust | None = None
    """Robust aggregation against faulty or lying members; the receivers measure each contribution. None: the weighted
    mean, which a single member can move anywhere."""
    fragments: PositiveInt = 1
    """Parts of the model that are synchronised in turn, each once in inner_steps (Streaming DiLoCo): the same traffic
    with a lower peak. Must divide inner_steps."""
    fragment_pattern: Literal["strided", "sequential"] = "strided"
    """Layers of a fragment: strided or consecutive ones. The embedding belongs to the first fragment, everything else
    outside the layers to the last."""
    overlap: NonNegativeInt | Literal["full"] = 0
    """Inner steps that overlap a round's transfer; at most inner_steps / fragments, which is "full", or what fits into
    inner_seconds. 0: training waits for the round."""
    merge: Literal["overwrite", "mix", "eager"] = "overwrite"
    """How a node merges an overlapped round. overwrite: continue from the outer parameters. mix: keep a fraction alpha
    of its own parameters (arXiv:2501.18512). eager: apply its own share when it is sent, the others' on arrival
    (arXiv:2502.12996); needs an overlap."""
    alpha: float = Field(default=0.5, ge=0, le=1)
    """Fraction of a node's own parameters to keep with merge = "mix"."""

    @property
    def round_steps(self) -> int | None:
        """Most inner steps between outer steps; None: only inner_seconds counts."""
        return self.inner_steps or (self.default_inner_steps if self.inner_seconds is None else None)

    @property
    def phase_steps(self) -> int:
        """Most inner steps between contributions."""
        return (self.round_steps or 1_000_000) // self.fragments

    @property
    def phase_seconds(self) -> float | None:
        """Seconds between contributions; None: only phase_steps counts."""
        return None if self.inner_seconds is None else self.inner_seconds / self.fragments

    @property
    def overlap_steps(self) -> int | None:
        """Inner steps of a round's transfer; None: until the next one is sent."""
        return None if self.overlap in ("full", self.phase_steps) else int(self.overlap)

    @model_validator(mode="after")
    def _fragments_divide_a_round(self) -> RoundsConfig:
        steps, fragments = self.round_steps, self.fragments
        if steps is not None and steps % fragments:
            below = steps // fragments * fragments
            nearest = f"{below} or {below + fragments}" if below else str(fragments)
            raise ValueError(
                f"outer.inner_steps={steps} is not a multiple of outer.fragments={fragments}; nearest: {nearest}"
            )
        return self

    @model_validator(mode="after")
    def _overlap_fits_into_a_phase(self) -> RoundsConfig:
        if self.merge == "eager" and self.overlap == 0:
            raise ValueError(
                'outer.merge="eager" has no effect where training waits (outer.overlap=0); set outer.overlap = "full"'
            )
        if self.overlap in (0, "full"):
            return self
        if self.inner_seconds is None and int(self.overlap) > self.phase_steps:
            raise ValueError(
                f"outer.overlap={self.overlap} is longer than inner_steps / fragments = {self.phase_steps}; set at "
                f"most {self.phase_steps}"
            )
        if self.inner_seconds is not None and self.fragments > 1:
            raise ValueError(
                f"outer.overlap={self.overlap} counts steps, and phases of fragments that end by time have another "
                'number on each node (outer.inner_seconds); set it to "full" or 0'
            )
        return self

    @model_validator(mode="after")
    def _eager_share_counts_at_once(self) -> RoundsConfig:
        if self.robust is not None and self.merge == "eager":
            raise ValueError(
                'outer.merge = "eager" counts a node\'s own share at once, which with outer.robust is known after the '
                'round; set outer.merge = "mix"'
            )
        return self


class DilocoConfig(RoundsConfig):
    """DiLoCo: many inner steps on each node, then one outer step."""

    type: Literal["diloco"]
    optimizer: OuterSGDConfig = OuterSGDConfig()
    """The outer optimizer; with lr 1 and momentum 0 the outer step is the mean of the nodes' parameters."""
    state_device: Literal["cpu", "cuda"] = Field(default="cpu", json_schema_extra=NODE_LOCAL)
    """cuda: keep a copy of the outer state on the GPUs, 8 bytes per parameter, so that a round moves 1 byte per
    parameter over PCIe in each direction instead of 4; needs comm.codec int8."""


class DemoConfig(Section):
    """DeMo / DisTrO: every step sends the largest frequencies of each node's momentum, and takes their mean's sign.

    Without AdamW: [optim] sets learning rate, schedule, decay and clipping. All nodes have equal weight.
    """

    round_steps: ClassVar[int] = 1
    """Inner steps between outer steps."""
    type: Literal["demo"]
    k: PositiveInt = 4
    """Coefficients per chunk: 32 in DeMo's source; with 4 signs, 1260 times less than 2 bytes per parameter."""
    chunk: int = Field(default=64, ge=1, le=128)
    """Longest side of a chunk."""
    uneven: Uneven = "pad"
    """Handling of a length that is not a multiple of `chunk`. pad: as few equal chunks as possible, the last padded
    with zeros. divide: chunks of its largest divisor, as published; a prime length is then not compressed at all."""
    values: ValueCodingName = "sign"
    """Encoding of the coefficients: sign as in Psyche's runs, float32 as in the paper."""
    decay: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the momentum (beta); 0.995 in Psyche's Consilience."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the sent values to subtract from the momentum (alpha): 1 in the first version, 0.2 best in the
    second."""
    overlap: int = Field(default=0, ge=0, le=1)
    """Inner steps that overlap a payload's transfer. 1: it is applied at the end of the next step, and a node only
    waits for the excess time; every update is one step late."""
    aggregator: bool = False
    """Each node uploads once, to the member with the fastest link, which combines the payloads and returns the result:
    for home uplinks and many nodes; needs comm.backend = "native"."""
    robust: Robust | None = None
    """clip: robust aggregation against faulty or lying members. None: the mean over the senders."""
    score: ScoreConfig | None = None
    """Score payloads by held-out loss. None: no scores."""

    @model_validator(mode="after")
    def _combines_payloads(self) -> DemoConfig:
        require_for_scores(self.score, self.robust)
        if self.score is not None and self.aggregator:
            raise ValueError("outer.aggregator gives members one sum, and outer.score needs each payload; drop one")
        if self.robust is not None and self.aggregator:
            raise ValueError(
                "outer.aggregator has one member combine all payloads, whom outer.robust does not trust; drop one"
            )
        require_for_payloads(self.robust)
        return self


class SparseLocoConfig(RoundsConfig):
    """SparseLoCo: the largest values of pseudo-gradients with error feedback, and an outer step without momentum."""

    default_inner_steps: ClassVar[int] = 30
    """Default inner steps of a round, without inner_seconds."""
    type: Literal["sparseloco"]
    k: PositiveInt = 64
    """Values per chunk of chunk x chunk; 64 of 4096 is 1.56 %. Smaller chunks send the same fraction."""
    chunk: int = Field(default=64, ge=1, le=256)
    """Longest side of a matrix tile; vectors are split into chunk x chunk values."""
    values: ValueCodingName = "two_bit"
    """Encoding of the values."""
    decay: float = Field(default=0.95, ge=0, le=1)
    """Decay of the error buffer (beta)."""
    divisor: Literal["senders", "members"] = "senders"
    """Divisor of a sum of sent values. senders: the weight of the members that sent the value, as in the code of the
    published runs. members: the weight of all members, as in the paper; few nodes choose equal values, so with M nodes
    the outer step is up to M times shorter."""
    lr: PositiveFloat = 1.0
    """Learning rate of the outer step; 0.65 late in training in the paper, 0.4 in its repository's settings."""
    score: ScoreConfig | None = None
    """Score payloads by held-out loss. None: no scores."""

    @model_validator(mode="after")
    def _has_a_share_of_its_own(self) -> SparseLocoConfig:
        require_for_scores(self.score, self.robust)
        require_for_payloads(self.robust)
        if self.merge == "eager" and self.divisor == "senders":
            raise ValueError(
                'outer.merge = "eager" counts a node\'s own share at once, and with outer.divisor = "senders" that '
                'depends on who else sends a value; set outer.divisor = "members", or outer.merge = "mix"'
            )
        return self


class CustomConfig(RoundsConfig):
    """An algorithm from a user's file."""

    type: Literal["custom"]
    algorithm: str = Field(json_schema_extra=NODE_LOCAL)
    """File with the class `ALGORITHM`, as in examples/fed_adam.py. Must be equal on all nodes."""
    settings: tuple[str, ...] = ()
    """KEY=VALUE for each setting of the algorithm to change; values as in JSON."""


Outer = Annotated[DdpConfig | DilocoConfig | DemoConfig | SparseLocoConfig | CustomConfig, Field(discriminator="type")]


def require_for_payloads(robust: Robust | None) -> None:
    """Raise ValueError for robust aggregation that compares all members' values: a payload has only a few of them."""
    if robust is not None and not isinstance(robust, ClipConfig):
        raise ValueError(
            f"outer.robust.type={robust.type!r} compares all members' values, and of a payload's most are sent by one; "
            'set outer.robust.type = "clip"'
        )


def require_for_scores(score: ScoreConfig | None, robust: Robust | None) -> None:
    """Raise ValueError for scores that should change weights without outer.robust."""
    if score is not None and score.counts and robust is None:
        raise ValueError(
            "outer.score.counts=true changes what members count by how they did, which they do with outer.robust only; "
            'set outer.robust.type = "clip", or leave counts out to have scores shown'
        )
