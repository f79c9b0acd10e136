"""The tree of errors, and remedies that many messages share.

ZerobandError
├── ConfigError        invalid input: the message names the value and the remedy
│   ├── LineEnds       the run was founded twice, and this node's line ended
│   ├── JoinRefused    this node's configuration differs from the run's: names the key
│   └── MachineUnfit   this machine lacks what the configuration needs: one line per requirement
├── PeerLost           another node left, stopped or was cut off: the round is retried without it
│   └── TransferStalled  no byte moved for too long: the round is retried over new connections
├── RoundFailed        a round failed repeatedly without losing a member: the node ends
├── StoreLost          Redis did not answer within its deadline
├── StorageLost        text or token ids cannot be read: storage fails or refuses, or a file is missing or damaged
├── Fenced             the run continued without this node: it rejoins
├── RoundsMissed       members committed rounds while this node was joining: it catches up
├── Leaving            this node was asked to leave and its grace period ended: its samples return to the run
├── MalformedPayload   an update does not fit this run: it is dropped
├── HandshakeFailed    the other end of a connection is not a node of this run
│   └── PosesAsAnother   the other end is a node, but not the member that it claims to be
├── LearnsNothing      this node's gradients stayed non-finite: it ends and exports nothing
├── RunOver            the run is complete
├── RecoveryFailed     no member provided a state that verifies
├── CheckpointFailed   a checkpoint could not be written: the previous one stays, the run continues
└── CheckpointDamaged  a checkpoint file does not match its manifest: an older checkpoint is used
"""

from __future__ import annotations


class ZerobandError(Exception):
    """Base class of the package's errors."""


class ConfigError(ZerobandError):
    """Invalid input; the message names the value and the remedy."""


class JoinRefused(ConfigError):
    """The run's record in the store differs from this node's configuration in `key`."""

    def __init__(self, key: str, theirs: object, ours: object) -> None:
        super().__init__(
            f"refused at join: {key} is {theirs!r} in the running run and {ours!r} on this node; "
            f"make them equal, or start a new run with another run.id"
        )
        self.key = key
        self.theirs = theirs
        self.ours = ours


class LineEnds(ConfigError):
    """The run was founded twice, and this node's line ended; its checkpoints stay."""


class MachineUnfit(ConfigError):
    """This machine cannot run the configuration; another could."""


class PeerLost(ZerobandError):
    """Other nodes were lost during a round; `member_ids` lists those that are known."""

    def __init__(self, message: str, member_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.member_ids = member_ids


class TransferStalled(PeerLost):
    """No byte moved between this node and `member_ids` for `since_s`, after `at_byte` of `of_bytes` were received."""

    def __init__(self, message: str, member_ids: tuple[str, ...], since_s: float, at_byte: int, of_bytes: int) -> None:
        super().__init__(message, member_ids)
        self.since_s = since_s
        self.at_byte = at_byte
        self.of_bytes = of_bytes


class RoundFailed(ZerobandError):
    """A round failed repeatedly with all members present; the message says how often."""


class StoreLost(ZerobandError):
    """Redis did not answer within its deadline."""


class StorageLost(ZerobandError):
    """Text or token ids cannot be read; `is_transient`: retries ran out, and the storage may recover."""

    def __init__(self, message: str, *, is_transient: bool = False) -> None:
        super().__init__(message)
        self.is_transient = is_transient


class Fenced(ZerobandError):
    """The run continued without this node, whose votes no longer count."""


class RoundsMissed(ZerobandError):
    """Members committed rounds up to `round` before this joining node took part in one."""

    def __init__(self, round: int) -> None:
        super().__init__(f"round {round} was committed without this node")
        self.round = round


class Leaving(ZerobandError):
    """This node was asked to leave, and its contribution was not fetched in time."""


class LearnsNothing(ZerobandError):
    """This node's updates stayed non-finite; the message says since when."""


class MalformedPayload(ZerobandError):
    """An update from another node does not fit this run; the message says why."""


class HandshakeFailed(ZerobandError):
    """The other end of a connection did not prove that it belongs to this run."""


class PosesAsAnother(HandshakeFailed):
    """The other end of a connection has the token, but not the key of `member_id`, which it claims to be."""

    def __init__(self, member_id: str) -> None:
        super().__init__(f"it says that it is {member_id}, and does not have that member's key")
        self.member_id = member_id


class RunOver(ZerobandError):
    """The run is complete."""


class RecoveryFailed(ZerobandError):
    """No member provided a state that verifies."""


class CheckpointFailed(ZerobandError):
    """A checkpoint could not be written: its folder belongs to another run, or storage failed for too long."""


class CheckpointDamaged(ZerobandError):
    """A checkpoint or one of its files is missing, truncated or changed; the message says which and why."""


DISTRIBUTION = "zeroband-elastic"
"""Name of the distribution; `zeroband` on the package index is another library."""


def way_to_extra(extra: str) -> str:
    """Return the command that installs an optional extra."""
    return (
        f"install the extra `{extra}`: `pip install '{DISTRIBUTION}[{extra}]'`, or in a clone `uv sync --extra {extra}`"
    )


def way_to_native_library() -> str:
    """Return the command that builds the native library."""
    return (
        f"install a C++ compiler and build the package again: `pip install --force-reinstall --no-deps --no-binary "
        f"{DISTRIBUTION} {DISTRIBUTION}`, or in a clone `uv sync --reinstall-package {DISTRIBUTION}`"
    )
