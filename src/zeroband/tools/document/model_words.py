"""A model in a sentence. Pure."""

from __future__ import annotations

from zeroband.config.model import LlamaConfig, Model
from zeroband.observe.status import human_count


def model_in_words(config: Model, parameters: int | None) -> str:
    """What a reader wants to know of a model: its size and its shape. `parameters`: None or 0: not known."""
    size = f"{human_count(parameters)} trained parameters: " if parameters else ""
    if not isinstance(config, LlamaConfig):
        values = config.model_dump(exclude_none=True, exclude={"type"})
        keys = ", ".join(f"{name} {value}" for name, value in values.items())
        return f"{size}{config.type} ({keys})" if keys else f"{size}{config.type}"
    heads = f"{config.n_heads} heads"
    if config.kv_heads != config.n_heads:
        heads += f" over {config.kv_heads} of keys and values"
    tied = "tied to the output head" if config.tie_embeddings else "apart from the output head"
    return (
        f"{size}a Llama decoder of {config.n_layers} layers, width {config.d_model}, {heads}, "
        f"SwiGLU of {config.ff_width}; embedding {tied}"
    )
