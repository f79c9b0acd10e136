"""The run's configuration: its schema, and how files, environment and flags become one frozen value. Loads no torch."""

from zeroband.config.load import load_config
from zeroband.config.schema import RunConfig

__all__ = ["RunConfig", "load_config"]
