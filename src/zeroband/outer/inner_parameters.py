"""What a node trains with beside the outer state: its own parameters when a round travels and when it has arrived.

Fragments are named by their turn. All methods write what this rank holds, and no more; all local ranks call them. One
rounding for each operation, on any device.

Sources: mixing is Streaming DiLoCo, arXiv:2501.18512, algorithm 2. Delayed and eager updates are arXiv:2502.12996. Its
abstract and its tables were read. Its equations are second-hand: they are those of a summary, and agree with how
others describe the method ("a mixture of the current local outer gradient with the delayed mixture of all other
replicas' outer gradients"). The rule for the first round, where nothing has arrived yet, is ours: it counts as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from zeroband.config.outer import OuterSGDConfig, RoundsConfig
from zeroband.elastic.rounds.exchange import CONTRIBUTION
from zeroband.elastic.rounds.interfaces import OuterParts
from zeroband.outer.outer_optimizer import OuterSGD
from zeroband.state.flat import parameter_shards

VIEW, HISTORY = "view", "history"


class InnerParameters(Protocol):
    """A node's own parameters, relative to the outer ones."""

    @property
    def anchor(self) -> Tensor:
        """(n,) float32: what a contribution is measured from."""
        ...

    def take_step(self, outer_step: int) -> None:
        """Begin the outer step that the canonical state takes now, where a copy of it takes it as well."""
        ...

    def sent(self, turn: int, share: float, outer_step: int) -> None:
        """A fragment was contributed, and training goes on before its mean is there.

        `share`: this node's in the mean, as far as known. `outer_step`: which of the fragment that will be, from 1.
        """
        ...

    def counted(self, turn: int, share: float) -> None:
        """The mean of what was sent last is there, in which this node had this share; before anything else is sent."""
        ...

    def expect(self, turn: int) -> None:
        """A fragment of the outer state moved, and `sent` follows at once with what was learned since it was sent."""
        ...

    def receive(self, turn: int) -> None:
        """A fragment of the outer state moved."""
        ...

    def restart(self, turn: int) -> None:
        """Train from the outer parameters of a fragment."""
        ...

    def following(self, turn: int) -> Callable[[], None]:
        """Called before a fragment of the outer state moves; what it returns, after that, has this node's go along.

        So what it learned, and nobody has got yet, stays relative to the outer parameters.
        """
        ...


@dataclass(frozen=True)
class _Part:
    """What this rank holds of one parameter: in the model, and (n,) float32 each in the flat buffers."""

    inner: Tensor
    """(n,) on the model's device; writing to it writes to the model."""
    outer: Tensor
    name: str


class _Shards:
    """What this rank holds of each fragment."""

    def __init__(self, parts: OuterParts, outer: Tensor) -> None:
        self._parts = parts
        self._outer = outer

    def of(self, turn: int) -> Iterator[_Part]:
        shards = parameter_shards(self._parts.model)
        for name, part in self._parts.shards.held(self._outer, self._parts.fragments[turn].names):
            yield _Part(shards[name].detach().view(-1), part, name)


def mix(inner: Tensor, outer: Tensor, *, alpha: float) -> None:
    """Inner <- alpha inner + (1 - alpha) outer, in place. 0 takes the outer parameters bit for bit, 1 the inner ones.

    What a replica learned during the overlap lives on in the alpha part.
    """
    if alpha == 0:
        inner.copy_(outer)
    elif alpha != 1:
        inner.mul_(alpha).add_(outer.mul(1.0 - alpha))


class MixMerge:
    """What arrives is mixed into the node's parameters, which keep a part of `alpha`; with 0 it replaces them.

    Source: Streaming DiLoCo, arXiv:2501.18512, algorithm 2. With 0 and an overlap of a whole round: the naive delayed
    updates of arXiv:2502.12996.
    """

    def __init__(self, parts: OuterParts, outer: Tensor, *, alpha: float) -> None:
        self.anchor = outer
        self._shards = _Shards(parts, outer)
        self._alpha = alpha

    def take_step(self, outer_step: int) -> None:
        """Do nothing: there is no copy."""

    def sent(self, turn: int, share: float, outer_step: int) -> None:
        """Do nothing: the others' part is missing."""

    def counted(self, turn: int, share: float) -> None:
        """Do nothing: nothing counted before its mean was there."""

    def expect(self, turn: int) -> None:
        self.receive(turn)

    def receive(self, turn: int) -> None:
        for part in self._shards.of(turn):
            mix(part.inner, part.outer.to(part.inner.device), alpha=self._alpha)

    def restart(self, turn: int) -> None:
        for part in self._shards.of(turn):
            part.inner.copy_(part.outer)

    def following(self, turn: int) -> Callable[[], None]:
        before = [(part, part.outer.clone()) for part in self._shards.of(turn)]

        def follow() -> None:
            for part, old in before:
                part.inner.add_((part.outer - old).to(part.inner.device))

        return follow


