"""How a node updates its own parameters when a round is sent, when its result arrives, and when it missed a round.

One rule: **delta = anchor - inner is the node's training that no round has counted yet.** The anchor is the outer
parameters as the node last merged them. So

- the node waits for the result (`restart`): all of delta was contributed; inner and anchor become the outer parameters.
- a round is committed without the node (`take_back`, `rebase_after_step`): its contribution is part of delta again, and
  inner becomes outer - delta. The next contribution is all of delta; training continues from the outer parameters
  (`restart`), and training since then stays when a round counts that contribution (`rebase_after_step`).
- a result arrives while the node trains (`receive`): of the training since the contribution it keeps nothing
  (overwrite), a fraction alpha (mix, as in Streaming DiLoCo), or all (eager).
- eager (`on_sent`): the node's own share of delta counts when it is sent.
- the node joins (`restart`): it starts from the verified state.

Fragments are named by their index. All local ranks call each method, which writes only this rank's shards. One rounding
for each operation, on any device.

Sources: mixing is Streaming DiLoCo, arXiv:2501.18512, algorithm 2. Delayed and eager updates are arXiv:2502.12996. Its
abstract and its tables were read. Its equations are second-hand, from a summary, and agree with others' descriptions of
the method ("a mixture of the current local outer gradient with the delayed mixture of all other replicas' outer
gradients"). The rule for the first round, before any result, is ours: the missing result counts as zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from zeroband.config.outer import OuterSGDConfig, RoundsConfig
from zeroband.elastic.rounds.interfaces import CONTRIBUTION, OuterParts
from zeroband.node.async_copy import copy_over, host_copies, to_device
from zeroband.outer.outer_optimizer import OuterSGD
from zeroband.state.flat import parameter_shards

VIEW, HISTORY = "view", "history"

_DIGITS = 9
"""Digits to which a fraction is rounded, so that the same phases summed in another order give the same value."""

Contribute = Callable[[Tensor, Tensor, Tensor], float | None]
"""Writes the contribution of a shard, from the anchor and the inner parameters: `Algorithm.contribute`."""


class Merge(ABC):
    """A node's own parameters, relative to the outer ones."""

    keeps_delta = True
    """Whether a node may continue training while the outer parameters take steps without that training."""

    _taken = 0.0
    """Fraction of the last contribution that has left delta; the rest is still in the inner parameters."""

    @property
    @abstractmethod
    def anchor(self) -> Tensor:
        """(n,) float32: the parameters that a contribution is measured from."""
        ...

    @abstractmethod
    def write(self, fragment_index: int, contribute: Contribute) -> Mapping[str, float | None]:
        """Write delta of a fragment into the contribution buffer.

        Returns the parameters that this rank wrote, each with its largest absolute value if known.
        """
        ...

    def take_step(self, outer_step: int) -> None:  # noqa: B027
        """Called when the canonical state takes this outer step; a merge that keeps a copy steps it as well."""

    def on_sent(self, fragment_index: int, share: float, outer_step: int) -> None:  # noqa: B027
        """Called when a fragment was sent and training continues before its mean arrives.

        `share`: this node's expected share in the mean. `outer_step`: number of that step of the fragment, from 1.
        """

    def on_counted(self, fragment_index: int, share: float) -> None:  # noqa: B027
        """Called when the last contribution's mean arrives, before the next one. `share`: this node's share in it."""

    @abstractmethod
    def on_late_apply(self, fragment_index: int) -> None:
        """Called after a fragment's late outer step; `on_sent` follows with the training since it was sent."""
        ...

    @abstractmethod
    def receive(self, fragment_index: int) -> None:
        """Merge a round after the outer state's step with the inner steps made since its contribution, if any."""
        ...

    @abstractmethod
    def restart(self, fragment_index: int) -> None:
        """Train from the outer parameters of a fragment: delta is 0."""
        ...

    @abstractmethod
    def take_back(self, fragment_index: int, *, is_kept: bool) -> None:
        """Put the last contribution back into delta, exactly once, since it will not count.

        `is_kept`: the exchange's memory holds it, so delta does not.
        """
        ...

    @abstractmethod
    def rebase_after_step(self, fragment_index: int) -> Callable[[], None]:
        """Call before a fragment's outer step, and the returned function after it: this moves the node's fragment, too.

        So delta, which no round has counted yet, stays relative to the outer parameters.
        """
        ...


