"""Ranges of the numbers, texts and lists in the store's records. Pure.

A record with a value outside its range is ignored. The bounds are far above what an honest node sends, and low enough
for the rules to calculate with every accepted value. A member's dealt samples bound its numbers further
(`elastic.membership.limits`).
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field

_T = TypeVar("_T")

MOST_COUNT = 1 << 53
"""Largest integers that are exact in float64."""

MOST_MEMBERS = 1 << 16
"""Most entries of a list with one per member."""

MOST_LOSS, MOST_MAGNITUDE, MOST_PHASES = 1e30, 1e60, 1e6

Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]
Round = Annotated[int, Field(ge=0, lt=1 << 32)]
"""Number of a round; data plane frames have 32 bits for it, and for an epoch."""
Epoch = Annotated[int, Field(ge=0, lt=1 << 32)]
Version = Annotated[int, Field(ge=0, lt=1 << 47)]
"""Number of a plan; frames have 48 bits for it."""
Number = Annotated[int, Field(ge=-1, le=MOST_COUNT)]
"""Number of a round or step; -1: none."""
Mbit = Annotated[int, Field(ge=0, le=10**9)]
"""Mbit/s."""
Millis = Annotated[int, Field(ge=0, le=10**9)]
Port = Annotated[int, Field(ge=0, le=65535)]
MemberPlace = Annotated[int, Field(ge=0, lt=MOST_MEMBERS)]
"""Index of a member in a plan."""
Loss = Annotated[float, Field(ge=-MOST_LOSS, le=MOST_LOSS, allow_inf_nan=False)]
"""Nats per token."""
Magnitude = Annotated[float, Field(ge=0, le=MOST_MAGNITUDE, allow_inf_nan=False)]
"""Norm or size of float32 values."""
Phases = Annotated[float, Field(ge=0, le=MOST_PHASES, allow_inf_nan=False)]
"""Training in units of a usual phase."""
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Ratio = Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
Id = Annotated[str, Field(max_length=512)]
"""Name of a member, node, site, corpus or session; a digest."""
Text = Annotated[str, Field(max_length=1 << 16)]
"""A sentence, or a configuration value."""
EachMember = Annotated[tuple[_T, ...], Field(max_length=MOST_MEMBERS)]
"""One entry per member, or for some of them."""