class EagerView:
    """A node's own parameters under eager updates, derived from the canonical ones, which apply late means only.

    An eager replica feeds its own outer SGD with the last round's mean, in which its fresh pseudo-gradient has taken
    the place of its late one. It differs from the canonical state by what its own terms
    share_r d_r - share_(r-1) d_(r-1) did, for the outer SGD is linear. Over the rounds they telescope, so that
        view = canonical - lr (c + mu u),  u <- mu u + c,  c = share d
    with Nesterov, and canonical - lr u without: one buffer `u` stands for the whole history. The canonical state stays
    bit-identical on all nodes; the view is local. While a round is not open its share is an estimate; `correct` puts
    the true one into `u` when the mean has come, so an error lasts for one phase. Zeroing `u` ends the difference: the
    flush at the end of the run, at a checkpoint and when members change, after the late mean was applied.
    """

    def __init__(self, *, lr: float, momentum: float, nesterov: bool = True) -> None:
        self._lr = lr
        self._momentum = momentum
        self._nesterov = nesterov

    def add(self, history: Tensor, fresh: Tensor, *, share: float) -> None:
        """History <- mu history + share fresh, in place: u takes in the pseudo-gradient that was just sent."""
        history.mul_(self._momentum).add_(fresh.mul(share))

    def correct(self, history: Tensor, sent: Tensor, *, by: float) -> None:
        """History <- history + by sent, in place: the share with which `add` took it in was smaller by so much."""
        history.add_(sent.mul(by))

    def write(self, canonical: Tensor, history: Tensor, fresh: Tensor, out: Tensor, *, share: float) -> None:
        """Write the parameters from which this node trains on, after `add` of the same `fresh`."""
        step = fresh.mul(share).add_(history.mul(self._momentum)) if self._nesterov else history
        out.copy_(canonical).sub_(step.mul(self._lr))


class EagerMerge:
    """What this node learned counts at once, with its share; the others' part follows when it arrives.

    Two more buffers of the size of the model: the parameters that this node began a phase with, and the history of its
    own pseudo-gradients (`EagerView`). Where a fragment's mean arrives before the fragment is sent again, its view
    becomes the outer one, and the inner steps since stay.
    """

    def __init__(self, parts: OuterParts, outer: Tensor, config: OuterSGDConfig) -> None:
        parts.buffers.open(VIEW, HISTORY)
        self._parts = parts
        self._buffers = parts.buffers
        self._shards = _Shards(parts, outer)
        self._config = config
        self._expected_share = 0.0
        """That of what was sent last, as `sent` was told."""
        for turn in range(len(parts.fragments)):
            self.restart(turn)

    @property
    def anchor(self) -> Tensor:
        return self._buffers[VIEW]

    def take_step(self, outer_step: int) -> None:
        """Do nothing: there is no copy."""

    def sent(self, turn: int, share: float, outer_step: int) -> None:
        config, own = self._config, self._own(turn)
        momentum = OuterSGD(config).momentum_at(outer_step)
        eager = EagerView(lr=config.lr, momentum=momentum, nesterov=config.nesterov)
        fresh = dict(self._parts.wire_layout.parts(self._buffers[CONTRIBUTION], self._parts.fragments[turn].names))
        for part in self._shards.of(turn):
            view, history = own[part.name]
            eager.add(history, fresh[part.name], share=share)
            eager.write(part.outer, history, fresh[part.name], view, share=share)
            part.inner.copy_(view)
        self._expected_share = share

    def counted(self, turn: int, share: float) -> None:
        by = share - self._expected_share
        if by == 0:
            return
        own, config = self._own(turn), self._config
        eager = EagerView(lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)
        for name, sent in self._parts.wire_layout.parts(self._buffers[CONTRIBUTION], self._parts.fragments[turn].names):
            eager.correct(own[name][1], sent, by=by)

    def expect(self, turn: int) -> None:
        """Do nothing: `sent` writes the view anew."""

    def receive(self, turn: int) -> None:
        own = self._own(turn)
        for part in self._shards.of(turn):
            view, history = own[part.name]
            part.inner.add_((part.outer - view).to(part.inner.device))
            view.copy_(part.outer)
            history.zero_()

    def restart(self, turn: int) -> None:
        own = self._own(turn)
        for part in self._shards.of(turn):
            view, history = own[part.name]
            part.inner.copy_(part.outer)
            view.copy_(part.outer)
            history.zero_()

    def following(self, turn: int) -> Callable[[], None]:
        own, before = self._own(turn), [(part, part.outer.clone()) for part in self._shards.of(turn)]

        def follow() -> None:
            for part, old in before:
                moved = part.outer - old
                part.inner.add_(moved.to(part.inner.device))
                own[part.name][0].add_(moved)

        return follow

    def _own(self, turn: int) -> dict[str, tuple[Tensor, Tensor]]:
        names, shards = self._parts.fragments[turn].names, self._parts.shards
        views, histories = shards.parts(self._buffers[VIEW], names), shards.parts(self._buffers[HISTORY], names)
        return {name: (view, history) for (name, view), (_, history) in zip(views, histories, strict=True)}


def build_inner_parameters(
    parts: OuterParts, config: RoundsConfig, outer: Tensor, sgd: OuterSGDConfig | None
) -> InnerParameters:
    """What a schedule asks for. `outer`: (n,) float32, the outer parameters. `sgd`: the outer step, if it is one."""
    match config.merge:
        case "overwrite":
            return MixMerge(parts, outer, alpha=0.0)
        case "mix":
            return MixMerge(parts, outer, alpha=config.alpha)
        case "eager":
            assert sgd is not None, "load_algorithm has seen to that"
            return EagerMerge(parts, outer, sgd)
