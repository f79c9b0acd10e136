"""How big a model is and what a token costs: plain arithmetic on its configuration."""

from __future__ import annotations

from zeroband.config.model import LlamaConfig, Model


def parameter_count(config: Model, vocab_size: int) -> int:
    """Number of trainable values, a tied head counted once; 0 of a model that has to be built to be counted."""
    if not isinstance(config, LlamaConfig):
        return 0
    embeddings = vocab_size * config.d_model * (1 if config.tie_embeddings else 2)
    norms = (2 * config.n_layers + 1) * config.d_model
    return embeddings + norms + matrix_parameter_count(config)


def matrix_parameter_count(config: LlamaConfig) -> int:
    """Number of values in the matrices between embedding and head: what Muon steps where it is the inner optimizer."""
    return config.n_layers * _block_matrices(config)


def flops_per_token(config: LlamaConfig, vocab_size: int, seq_length: int) -> int:
    """Floating-point operations of one training token, forward and backward, as MFU is reported.

    6 N + 12 L d t: N counts the matrices that a token is multiplied with (the head, tied or not, but neither the
    embedding, which is a look-up, nor the norms), L is n_layers, d is d_model, t is seq_length. Attention is counted
    in full, as if it were not causal, and recomputed activations are not counted (PaLM, arXiv:2204.02311, appendix B).
    """
    matrices = matrix_parameter_count(config) + vocab_size * config.d_model
    return 6 * matrices + 12 * config.n_layers * config.d_model * seq_length


def _block_matrices(config: LlamaConfig) -> int:
    kv_width = config.d_model // config.n_heads * config.kv_heads
    attention = 2 * config.d_model * (config.d_model + kv_width)
    return attention + 3 * config.d_model * config.ff_width
