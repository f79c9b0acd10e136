"""The run's configuration: its schema, and its loading from files, environment and flags. Loads no torch.

The names below load the schema on first use: a guardian imports only small parts of this package, and building the
schema would be half of its start.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroband.config.load import load_config
    from zeroband.config.schema import RunConfig

__all__ = ["RunConfig", "load_config"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from zeroband.config.load import load_config
    from zeroband.config.schema import RunConfig

    globals().update(RunConfig=RunConfig, load_config=load_config)
    return globals()[name]
