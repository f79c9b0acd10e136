"""The [outer] section: how nodes synchronise, one tagged variant for each algorithm."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from zeroband.config.section import NODE_LOCAL, Section

ValueCodingName = Literal["float32", "bfloat16", "sign", "two_bit"]
"""How the chosen values of a sparse payload travel."""

Uneven = Literal["pad", "divide"]
"""What to do with a length that no chunk divides: `pad` it with zeros to equal chunks, or `divide` it by its largest
divisor that is no longer than the chunk, as DeMo's source does; a prime length then has chunks of one."""


class OuterSGDConfig(Section):
    """SGD with momentum on pseudo-gradients."""

    lr: PositiveFloat = 0.7
    """Outer learning rate."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Outer momentum."""
    nesterov: bool = True
    """Nesterov form, as torch.optim.SGD(nesterov=True, dampening=0); without momentum it makes no difference."""
    momentum_warmup_rounds: int = Field(default=0, ge=0)
    """Outer steps over which the momentum grows linearly: avoids an excursion of the loss in the first rounds."""


class ClipConfig(Section):
    """The mean of contributions that are at most as long as the median one, piece by piece of 4096 values."""

    type: Literal["clip"]


class TrimmedConfig(Section):
    """Value by value, the mean of those in the middle. All members count the same; not for payloads."""

    type: Literal["trimmed"]
    trim: float = Field(default=0.25, ge=0, lt=0.5)
    """Part of the members whose values are left out at each end; at least one from three members on. It must be the
    part that may lie: 0.25 bears 2 of 8, 0.4 bears 3."""


class CenteredClipConfig(Section):
    """CenteredClip: from the median, contributions pull at most as far as the median distance; not for payloads."""

    type: Literal["centered_clip"]
    iterations: PositiveInt = 1
    """Steps from the median; more of them come closer to the mean of those that agree, and take as long each."""


Robust = Annotated[ClipConfig | TrimmedConfig | CenteredClipConfig, Field(discriminator="type")]


class ScoreConfig(Section):
    """Scores of payloads: by how much each lowers the loss of rows that no node trains on, on top of the own payload.

    Each member measures for itself, on rows that its data.hold_out keeps back or else of its eval.sources; what counts
    is the median of what the others found. Needs three members.
    """

    rounds: PositiveInt = 8
    """Rounds for each one that is scored, on average; drawn when its payloads are sent. Measuring takes about a third
    of an inner step for each payload, and twice for what they are compared with: with rounds of one step, as DeMo's,
    set 50 or more."""
    members: int = Field(default=3, ge=2)
    """Members whose payloads are scored in such a round, the same for all who measure; drawn, too."""
    counts: bool = False
    """Whether a member whose payloads raise the loss counts less and less, and nothing at last; needs outer.robust.
    False: scores are measured and shown."""


class WeighedConfig(Section):
    """What algorithms have in common that take a mean over the nodes."""

    weights: Literal["tokens", "equal"] = "tokens"
    """What a node counts in a mean over the nodes. tokens: as many as it learned from since the last one. equal: the
    same as every other, so that one with little data or a slow machine is not outvoted."""


class DdpConfig(WeighedConfig):
    """Gradients are averaged at every step."""

    type: Literal["ddp"]