@dataclass(frozen=True)
class _Part:
    """This rank's shard of one parameter, in the model and in the flat buffer, (n,) float32."""

    inner: Tensor
    """(n,) on the model's device; writing to it writes to the model."""
    outer: Tensor
    name: str


class _ShardMerge(Merge):
    """A merge that works on this rank's shards of the model. `outer`: (n,) float32, the outer parameters."""

    def __init__(self, parts: OuterParts, outer: Tensor) -> None:
        self._parts = parts
        self._outer = outer

    def write(self, fragment_index: int, contribute: Contribute) -> Mapping[str, float | None]:
        places, names, shards = (
            self._parts.shards,
            self._parts.fragments[fragment_index].names,
            parameter_shards(self._parts.model),
        )
        anchor = dict(places.parts(self.anchor, names))
        written = dict(self._parts.wire_layout.parts(self._parts.buffers[CONTRIBUTION], names))
        self._taken = 0.0
        inner = host_copies(places.own(name, shards[name]) for name in written)
        return {n: contribute(anchor[n], own, out) for (n, out), own in zip(written.items(), inner, strict=True)}

    def take_back(self, fragment_index: int, *, is_kept: bool) -> None:
        part, self._taken = self._taken - is_kept, 0.0
        if not is_kept:
            self._parts.feedback.keep(1.0 - part, self._parts.fragments[fragment_index].names)
        if part == 0:
            return
        sent = self._contributed(fragment_index)
        for one in self._shards_of(fragment_index):
            one.inner.sub_(to_device(sent[one.name].mul(part), one.inner.device))

    def _contributed(self, fragment_index: int) -> Mapping[str, Tensor]:
        """This rank's part of a fragment in the contribution buffer, by parameter."""
        names = self._parts.fragments[fragment_index].names
        return dict(self._parts.wire_layout.held(self._parts.buffers[CONTRIBUTION], names))

    def _shards_of(self, fragment_index: int) -> Iterator[_Part]:
        """This rank's shards of a fragment."""
        shards = parameter_shards(self._parts.model)
        for name, part in self._parts.shards.held(self._outer, self._parts.fragments[fragment_index].names):
            yield _Part(shards[name].detach().view(-1), part, name)


def mix(inner: Tensor, outer: Tensor, *, alpha: float) -> None:
    """Inner <- alpha inner + (1 - alpha) outer, in place. 0 takes the outer parameters bit for bit, 1 the inner ones.

    The alpha part keeps the training made during the overlap. `outer`: (n,) float32 on CPU; `inner` on any device.
    """
    if alpha == 0:
        copy_over(outer, inner)
    elif alpha != 1:
        inner.mul_(alpha).add_(to_device(outer, inner.device).mul(1.0 - alpha))


class MixMerge(_ShardMerge):
    """Mixes the outer parameters into the node's, which keep a fraction `alpha`; 0 replaces them.

    Source: Streaming DiLoCo, arXiv:2501.18512, algorithm 2. With 0 and an overlap of a whole round: the naive delayed
    updates of arXiv:2502.12996.
    """

    def __init__(self, parts: OuterParts, outer: Tensor, *, alpha: float) -> None:
        super().__init__(parts, outer)
        self._alpha = alpha

    @property
    def anchor(self) -> Tensor:
        return self._outer

    def on_late_apply(self, fragment_index: int) -> None:
        self.receive(fragment_index)
        self._taken = 1.0 - self._alpha

    def receive(self, fragment_index: int) -> None:
        for part in self._shards_of(fragment_index):
            mix(part.inner, part.outer, alpha=self._alpha)

    def restart(self, fragment_index: int) -> None:
        self._taken = 1.0
        for part in self._shards_of(fragment_index):
            copy_over(part.outer, part.inner)

    def rebase_after_step(self, fragment_index: int) -> Callable[[], None]:
        before = [(part, part.outer.clone()) for part in self._shards_of(fragment_index)]

        def follow() -> None:
            for part, old in before:
                part.inner.add_(to_device(part.outer - old, part.inner.device))

        return follow


