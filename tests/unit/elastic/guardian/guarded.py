"""A guardian in a thread of a test, which has the trainer's ends of its pipes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeroband.elastic.guardian.process import GuardianOrder, ListenAddress, run_guardian
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.records import Peer
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.elastic.transport.handover import channel
from zeroband.node.shared_flags import SharedFlags
from zeroband.observe.events import noop

MEMBER = "a#1"


def an_order(folder: Path, url: str, **changes: Any) -> GuardianOrder:
    """The order of a trainer and a launcher that are this process."""
    usual: dict[str, Any] = {
        "listen": ListenAddress("127.0.0.1"),
        "rank_pids": (os.getpid(),),
        "launcher_pid": os.getpid(),
        "lease_s": 1000.0,
        "renew_s": 1.0,
        "hung_s": 1000.0,
        "is_first": True,
    }
    shared = (str(folder / "flags"), str(folder / "shm"))
    return GuardianOrder(url, "run", MEMBER, "a", flags=shared[0], shm_dir=shared[1], **{**usual, **changes})


class Guarded:
    """The guardian, once it holds its lease. `on_wait`: called each time that it reports that it still waits."""

    def __init__(self, order: GuardianOrder, on_wait: Callable[[], object] = noop) -> None:
        self.order = order
        key = RunKey(bytes.fromhex(order.listen.run_key)) if order.listen.run_key else None
        self.store = RedisStore(order.store_url, order.run_id, key=key, retry_s=5.0)
        self.flags = SharedFlags(Path(order.flags), create=True)
        (trainer_read, self._trainer), (output, say) = os.pipe(), os.pipe()
        calls, self.inbox = channel()
        """`inbox`: the connections that the trainer answers."""

        def run() -> None:
            with os.fdopen(trainer_read, "rb", buffering=0) as trainer_end, os.fdopen(say, "wb") as say_end:
                run_guardian(order, trainer_end, say_end, calls)
            calls.close()

        self._thread = threading.Thread(target=run)
        self._thread.start()
        self._output = os.fdopen(output, "rb", buffering=0)
        while (said := self._output.readline()) == b"waiting\n":
            on_wait()
        assert said == b"holding\n"

    def leave(self, *, cleanly: bool) -> None:
        if cleanly:
            os.write(self._trainer, b"leave\n")
        os.close(self._trainer)
        self._trainer = -1
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()

    def is_alive(self) -> bool:
        return self.order.member_id in self.store.view(0).alive

    def said(self) -> Peer:
        """The record of the guardian's last renewal."""
        return self.store.view(0).peers[self.order.member_id]

    def close(self) -> None:
        if self._trainer >= 0:
            self.leave(cleanly=True)
        self._output.close()
        self.inbox.close()
        self.flags.close()
        self.store.close()