class RoundsConfig(WeighedConfig):
    """What algorithms have in common whose rounds are many inner steps: their schedule."""

    usual_inner_steps: ClassVar[int] = 500
    """Inner steps of a round where neither steps nor seconds are set."""

    inner_steps: PositiveInt | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Inner steps of this node between two outer steps (H in arXiv:2311.08105); more of them: less traffic, staler
    averages. A slower node may do fewer. None: 500, with sparseloco 30, or as many as fit into inner_seconds."""
    inner_seconds: PositiveFloat | None = None
    """Time between two outer steps, so that a node at a third of the speed does a third of the steps and no node waits;
    with fragments each takes its part of it. None: inner_steps alone decides."""
    straggler_deadline_s: PositiveFloat | None = None
    """How long a round waits for late members once a quorum of those that live is there; what the late ones learn goes
    into a later round. None: it waits for every member that is alive, unless straggler_grace says otherwise."""
    straggler_grace: float | None = Field(default=None, gt=0, le=10)
    """How long it waits, as a fraction of the time that the quorum took: with 0.1 the others lose at most a tenth of a
    round. If a member's link would make a round longer than that, its contribution is carried: another member fetches
    it and counts it in a later round. None: links do not matter, and straggler_deadline_s alone decides."""
    quorum: float = Field(default=0.5, gt=0, le=1)
    """Fraction of the last round's weight, of living members, that must be present before any member counts as late."""
    robust: Robust | None = None
    """How contributions are combined if members may be broken or lie; the receivers measure the weight of each. None:
    the weighted mean, which a single member can move anywhere."""
    fragments: PositiveInt = 1
    """Parts of the model that are synchronised one after the other, each once in inner_steps (Streaming DiLoCo): the
    same bytes, a lower peak. Divides inner_steps."""
    fragment_pattern: Literal["strided", "sequential"] = "strided"
    """Which layers a fragment has: strided ones, or neighbours. The embedding goes with the first, the rest with
    the last."""
    overlap: NonNegativeInt | Literal["full"] = 0
    """Inner steps during which a round travels while training goes on; at most inner_steps / fragments, which is
    "full", or what fits into inner_seconds. 0: training waits for it."""
    merge: Literal["overwrite", "mix", "eager"] = "overwrite"
    """How a node merges an arriving round. overwrite: continue from the outer parameters. mix: keep a fraction alpha of
    its own parameters (arXiv:2501.18512). eager: its own share counts when it is sent, the others' on arrival
    (arXiv:2502.12996); needs an overlap."""
    alpha: float = Field(default=0.5, ge=0, le=1)
    """Fraction of a node's own parameters that merge = "mix" keeps."""

    @property
    def phase_steps(self) -> int:
        """Inner steps from one contribution to the next, at most."""
        steps = self.inner_steps or (self.usual_inner_steps if self.inner_seconds is None else 1_000_000)
        return steps // self.fragments

    @property
    def phase_seconds(self) -> float | None:
        """Seconds from one contribution to the next; None: phase_steps alone decides."""
        return None if self.inner_seconds is None else self.inner_seconds / self.fragments

    @property
    def overlap_steps(self) -> int | None:
        """Inner steps that a round travels; None: until the next one is sent."""
        return None if self.overlap in ("full", self.phase_steps) else int(self.overlap)

    @model_validator(mode="after")
    def _fits_together(self) -> RoundsConfig:
        problem = overlap_problem(
            inner_steps=self.inner_steps or (self.usual_inner_steps if self.inner_seconds is None else None),
            has_fixed_steps=self.inner_seconds is None,
            fragments=self.fragments,
            overlap=None if self.overlap == "full" else self.overlap,
            is_eager=self.merge == "eager",
        )
        if problem is not None:
            raise ValueError(problem)
        if self.robust is not None and self.merge == "eager":
            raise ValueError(
                'outer.merge = "eager" counts a node\'s own share at once, which with outer.robust is known after the '
                'round; set outer.merge = "mix"'
            )
        return self


class DilocoConfig(RoundsConfig):
    """Many inner steps on each node, then one outer step."""

    type: Literal["diloco"]
    optimizer: OuterSGDConfig = OuterSGDConfig()
    """The outer optimizer; with lr 1 and momentum 0 the outer step is the plain mean of the nodes' parameters."""
    state_device: Literal["cpu", "cuda"] = Field(default="cpu", json_schema_extra=NODE_LOCAL)
    """cuda: a copy of the outer state on the GPUs, 8 bytes a parameter, so that a round moves 1 over PCIe each way
    instead of the parameters; needs comm.codec int8."""


