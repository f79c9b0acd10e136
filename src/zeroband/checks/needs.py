"""Predicts a run's bytes on this node by place, from its configuration. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from zeroband.config.model import LlamaConfig, matrix_parameter_count, parameter_count
from zeroband.config.optim import MOMENT_BYTES
from zeroband.config.outer import CustomConfig, DdpConfig, DemoConfig, DilocoConfig, RoundsConfig, SparseLocoConfig
from zeroband.config.schema import RunConfig
from zeroband.kernels.formats import FORMATS

_VALUE_BYTES = 4
"""Size of a float32, the type of all state."""

_HALF_BYTES = 2

COPIED_BYTES = 256 << 20
"""A donor copies smaller states, whose rounds may be shorter than a fetch. Larger ones are served in place, except by
algorithms with one-step rounds."""

PROCESS_BYTES = 3_000_000_000
"""Memory of a rank with torch, CUDA's libraries and pinned batches. Assumed, not measured."""

CPU_PROCESS_BYTES = 300_000_000
"""Memory of a rank with torch and a model of no size on a CPU. Measured: 296 to 310 MB."""

NCCL_BYTES = 1 << 30
"""Space in /dev/shm for NCCL on a node of several ranks: 10 MB per channel between GPUs without direct access. NVIDIA
starts its containers with this size (--shm-size=1g)."""

_LEAST_SECTIONS = 1
"""An outer state has at least the parameters."""


@dataclass(frozen=True)
class Needs:
    """Predicted needs of a run.

    `vocab_size`, `sections`, `built_params`: of the tokenizer, a custom algorithm and a model that is not this
    package's, which are unknown before loading them: 0 and 1 then give a lower bound.
    """

    config: RunConfig
    vocab_size: int = 0
    sections: int = _LEAST_SECTIONS
    built_params: int = 0

    @property
    def params(self) -> int:
        return self.built_params or parameter_count(self.config.model, self.vocab_size)

    @property
    def shared_bytes(self) -> int:
        """Bytes in shared memory, except payloads."""
        return sum(self.shared_parts.values())

    @property
    def shared_parts(self) -> dict[str, int]:
        """`shared_bytes` by purpose."""
        held, work, inner = self._buffers
        staged = 0 if self.config.ckpt.path is None else held + inner
        values = {"outer state": held, "work buffers": work, "checkpoint staging": staged}
        parts = {purpose: _VALUE_BYTES * self.params * each for purpose, each in values.items()}
        outer = self.config.outer
        if isinstance(outer, DilocoConfig | DdpConfig | CustomConfig):
            codec = FORMATS[self.config.codec_name]
            encodings = int(not codec.is_exact)  # the encoded mean
            encodings += isinstance(outer, DilocoConfig) and outer.state_device == "cuda"  # copies from the GPU
            parts["work buffers"] += encodings * codec.encoded_size(self.params)
        return parts

    def host_parts(self, ranks: int) -> dict[str, int]:
        """Bytes outside of shared memory on a node with GPUs, by purpose.

        A donor's copy exists while another node joins, twice if two rounds are fetched at a time. An outer step pins
        room for two of the longest parameter, which is the embedding.
        """
        held, model = self._buffers[0], self.config.model
        copied = _VALUE_BYTES * self.params * held
        if isinstance(self.config.outer, DilocoConfig | SparseLocoConfig):
            copied = min(copied, COPIED_BYTES)
        first = 0 if isinstance(model, LlamaConfig) else self.params  # rank 0 builds other models whole
        longest = self.vocab_size * model.d_model if isinstance(model, LlamaConfig) else 0
        return {
            "donor's copy": copied,
            "first weights": _VALUE_BYTES * first,
            "pinned copies": 2 * _VALUE_BYTES * longest,
            "processes": PROCESS_BYTES * ranks,
        }

    @property
    def training_bytes(self) -> int:
        """Bytes of parameters, gradients and moments over all ranks of the node, without activations."""
        return _VALUE_BYTES * 2 * self.params + self.moment_bytes

    @property
    def moment_bytes(self) -> int:
        """Bytes of the inner optimizer's moments over all ranks of the node; vectors count as matrices."""
        if isinstance(self.config.outer, DemoConfig):
            return 0
        optim, model, of_muon = self.config.optim, self.config.model, 0
        if optim.muon is not None and isinstance(model, LlamaConfig):
            of_muon = matrix_parameter_count(model)  # one moment; checkpoints store zeros for the other
        return _VALUE_BYTES * of_muon + round(2 * MOMENT_BYTES[optim.state_dtype] * (self.params - of_muon))

    @property
    def checkpoint_bytes(self) -> int:
        """Size of one checkpoint, with this node's inner state."""
        held, _, inner = self._buffers
        return _VALUE_BYTES * self.params * ((held or 1) + inner)

    @property
    def export_bytes(self) -> int:
        if self.config.export is None:
            return 0
        return self.params * (_HALF_BYTES if self.config.export.dtype == "bfloat16" else _VALUE_BYTES)

    @property
    def journal_bytes(self) -> int:
        """Largest size of the journal of rounds: the newest is always kept."""
        if self.config.outer is None:
            return 0
        update = self.params * (_VALUE_BYTES if self.config.codec_name == "fp32" else 1)
        _, rounds = self._rounds
        return max(update, min(round(self.config.elastic.journal_gb * 1e9), rounds * update))

    @property
    def kept_checkpoints(self) -> int:
        """Most checkpoints at a time: an old one is removed once a newer one is complete."""
        steps, rounds = self._rounds
        every = self.config.ckpt.rounds_between(are_rounds_steps=steps == 1)
        return min(self.config.ckpt.keep_last + 1, -(-rounds // every))

    @property
    def _rounds(self) -> tuple[int, int]:
        """Steps per round, and rounds of the run."""
        outer = self.config.outer
        steps = 1 if outer is None else outer.round_steps or 1
        return steps, -(-self.config.train.total_steps // steps)

    @property
    def _buffers(self) -> tuple[int, int, int]:
        """Float32 values per parameter: outer state, work buffers, and inner state in checkpoints."""
        needs_feedback, outer = FORMATS[self.config.codec_name].needs_feedback, self.config.outer
        is_eager = isinstance(outer, RoundsConfig) and outer.merge == "eager"
        own = 2 * is_eager  # parameters to train from, and their history
        match outer:
            case None:
                return 0, 0, 3  # parameters and two moments, in checkpoints only
            case DdpConfig():
                return 3, 2, 0  # the outer state has the moments
            case DemoConfig():
                return 2, 1 + (outer.score is not None), 0  # parameters, momentum; steps by signs have no moments
            case SparseLocoConfig():
                return 2, 2 + own + (outer.score is not None), 2  # parameters and errors
            case CustomConfig():
                return self.sections, 2 + own + needs_feedback, 2
            case DilocoConfig():
                return 2, 2 + own + needs_feedback, 2
