"""Automatic rollback: which checkpoint, and the order to all nodes.

The order travels like an operator's: one compare-and-set per round whose loss calls for it, in force from the next plan
on. A member that comes second finds the round answered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zeroband.checkpoint.restorer import Restorer
from zeroband.config.schema import RollbackConfig
from zeroband.elastic.membership.loss_record import LossRecord, reason_to_go_back
from zeroband.elastic.membership.orders import Orders, answer_loss
from zeroband.elastic.rounds.elastic_device_mesh import on_first_rank
from zeroband.elastic.store.interface import Store
from zeroband.errors import RecoveryFailed
from zeroband.node.mesh import LocalMesh
from zeroband.observe.log import get_logger

_log = get_logger(__name__)


@dataclass(frozen=True)
class AutoRollback:
    """Reacts to the loss of a round. Called by all local ranks, before they announce themselves for the next round."""

    config: RollbackConfig
    store: Store
    restorer: Restorer
    local: LocalMesh
    on_event: Callable[..., object]

    def is_due(self, record: LossRecord) -> bool:
        """Whether the loss of a round calls for a rollback."""
        return bool(reason_to_go_back(record, self.config))

    def answer(self, round: int, record: LossRecord) -> None:
        """Order the rollback that a round's loss calls for, unless another member has. Raises StoreLost."""
        reason = reason_to_go_back(record, self.config)
        if reason:
            on_first_rank(self.local, lambda: self._order(round, record.from_step, reason))

    def _order(self, round: int, before_step: int, reason: str) -> None:
        if self.store.view(round).orders.answered >= round:
            return
        step, seen = self._newest(before_step), list[Orders]()

        def change(orders: Orders) -> Orders:
            seen.append(orders)
            return answer_loss(orders, round, step, most=self.config.most, skips_data=self.config.skip_data)

        given = self.store.give_orders(change)
        if given.version == seen[-1].version:
            return
        if given.is_paused and not seen[-1].is_paused:
            self.on_event("rollback_given_up", round=round, step=step, reason=reason, most=self.config.most)
        elif given.rollback != seen[-1].rollback:
            self.on_event("rollback_ordered", round=round, step=step, reason=reason, times=given.returns)

    def _newest(self, before_step: int) -> int | None:
        """Return the newest complete checkpoint before the round."""
        try:
            older = (step for step in self.restorer.steps() if step <= before_step)
            return next((step for step in older if self.restorer.is_whole(step)), None)
        except RecoveryFailed as error:
            _log.warning("no checkpoint to roll back to", extra={"fields": {"why": str(error)}})
            return None
