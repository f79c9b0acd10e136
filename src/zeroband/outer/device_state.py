"""The outer state of a rank's shards on its GPU, so that a round moves one byte per parameter over PCIe each way.

The canonical state stays in shared memory: the CPU takes the same outer steps there, from the same encoded mean, with
the same bits, so nothing is copied back for a digest, a checkpoint or a joiner. The GPU holds a copy that follows it.
The copy is reloaded when the state is fetched or restored, and a part of it is compared in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zeroband.config.outer import DilocoConfig
from zeroband.elastic.rounds.exchange import MeanExchange, are_finite
from zeroband.elastic.rounds.interfaces import CONTRIBUTION, OuterParts
from zeroband.elastic.transport.engine import Encoded
from zeroband.errors import ConfigError
from zeroband.kernels.codec import CODECS, Codec
from zeroband.kernels.fused import BLOCK, passes_on
from zeroband.kernels.robust import RobustRule
from zeroband.kernels.scan import all_finite
from zeroband.node.async_copy import PinnedMemory
from zeroband.outer.merge import Contribute, Merge
from zeroband.outer.outer_optimizer import OuterSGD
from zeroband.state.flat import ShardMap, SharedBuffers

_CODEC = CODECS["int8"]
_ENCODED, _ENCODED_RESULT = "encoded", "encoded-result"


@dataclass(frozen=True)
class _ShardPlace:
    """Where a shard lies in the flat state, and its copy on the GPU. Whole blocks are [first, last)."""

    start: int
    stop: int
    first: int
    last: int
    params: Tensor
    momentum: Tensor


def require_device(config: DilocoConfig, codec: Codec, device: torch.device) -> None:
    """Raises ConfigError where `outer.state_device = "cuda"` is not possible on this node."""
    if config.state_device == "cpu":
        return
    way_out = 'or set outer.state_device = "cpu"'
    if device.type != "cuda":
        raise ConfigError(f"outer.state_device = 'cuda': this node trains on {device.type}; give it a GPU, {way_out}")
    if codec != _CODEC:
        raise ConfigError(
            f"outer.state_device = 'cuda' encodes as int8 and the nodes of this run exchange {codec.name}; set "
            f"comm.backend = 'native' and comm.codec = 'int8' on all nodes, {way_out}"
        )
    if (config.fragments, config.overlap, config.merge) != (1, 0, "overwrite"):
        raise ConfigError(
            "outer.state_device = 'cuda' goes with rounds of the whole model that training waits for; leave "
            f"outer.fragments, overlap and merge as they are, {way_out}"
        )


class DeviceState(Merge):
    """The copy of the outer state on the GPU; also the merge of a node that waits for every round.

    Made and called by all local ranks, except `encode_borders`. `buffers`: with an open contribution buffer, in which
    shards write the blocks that they share. `model_shards`: this rank's, by name, on the device. `params`, `momentum`:
    the canonical state, (n,) float32 on CPU.
    """

    keeps_delta = False

    def __init__(
        self,
        buffers: SharedBuffers,
        shards: ShardMap,
        optimizer: OuterSGD,
        device: torch.device,
        model_shards: Callable[[], Mapping[str, Tensor]],
        *,
        params: Tensor,
        momentum: Tensor,
    ) -> None:
        self._optimizer = optimizer
        self._device = device
        self._passes = passes_on(device)
        self._model_shards = model_shards
        self._canonical = params, momentum
        self._contribution = buffers[CONTRIBUTION]
        self._taken_step: int | None = None
        """Outer step that the GPU has taken and `_settle` has not compared yet."""
        numel = buffers.numel
        size = _CODEC.encoded_size(numel)
        self.encoded = Encoded(buffers.open_bytes(_ENCODED, size), buffers.open_bytes(_ENCODED_RESULT, size))
        self._sent, self._came = _halves(self.encoded.contribution, numel), _halves(self.encoded.result, numel)
        self._borders = _between(shards.all_ranges(), numel)
        self._places: dict[str, _ShardPlace] = {}
        for name, (start, stop) in shards.ranges().items():
            first, last = _whole_blocks(start, stop)
            room = [torch.empty(stop - start, dtype=torch.float32, device=device) for _ in range(2)]
            self._places[name] = _ShardPlace(start, stop, first, last, *room)
        with ExitStack() as stack:
            self._pinned = self._pin(stack)
            self._load()
            self._stack = stack.pop_all()

    def _pin(self, stack: ExitStack) -> PinnedMemory:
        """Map this rank's part of the encodings for the GPU. Raises ConfigError if its driver refuses."""
        places = self._places.values()
        parts = [
            *(part for place in places for part in _encoded_parts(self._sent, place.first, place.last)),
            *(part for place in places for part in _encoded_parts(self._came, place.start, place.stop)),
        ]
        pinned = PinnedMemory(self._device, parts, stack)
        if pinned.error:
            raise ConfigError(
                f"the GPU's driver does not lock {sum(part.nbytes for part in parts)} bytes of node.shm_dir "
                f"(cudaHostRegister: error {pinned.error}); put node.shm_dir on a memory file system, as /dev/shm is, "
                'or set outer.state_device = "cpu"'
            )
        return pinned

    def close(self) -> None:
        """Unlock the memory after the GPU's queued work; call before the buffers are freed."""
        with self._stack:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

    def _load(self) -> None:
        """Copy the canonical state to the GPU: 8 bytes per parameter."""
        for place in self._places.values():
            for ours, canonical in zip((place.params, place.momentum), self._canonical, strict=True):
                ours.copy_(canonical[place.start : place.stop])

    # -- a round ------------------------------------------------------------------------------------------------

    def contribute(self) -> list[str]:
        """Encode outer minus inner parameters into shared memory; returns the names of non-finite parameters.

        Returns when everything is written, except the blocks of `encode_borders`.
        """
        shards = self._model_shards()
        has_bad = torch.zeros(len(self._places), dtype=torch.int32, device=self._device)
        spoilt_borders: set[str] = set()
        for i, (name, place) in enumerate(self._places.items()):
            inner = shards[name].detach().view(-1)
            self._encode(place, inner, has_bad[i : i + 1])
            if not self._write_borders(place, inner):
                spoilt_borders.add(name)
        flags: list[int] = has_bad.tolist()  # waits for the GPU, and so for the copies too
        return [n for n, is_bad in zip(self._places, flags, strict=True) if is_bad or n in spoilt_borders]

    def _encode(self, place: _ShardPlace, inner: Tensor, has_bad: Tensor) -> None:
        first, last, blocks = place.first, place.last, (place.last - place.first) // BLOCK
        if blocks == 0:
            return
        part = slice(first - place.start, last - place.start)
        scales = torch.empty(blocks, dtype=torch.float32, device=self._device)
        codes = torch.empty(last - first, dtype=torch.int8, device=self._device)
        self._passes.encode_difference(place.params[part], inner[part], scales, codes, has_bad)
        for part, encoded in zip(_encoded_parts(self._sent, first, last), (scales, codes), strict=True):
            self._pinned.store(part, encoded)

    def _write_borders(self, place: _ShardPlace, inner: Tensor) -> bool:
        """Write differences outside whole blocks unencoded; False if one is not finite."""
        is_finite = True
        for start, stop in ((place.start, place.first), (place.last, place.stop)):
            if stop > start:
                part, out = slice(start - place.start, stop - place.start), self._contribution[start:stop]
                out.copy_(place.params[part] - inner[part].to(torch.float32))
                is_finite = is_finite and all_finite(out)
        return is_finite

    def encode_borders(self) -> None:
        """Encode the blocks that several shards share. Called by one rank after all contributed finite values."""
        all_scales, all_codes = self._sent
        for start, stop in self._borders:
            scales, codes = _halves(_CODEC.encode(self._contribution[start:stop]), stop - start)
            all_scales[start // BLOCK : start // BLOCK + scales.numel()].copy_(scales)
            all_codes[start:stop].copy_(codes)

    def take_step(self, outer_step: int) -> None:
        """Take the outer step by the encoded mean and set the inner parameters to the result. Does not wait.

        The canonical state takes the same step before `receive` or `restart`.
        """
        step, shards = self._optimizer.step_at(outer_step), self._model_shards()
        self._taken_step = outer_step
        for name, place in self._places.items():
            came = _encoded_parts(self._came, place.start, place.stop)
            scales, codes = (self._pinned.load(part, self._device) for part in came)
            inner, skip = shards[name].detach().view(-1), place.start % BLOCK
            self._passes.take_step(scales, codes, skip, place.params, place.momentum, inner, step)

    def _settle(self, outer_step: int) -> None:
        """Wait for the step and compare one shard's parameters with the CPU's; each step compares another shard."""
        names = list(self._places)
        name = names[outer_step % len(names)]
        place = self._places[name]
        if not torch.equal(place.params.cpu(), self._canonical[0][place.start : place.stop]):
            raise RuntimeError(
                f"after outer step {outer_step} the GPU holds other outer parameters for {name} than the CPU; its "
                "arithmetic or its memory is at fault: start this node again, with outer.state_device = 'cpu' if it "
                "comes again"
            )

    # -- a merge ------------------------------------------------------------------------------------------------

    @property
    def anchor(self) -> Tensor:
        return self._canonical[0]

    def write(self, fragment_index: int, contribute: Contribute) -> Mapping[str, float | None]:
        """Write nothing: `DeviceExchange` has the contribution encoded on the GPU."""
        return {}

    def on_late_apply(self, fragment_index: int) -> None:
        self.restart(fragment_index)

    def receive(self, fragment_index: int) -> None:
        self.restart(fragment_index)

    def restart(self, fragment_index: int) -> None:
        """Train from the outer parameters: those of the step just taken, else reload the canonical ones.

        Raises RuntimeError if GPU and CPU have different values.
        """
        step, self._taken_step = self._taken_step, None
        if not self._places:
            return
        if step is not None:
            self._settle(step)
            return
        self._load()
        shards = self._model_shards()
        for name, place in self._places.items():
            shards[name].detach().view(-1).copy_(place.params)

    def take_back(self, fragment_index: int, *, is_kept: bool) -> None:
        """Do nothing: the node waits for the round that counts its contribution."""

    def rebase_after_step(self, fragment_index: int) -> Callable[[], None]:
        """Start from the outer parameters: the contribution holds all of this node's training."""
        return partial(self.restart, fragment_index)


class DeviceExchange(MeanExchange):
    """The mean of contributions that the GPU encodes."""

    def __init__(self, parts: OuterParts, device: DeviceState, rule: RobustRule | None) -> None:
        super().__init__(parts, rule, encoded=device.encoded)
        self._device = device
        self._numel = parts.buffers.numel

    def load(
        self, round: int, fragment_index: int, names: Collection[str], sizes: Mapping[str, float | None] | None = None
    ) -> bool:
        is_finite = are_finite(self._device.contribute(), self._mesh.local, round)
        if is_finite and self._mesh.local.rank == 0:
            self._device.encode_borders()
            self.largest = self._codec.largest(self._device.encoded.contribution, self._numel)
        return is_finite


def _whole_blocks(start: int, stop: int) -> tuple[int, int]:
    """The whole blocks inside a range; an empty range at its start if there is none."""
    first, last = -(-start // BLOCK) * BLOCK, stop // BLOCK * BLOCK
    return (first, last) if first < last else (start, start)


def _between(ranges: Sequence[tuple[int, int]], numel: int) -> list[tuple[int, int]]:
    """Gaps between the whole blocks of these ranges; borders are multiples of the block, except the end."""
    left: list[tuple[int, int]] = []
    at = 0
    for first, last in sorted(_whole_blocks(*one) for one in ranges):
        if first < last:
            if at < first:
                left.append((at, first))
            at = last
    return [*left, (at, numel)] if at < numel else left


def _halves(data: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Scales and codes of an encoding, as views."""
    border = 4 * -(-numel // BLOCK)
    return data[:border].view(torch.float32), data[border:].view(torch.int8)


def _encoded_parts(halves: tuple[Tensor, Tensor], start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Scales of all blocks that values [start, stop) lie in, and their codes, as views."""
    scales, codes = halves
    return scales[start // BLOCK : -(-stop // BLOCK)], codes[start:stop]