class EagerView:
    """A node's parameters under eager updates, derived from the canonical ones, which apply only late means.

    An eager replica feeds its outer SGD with the last round's mean, with its late pseudo-gradient replaced by its fresh
    one. Outer SGD is linear, so the replica differs from the canonical state by the effect of its own terms
    share_r d_r - share_(r-1) d_(r-1). Over the rounds these telescope, so that
        view = canonical - lr (c + mu u),  u <- mu u + c,  c = share d
    with Nesterov, and canonical - lr u without: a single buffer `u` holds the whole history. The canonical state stays
    bit-identical on all nodes; the view is local. Before a round opens its share is an estimate; `correct` puts the
    true share into `u` when the mean arrives, so an error lasts for one phase. Each term keeps its round's share, so
    members may change. Zeroing `u` removes the difference: the flush at the end of the run and at a checkpoint does so,
    after the late mean was applied.
    """

    def __init__(self, *, lr: float, momentum: float, nesterov: bool = True) -> None:
        self._lr = lr
        self._momentum = momentum
        self._nesterov = nesterov

    def add(self, history: Tensor, fresh: Tensor, *, share: float) -> None:
        """History <- mu history + share fresh, in place: add the pseudo-gradient that was just sent to u."""
        history.mul_(self._momentum).add_(fresh.mul(share))

    def correct(self, history: Tensor, sent: Tensor, *, by: float) -> None:
        """History <- history + by sent, in place: correct the share that `add` used, which was too small by `by`."""
        history.add_(sent.mul(by))

    def write(self, canonical: Tensor, history: Tensor, fresh: Tensor, out: Tensor, *, share: float) -> None:
        """Write the parameters that this node continues from, after `add` of the same `fresh`."""
        step = fresh.mul(share).add_(history.mul(self._momentum)) if self._nesterov else history
        out.copy_(canonical).sub_(step.mul(self._lr))


class EagerMerge(_ShardMerge):
    """Applies this node's own share of a contribution at once; the others' part follows when it arrives.

    Needs two more buffers of the model's size: the parameters at the start of the phase, and the history of the node's
    own pseudo-gradients (`EagerView`). If a fragment's mean arrives before the fragment is sent again, its view becomes
    the outer parameters, and the inner steps since then stay.
    """

    def __init__(self, parts: OuterParts, outer: Tensor, config: OuterSGDConfig) -> None:
        super().__init__(parts, outer)
        parts.buffers.open(VIEW, HISTORY)
        self._config = config
        self._expected_share = 0.0
        """Share of the last contribution, as given to `on_sent`."""
        for fragment_index in range(len(parts.fragments)):
            self.restart(fragment_index)

    @property
    def anchor(self) -> Tensor:
        return self._parts.buffers[VIEW]

    def on_sent(self, fragment_index: int, share: float, outer_step: int) -> None:
        config, own = self._config, self._own(fragment_index)
        momentum = OuterSGD(config).momentum_at(outer_step)
        eager = EagerView(lr=config.lr, momentum=momentum, nesterov=config.nesterov)
        fresh = self._contributed(fragment_index)
        for part in self._shards_of(fragment_index):
            view, history = own[part.name]
            eager.add(history, fresh[part.name], share=share)
            eager.write(part.outer, history, fresh[part.name], view, share=share)
            copy_over(view, part.inner)
        self._expected_share, self._taken = share, 1.0

    def on_counted(self, fragment_index: int, share: float) -> None:
        by = share - self._expected_share
        if by == 0:
            return
        own, config = self._own(fragment_index), self._config
        eager = EagerView(lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)
        for name, sent in self._contributed(fragment_index).items():
            eager.correct(own[name][1], sent, by=by)

    def on_late_apply(self, fragment_index: int) -> None:
        """Do nothing: `on_sent` writes the view anew."""

    def receive(self, fragment_index: int) -> None:
        own = self._own(fragment_index)
        for part in self._shards_of(fragment_index):
            view, history = own[part.name]
            part.inner.add_(to_device(part.outer - view, part.inner.device))
            view.copy_(part.outer)
            history.zero_()

    def restart(self, fragment_index: int) -> None:
        self._taken = 1.0
        own = self._own(fragment_index)
        for part in self._shards_of(fragment_index):
            view, history = own[part.name]
            copy_over(part.outer, part.inner)
            view.copy_(part.outer)
            history.zero_()

    def rebase_after_step(self, fragment_index: int) -> Callable[[], None]:
        own, before = (
            self._own(fragment_index),
            [(part, part.outer.clone()) for part in self._shards_of(fragment_index)],
        )

        def follow() -> None:
            for part, old in before:
                moved = part.outer - old
                part.inner.add_(to_device(moved, part.inner.device))
                own[part.name][0].add_(moved)

        return follow

    def take_back(self, fragment_index: int, *, is_kept: bool) -> None:
        super().take_back(fragment_index, is_kept=is_kept)
        self.receive(fragment_index)  # the own share, which counted when it was sent, leaves the view

    def _own(self, fragment_index: int) -> dict[str, tuple[Tensor, Tensor]]:
        names, shards = self._parts.fragments[fragment_index].names, self._parts.shards
        views, histories = (
            shards.parts(self._parts.buffers[VIEW], names),
            shards.parts(self._parts.buffers[HISTORY], names),
        )
        return {name: (view, history) for (name, view), (_, history) in zip(views, histories, strict=True)}


