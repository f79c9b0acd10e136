"""The one tree of errors; and, at the end, the ways out that many of them name.

ZerobandError
├── ConfigError        the user's input is wrong: names the value and the way out
│   ├── LineEnds       this node's line of the run met another one, which goes on in its place
│   ├── JoinRefused    this node's run differs from the running one: names the differing key
│   └── MachineUnfit   this machine lacks what the configuration needs: a line for each thing that is missing
├── PeerLost           another node left, stopped or was cut off: the round is retried without it
│   └── TransferStalled  no byte moved for too long: the round is opened again over new connections
├── RoundFailed        a round came to no result time and again, although no member was lost: the node ends
├── StoreLost          Redis did not answer within its deadline
├── StorageLost        text or token ids cannot be had: their storage is silent or refuses, or a file is gone or damaged
├── Fenced             this node was voted out while it was away: it comes back by the join path
├── RoundsMissed       the members committed rounds while this node was joining: it catches up and tries the next one
├── Leaving            this node was asked to leave and its time for that is over: its samples go back to the run
├── MalformedPayload   bytes that claim to be a node's update are none of this run: that update does not count
├── HandshakeFailed    the other end of a connection is no node of this run
│   └── PosesAsAnother   it is one, and not the member that it says it is
├── LearnsNothing      the gradients of this node are not finite, step after step: it ends, and exports nothing
├── RunOver            the run that this node wanted to join is complete
├── RecoveryFailed     no member could give this node a state that verifies
├── CheckpointFailed   a checkpoint could not be written: the one before stays, the run goes on
└── CheckpointDamaged  a file of a checkpoint is not what its manifest says: an older one is taken
"""

from __future__ import annotations


class ZerobandError(Exception):
    """Root of everything this package raises on purpose."""


class ConfigError(ZerobandError):
    """The user's input is wrong; the message names the value seen and what to do."""


class JoinRefused(ConfigError):
    """The run's record in the store differs from this node's; `key` names where."""

    def __init__(self, key: str, theirs: object, ours: object) -> None:
        super().__init__(
            f"refused at join: {key} is {theirs!r} in the running run and {ours!r} on this node; "
            f"make them equal, or start a new run with another run.id"
        )
        self.key = key
        self.theirs = theirs
        self.ours = ours


class LineEnds(ConfigError):
    """The run was founded twice, and this node is of the line that does not go on; its checkpoints stay."""


class MachineUnfit(ConfigError):
    """This machine cannot do what the configuration asks for; another machine could."""


class PeerLost(ZerobandError):
    """Other nodes were lost during a round; `member_ids` names them as far as they are known."""

    def __init__(self, message: str, member_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.member_ids = member_ids


class TransferStalled(PeerLost):
    """No byte moved between this node and `member_ids` for `since_s`; `at_byte` of `of_bytes` had come from them."""

    def __init__(self, message: str, member_ids: tuple[str, ...], since_s: float, at_byte: int, of_bytes: int) -> None:
        super().__init__(message, member_ids)
        self.since_s = since_s
        self.at_byte = at_byte
        self.of_bytes = of_bytes


class RoundFailed(ZerobandError):
    """A round was opened again and again to members that are all there; the message says how often."""


class StoreLost(ZerobandError):
    """Redis did not answer within its deadline."""


class StorageLost(ZerobandError):
    """Text or token ids cannot be read where they lie; `can_pass`: the storage was waited for, and may answer later."""

    def __init__(self, message: str, *, can_pass: bool = False) -> None:
        super().__init__(message)
        self.can_pass = can_pass


class Fenced(ZerobandError):
    """The run went on without this node; its votes no longer count."""


class RoundsMissed(ZerobandError):
    """The members committed all rounds up to `round` before this node, which joins, was in one."""

    def __init__(self, round: int) -> None:
        super().__init__(f"round {round} was committed without this node")
        self.round = round


class Leaving(ZerobandError):
    """This node was asked to leave, and the others did not come for what it learned in time."""


class LearnsNothing(ZerobandError):
    """This node's updates are not finite, step after step; the message says since when."""


class MalformedPayload(ZerobandError):
    """Bytes from another node are no update of this run; the message says what is wrong with them."""


class HandshakeFailed(ZerobandError):
    """The other end of a connection could not prove that it is a node of this run."""


class PosesAsAnother(HandshakeFailed):
    """The other end of a connection knows the token, and lacks the key of `member_id`, as which it speaks."""

    def __init__(self, member_id: str) -> None:
        super().__init__(f"it says that it is {member_id}, and does not have that member's key")
        self.member_id = member_id


class RunOver(ZerobandError):
    """The run that this node wanted to join is complete; there is nothing left to do."""


class RecoveryFailed(ZerobandError):
    """No member could give this node a state that verifies."""


class CheckpointFailed(ZerobandError):
    """A checkpoint could not be written: its folder is another run's, or the storage refused it for too long."""


class CheckpointDamaged(ZerobandError):
    """A checkpoint, or one file of it, is missing, cut off or changed; the message says which and why."""


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
