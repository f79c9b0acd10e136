"""What a node does that finds a run of which nobody holds a lease: how long it waits for the members, and what then.

Leases decide, by the store's clock. A member without one that still answers on its port is only cut off from the store,
so nobody begins without it. Local rank 0, one thread; knows no state.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

from zeroband.checkpoint.folder import read_owner
from zeroband.checkpoint.loading import steps_in_order
from zeroband.checkpoint.storage import open_storage, reason_of
from zeroband.config.schema import RunConfig
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import View
from zeroband.elastic.membership.resume_rules import is_abandoned, members_of, pending
from zeroband.elastic.transport.dial import Address, answers
from zeroband.errors import RecoveryFailed
from zeroband.observe.log import get_logger

_RESTART_S = 60.0
"""For launchers to notice a crash, to end the other ranks and to start the trainers again."""

_PROBES_AT_ONCE = 16

_log = get_logger(__name__)


class AbandonedRunWait:
    """The wait for members of a run that hold no lease.

    `is_restart`: this trainer was started in the place of one that crashed, so the others' may be, too, and they may
    hold a newer state than any checkpoint. `on_event`: told of events.
    """

    def __init__(
        self,
        config: RunConfig,
        node_id: str,
        *,
        is_restart: bool,
        on_event: Callable[..., object],
    ) -> None:
        self._config = config
        self._node_id = node_id
        self._is_restart = is_restart
        self._on_event = on_event
        self._since_s: float | None = None
        self._said = ""

    def is_over(self, view: View, own: str) -> bool:
        """Whether this node may begin the run again: its members stayed away, and there are checkpoints of it.

        `own`: this node's member id. Raises RecoveryFailed where they stayed away and there are none.
        """
        committed, agreed = view.committed, pending(view)
        if committed is None or Progress.of_verdict(committed).is_complete:
            return False
        if agreed is not None and agreed.member in view.alive:
            return self._obstacle(view) is None  # another node has waited for them
        if not is_abandoned(view):
            self._since_s = None
            return False
        obstacle = self._obstacle(view)
        wait_s = self._wait_s(is_hopeless=obstacle is not None, has_company=bool(view.alive - {own}))
        if self._since_s is None:
            self._since_s = time.monotonic()
            self._say_wait(view, wait_s, obstacle)
        if time.monotonic() - self._since_s < wait_s or self._is_cut_off(view):
            return False
        if obstacle is not None:
            raise RecoveryFailed(
                f"nobody of this run holds a lease since round {committed.round} "
                f"({', '.join(sorted(members_of(view)))}), and {obstacle}"
            )
        return True

    def _wait_s(self, *, is_hopeless: bool, has_company: bool) -> float:
        """For members that come back with their state; for other new nodes, which may have what this one lacks."""
        half_s = self._config.elastic.start_timeout_s / 2
        if self._is_restart or (is_hopeless and has_company):
            return min(_RESTART_S, half_s)
        return min(2 * self._config.fault.time_outs.lease_s, half_s)

    def _obstacle(self, view: View) -> str | None:
        """Why this node cannot begin the run again, and the way out; None: it can."""
        path, run_id = self._config.ckpt.path, self._config.run.id
        if path is None:
            return (
                "this node has no ckpt.path to go on from: give it the one with this run's checkpoints, or start anew "
                "with another --run.id"
            )
        assert view.committed is not None
        storage = open_storage(path, run_id, self._node_id)
        try:
            owner, steps = read_owner(storage), steps_in_order(storage)
        except OSError as error:
            return f"{storage.url} cannot be read: {reason_of(error)}"
        if not steps:
            return f"{storage.url} holds no checkpoint: start anew with another --run.id"
        if owner is None or owner.session != view.committed.session:
            return (
                f"the checkpoints in {storage.url} are another run's: go on from them with --resume, or start anew "
                "with another --run.id"
            )
        return None

    def _say_wait(self, view: View, wait_s: float, obstacle: str | None) -> None:
        assert view.committed is not None
        until = datetime.now(UTC) + timedelta(seconds=wait_s)
        path = f"{self._config.ckpt.path}/{self._config.run.id}"
        then = f"goes on from the newest checkpoint in {path}" if obstacle is None else f"ends, since {obstacle}"
        self._on_event(
            "run_abandoned",
            round=view.committed.round,
            members=sorted(members_of(view)),
            wait_s=wait_s,
            until=f"{until:%H:%M:%SZ}",
            then=then,
            type="--resume to go on from a checkpoint without this wait, another --run.id to start anew",
        )

    def _is_cut_off(self, view: View) -> bool:
        """Whether a member without a lease answers on its port, so that it lives and may have the newest state."""
        taken = {_address(view, member) for member in view.alive}
        asked: Mapping[str, Address] = {
            member: address
            for member in sorted(members_of(view) - view.alive)
            if (address := _address(view, member)) is not None and address not in taken
        }
        with ThreadPoolExecutor(_PROBES_AT_ONCE, thread_name_prefix="still-there") as pool:
            there = [m for m, is_there in zip(asked, pool.map(answers, asked.values()), strict=True) if is_there]
        said = ", ".join(f"{member} at {':'.join(map(str, asked[member]))}" for member in there)
        if said and said != self._said:
            why = "it is cut off from the store only, or another program has its port; --resume does not wait for it"
            _log.warning("a member without a lease answers", extra={"fields": {"members": said, "why": why}})
        self._said = said
        return bool(there)


def _address(view: View, member: str) -> Address | None:
    with contextlib.suppress(KeyError):
        return view.peers[member].host, view.peers[member].port
    return None