class DemoConfig(Section):
    """DeMo / DisTrO: in every step the largest frequencies of each node's momentum, and the sign of their mean.

    There is no AdamW: [optim] gives learning rate, schedule, decay and clipping. All nodes count the same.
    """

    type: Literal["demo"]
    k: PositiveInt = 4
    """Coefficients sent of each chunk: 32 in DeMo's source; 4 signs make 1260 times less than 2 bytes a parameter."""
    chunk: int = Field(default=64, ge=1, le=128)
    """Longest side of a chunk."""
    uneven: Uneven = "pad"
    """What becomes of a length that `chunk` does not divide. pad: as few equal chunks as possible, the last one filled
    up with zeros. divide: chunks of its largest divisor, as published; a prime length is then not compressed at all."""
    values: ValueCodingName = "sign"
    """How coefficients travel: sign as in Psyche's runs, float32 as in the paper."""
    decay: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the momentum (beta); 0.995 in Psyche's Consilience."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Part of what is sent that leaves the momentum (alpha): 1 in the first version, 0.2 best in the second."""
    overlap: int = Field(default=0, ge=0, le=1)
    """Inner steps during which a payload travels while training goes on. 1: it is applied at the end of the next step,
    and a node waits only for what takes longer than that step; every update is one step late."""
    aggregator: bool = False
    """Every node uploads once, to the member with the fastest link, which combines the payloads and sends them back:
    for home uplinks and many nodes; needs comm.backend = "native"."""
    robust: Robust | None = None
    """clip: how payloads are combined where members may be broken or lie. None: their mean over the senders."""
    score: ScoreConfig | None = None
    """Scoring of payloads by the loss of rows that no node trains on. None: none is scored."""

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
    """SparseLoCo: the largest values of pseudo-gradients with error feedback, an outer step without momentum."""

    usual_inner_steps: ClassVar[int] = 30
    """Inner steps of a round where neither steps nor seconds are set."""
    type: Literal["sparseloco"]
    k: PositiveInt = 64
    """Values sent of each chunk of chunk x chunk; 64 of 4096 is 1.56 %. Smaller chunks send the same part."""
    chunk: int = Field(default=64, ge=1, le=256)
    """Longest side of the tile of a matrix; vectors are cut into chunk x chunk values."""
    values: ValueCodingName = "two_bit"
    """How values travel."""
    decay: float = Field(default=0.95, ge=0, le=1)
    """Decay of what was not sent (beta)."""
    divisor: Literal["senders", "members"] = "senders"
    """What a sum of sent values is divided by. senders: each value by the weight of those that sent it, as the code
    behind the published runs does. members: all by that of all members, as the paper writes it; few nodes choose the
    same values, so with M nodes the outer step is up to M times shorter."""
    lr: PositiveFloat = 1.0
    """Learning rate of the outer step; 0.65 late in training in the paper, 0.4 in its repository's settings."""
    score: ScoreConfig | None = None
    """Scoring of payloads by the loss of rows that no node trains on. None: none is scored."""

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
    """An algorithm from a file that is not part of the package."""

    type: Literal["custom"]
    algorithm: str = Field(json_schema_extra=NODE_LOCAL)
    """The file, whose `ALGORITHM` is the class; examples/fed_adam.py is one. Its content must be the same on all
    nodes."""
    settings: tuple[str, ...] = ()
    """KEY=VALUE for each of the algorithm's own knobs that is not to keep its default; values as in JSON."""


Outer = Annotated[DdpConfig | DilocoConfig | DemoConfig | SparseLocoConfig | CustomConfig, Field(discriminator="type")]


def require_for_payloads(robust: ClipConfig | TrimmedConfig | CenteredClipConfig | None) -> None:
    """Raise ValueError for a combination that needs a value of every member, where each sends a few of them."""
    if robust is not None and not isinstance(robust, ClipConfig):
        raise ValueError(
            f"outer.robust.type={robust.type!r} compares all members' values, and of a payload's most are sent by one; "
            'set outer.robust.type = "clip"'
        )


def require_for_scores(
    score: ScoreConfig | None, robust: ClipConfig | TrimmedConfig | CenteredClipConfig | None
) -> None:
    """Raise ValueError for scores that are to change what members count, where nothing does."""
    if score is not None and score.counts and robust is None:
        raise ValueError(
            "outer.score.counts=true changes what members count by how they did, which they do with outer.robust only; "
            'set outer.robust.type = "clip", or leave counts out to have scores shown'
        )


def overlap_problem(
    *,
    inner_steps: int | None,
    has_fixed_steps: bool,
    fragments: int,
    overlap: int | None,
    is_eager: bool,
) -> str | None:
    """What is wrong with these settings of [outer], and the way out; None: nothing.

    `inner_steps`: None: phases end by time alone. `overlap`: None is "full".
    """
    if inner_steps is not None and inner_steps % fragments:
        below = inner_steps // fragments * fragments
        nearest = f"{below} or {below + fragments}" if below else str(fragments)
        return f"outer.inner_steps={inner_steps} is not a multiple of outer.fragments={fragments}; nearest: {nearest}"
    if overlap and fragments > 1 and not has_fixed_steps:
        return (
            f"outer.overlap={overlap} counts steps, and phases of fragments that end by time have another number on "
            'each node (outer.inner_seconds); set it to "full" or 0'
        )
    if overlap and has_fixed_steps and inner_steps is not None and overlap > inner_steps // fragments:
        most = inner_steps // fragments
        return f"outer.overlap={overlap} is longer than inner_steps / fragments = {most}; set at most {most}"
    if is_eager and overlap == 0:
        return 'outer.merge="eager" has no effect where training waits (outer.overlap=0); set outer.overlap = "full"'
    return None
