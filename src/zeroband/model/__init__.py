"""The language model: decoder, first weights, loss, sampling, inner steps, sharding. It knows no data."""

from zeroband.config.model import flops_per_token, parameter_count
from zeroband.model.attention import attend_plain, attention_on, varlen_attention
from zeroband.model.generate import evaluating, generate
from zeroband.model.init import init_weights
from zeroband.model.loss import IGNORE_INDEX, TokenLoss, gradient_scale, linear_loss, next_token_loss
from zeroband.model.transformer import Transformer

__all__ = [
    "IGNORE_INDEX",
    "TokenLoss",
    "Transformer",
    "attend_plain",
    "attention_on",
    "evaluating",
    "flops_per_token",
    "generate",
    "gradient_scale",
    "init_weights",
    "linear_loss",
    "next_token_loss",
    "parameter_count",
    "varlen_attention",
]
