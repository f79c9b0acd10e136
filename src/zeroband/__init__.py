"""zeroband: elastic pre-training of language models over unreliable machines and ordinary internet links."""

__version__ = "0.1.0"