def build_merge(parts: OuterParts, config: RoundsConfig, outer: Tensor, sgd: OuterSGDConfig | None) -> Merge:
    """The merge that a config asks for. `outer`: (n,) float32, the outer parameters. `sgd`: the outer step, if SGD."""
    match config.merge:
        case "overwrite":
            return MixMerge(parts, outer, alpha=0.0)
        case "mix":
            return MixMerge(parts, outer, alpha=config.alpha)
        case "eager":
            assert sgd is not None, "load_algorithm has seen to that"
            return EagerMerge(parts, outer, sgd)


class FragmentDrift:
    """Phases by which each fragment of a node is ahead of the outer parameters: the training in its delta. Pure.

    With N fragments, each is contributed every N phases. A joining node starts with the outer parameters of all
    fragments at once, so its first contributions hold fewer phases and are smaller. If members differ in this, a round
    weighs them by phases as well (`RoundPlan.shares`).

    `fragments`: their number. `travels`: fraction of a phase that a round overlaps. `merge`, `alpha`: how a node merges
    an arriving round, as in `DilocoConfig`.
    """

    def __init__(
        self, fragments: int, *, travels: float, merge: Literal["overwrite", "mix", "eager"], alpha: float
    ) -> None:
        self._ahead = [0.0] * fragments
        self._sent = [0.0] * fragments
        self._is_eager = merge == "eager"
        self._keeps = {"overwrite": 0.0, "mix": alpha, "eager": 1.0}[merge]
        self._usual = fragments - (1 - self._keeps) * travels

    def end_phase(self, part: float = 1.0) -> None:
        """Add a phase, or part of it, to all fragments."""
        self._ahead = [ahead + part for ahead in self._ahead]

    def contribute(self, fragment_index: int) -> float:
        """Return this contribution's training as a fraction of the usual number of phases."""
        self._sent[fragment_index] = self._ahead[fragment_index]
        if len(self._ahead) == 1:  # every phase ends with its turn
            return 1.0
        return round(max(0.0, self._ahead[fragment_index]) / self._usual, _DIGITS)

    def receive(self, fragment_index: int, since: float, max_phase_fraction: float) -> None:
        """Merge a fragment with the outer parameters, `since` phases after it was contributed.

        `max_phase_fraction`: of the round (`RoundPlan.max_phase_fraction`). The outer parameters advanced by this many
        usual contributions, an eager node's by its own one. Merging keeps a fraction of the remaining distance.
        """
        went_on = (
            max_phase_fraction * self._usual
            if max_phase_fraction and not self._is_eager
            else self._sent[fragment_index]
        )
        self._ahead[fragment_index] = self._keeps * (self._ahead[fragment_index] + since - went_on) - since

    def take_back(self, fragment_index: int) -> None:
        """Add the phases of the last contribution to delta again: it was followed by `restart` and will not count."""
        self._ahead[fragment_index] += self._sent[fragment_index]

    def restart(self, fragment_index: int) -> None:
        """Train a fragment from the outer parameters."""
        self._ahead[fragment_index] = 0.0
