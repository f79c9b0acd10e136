"""Duplicate node ids: if two living machines share a node.id, one is refused, as they would spoil each other's files.

The machine that is in the run stays; if neither is yet, the one whose member id sorts first. A lease may be left over
from a killed process of this node; if it is renewed, another machine has the name.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from zeroband.elastic.membership.records import BOOTSTRAP_ROUND, View
from zeroband.elastic.store.interface import Store
from zeroband.errors import ConfigError
from zeroband.observe.log import get_logger

_log = get_logger(__name__)


def outlast_duplicates(store: Store, member_id: str, node_id: str, *, look_s: float) -> None:
    """Wait until no other member of this node holds a lease: a lease from an earlier process is not renewed.

    Call it only while this member's own lease is renewed: the store's clock stands still if none is. `look_s`: polling
    interval, well below half a lease. Raises ConfigError if another machine has this name.
    """
    before_ms: Mapping[str, int] = {}
    while True:
        view, ends_ms = store.view(BOOTSTRAP_ROUND), store.lease_ends_ms()
        others = {m: p for m, p in view.peers.items() if m in view.alive and m != member_id and p.node_id == node_id}
        for other, peer in others.items():
            is_alive = store.is_renewed(before_ms.get(other, 0), ends_ms.get(other, 0))
            if is_alive and (other < member_id or _is_in_run(view, other)):
                raise ConfigError(
                    f"node.id={node_id!r} is in this run already, at {peer.host}:{peer.port}; give one of the two "
                    "machines another node.id, which is the host name where it is not set"
                )
        if not others:
            return
        if not before_ms:
            _log.info("waiting for this node's earlier lease to expire", extra={"fields": {"held_by": sorted(others)}})
        before_ms = ends_ms
        time.sleep(look_s)


def _is_in_run(view: View, member_id: str) -> bool:
    committed = None if view.committed is None else view.committed.plan
    return any(member_id in plan.members for plan in (view.plan, committed) if plan is not None)
