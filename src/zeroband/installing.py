"""How to get what this installation lacks, in words that suit an installed package and a clone."""

from __future__ import annotations

DISTRIBUTION = "zeroband-elastic"
"""What installers call the package; `zeroband` on the index is another library."""


def way_to_extra(extra: str) -> str:
    """What to type for an optional part of the package."""
    return (
        f"install the extra `{extra}`: `pip install '{DISTRIBUTION}[{extra}]'`, or in a clone `uv sync --extra {extra}`"
    )


def way_to_native_library() -> str:
    """What to type for the native library to be built."""
    return (
        f"install a C++ compiler and build the package again: `pip install --force-reinstall --no-deps --no-binary "
        f"{DISTRIBUTION} {DISTRIBUTION}`, or in a clone `uv sync --reinstall-package {DISTRIBUTION}`"
    )
