"""Tiny models of other people, and what the trainer makes of them on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zeroband.config import RunConfig
from zeroband.elastic.membership.departure import Departure
from zeroband.node.mesh import LocalMesh
from zeroband.runtime.build import TrainerParts, build_trainer

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma3_text": {"sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
}


def hub_section(family: str, **changes: Any) -> dict[str, Any]:
    """A [model] section of type transformers."""
    config = {"model_type": family, **SIZES, **FAMILIES.get(family, {})}
    return {"type": "transformers", "config": config, **changes}


def trained_with(model: dict[str, Any], local: LocalMesh, folder: Path, **sections: dict[str, Any]) -> TrainerParts:
    """The trainer's parts for a [model] section, with made-up text of short documents."""
    asked = {
        "model": model,
        "data": {
            "seq_length": 32,
            "source": {"type": "synthetic", "documents": 40, "mean_length": 20},
            "cache_dir": folder,
            **sections.pop("data", {}),
        },
        "train": {"total_steps": 10, "batch_size": 4, "micro_bs": 2, "dtype": "float32", **sections.pop("train", {})},
        "optim": {"warmup_steps": 1, "adamw": {"lr": 3e-3}, **sections.pop("optim", {})},
        **sections,
    }
    return build_trainer(RunConfig.model_validate(asked), local, Departure(grace_s=1.0))
