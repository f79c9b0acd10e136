"""What a node saves of itself beside the sections of the state, whoever trains on it: its inner optimizer, and more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

OWN_FILE = "rank_{rank}.safetensors"
"""What `pack` gave on a local rank."""


class OwnState(Protocol):
    """An inner optimizer as its checkpoints see it. All local ranks call the methods together."""

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Moments that are saved as flat buffers, on whatever number of ranks they are read again."""
        ...

    def moments(self) -> Mapping[str, Any]:
        """This rank's shards of them."""
        ...

    def named_moments(self) -> Mapping[str, Tensor]:
        """`MOMENT.PARAMETER`, sharded as the parameters; writing into them sets them."""
        ...

    def counters(self) -> Mapping[str, Any]:
        """How far it is; JSON."""
        ...

    def pack(self) -> bytes | None:
        """What else this rank has, as a file of its own; None: nothing."""
        ...

    def restore(self, counters: Mapping[str, Any], packed: bytes | None) -> bool:
        """Take over what `counters` and `pack` gave, after the moments were; whether it fits."""
        ...

    def seek(self, step: int) -> None:
        """Go on with the schedule at this inner step."""
        ...

    def forget_moments(self) -> None:
        """Start the moments anew, at the same place of the schedule."""
        ...
