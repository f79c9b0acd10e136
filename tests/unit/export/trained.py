"""Small models with norms that are not ones, as after training, in memory and in checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tests.unit.checkpoint.saves import RULES, Around, own

from zeroband.checkpoint.layout import plan_outer
from zeroband.checkpoint.manifest import Stamp
from zeroband.checkpoint.saving import Save, SaveContext, SaveOrder
from zeroband.checkpoint.storage import Storage
from zeroband.config.data import DataConfig, SyntheticSource
from zeroband.config.model import LlamaConfig
from zeroband.data.tokenizer import ByteTokenizer
from zeroband.data.tokens import Corpus
from zeroband.export.directory import TrainedModel
from zeroband.model import Transformer, init_weights
from zeroband.model.blueprint import LlamaBlueprint
from zeroband.state.digest import digest_of
from zeroband.state.flat import FlatLayout
from zeroband.state.slot import bytes_of

TINY = LlamaConfig(d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24)
CORPUS = Corpus(DataConfig(source=SyntheticSource(type="synthetic", documents=40), seq_length=32), 7, "0123", "byte/1")


def trained_of(config: LlamaConfig, *, seed: int = 1, seq_length: int = 32) -> TrainedModel:
    """A byte-level model that reads from memory."""
    tokenizer = ByteTokenizer()
    model = Transformer(config, tokenizer.padded_vocab_size)
    init_weights(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    blueprint = LlamaBlueprint(config, tokenizer.padded_vocab_size)
    return TrainedModel(blueprint, tokenizer, seq_length, model.state_dict().__getitem__)


def save(storage: Storage, step: int, trained: TrainedModel, **changes: Any) -> None:
    """Commit a checkpoint as a run of DiLoCo would."""
    layout = FlatLayout.of(trained.blueprint.on_meta())
    flat = torch.cat([trained.read(slot.name).flatten() for slot in layout.slots])
    buffers = {"params": flat, "momentum": torch.full_like(flat, 3.0)}
    stamp = Stamp(
        run_id="demo",
        session="s1",
        round=step // 10,
        inner_step=step,
        record={},
        state_digest=digest_of(*buffers.values()),
        sections=tuple(buffers),
        members=("a",),
        layout=layout.digest(),
        model=trained.blueprint.to_record(),
        tokenizer="byte",
        data=CORPUS.to_record(),
    )
    own(storage)
    plan = plan_outer(layout.slots, stamp.sections, max_bytes=4096)
    around = Around()
    outer = {name: bytes_of(buffer) for name, buffer in buffers.items()}
    context = SaveContext(storage, "a", RULES, around, layout.slots, plan, outer)
    assert Save(context, SaveOrder(replace(stamp, **changes), ("a",))).run(), around.told
