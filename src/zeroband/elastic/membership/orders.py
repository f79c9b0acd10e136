"""Orders to the whole run: their record in the store, the commands that change it, and their authentication. Pure.

Orders come from an operator, or from the members themselves if a round's loss requires a rollback. They apply from the
next plan on: a plan names the version of the orders, and the store refuses a plan with another version. So all nodes
begin a round under the same orders.

Without `run.operator` everyone with the token is an operator. With it, orders contain the operator's last signed
orders, and members accept only what follows from these.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from zeroband.config.ranges import Count, EachMember, Id, Number, Text
from zeroband.elastic.membership.keys import SECRET_BYTES, NodeKey, is_of_key, is_signed, node_name
from zeroband.errors import ConfigError
from zeroband.observe.view import node_id_of_member, short_key


@dataclass(frozen=True)
class Orders:
    """The current orders of a run."""

    version: Count = 0
    """Incremented by every change."""
    is_paused: bool = False
    """Members wait at their boundary and keep their leases."""
    rollback: Count | None = None
    """Inner step of the checkpoint to roll back to; cleared by the round that did it."""
    leaving: EachMember[Id] = ()
    """Members that leave after their current round."""
    skips_data: bool = False
    """With `rollback`: skip the samples trained on since the checkpoint."""
    answered: Number = -1
    """Newest round whose loss was answered by a rollback order."""
    returned_to: Number = -1
    """Checkpoint step of that order, and `returns`: the number of consecutive orders with this step."""
    returns: Count = 0
    banned: EachMember[Id] = ()
    """Names of nodes with banned keys: members do not admit them and ignore their records."""
    said: Text = ""
    """The operator's last orders, as the signed JSON text; empty: none."""
    signature: Id = ""
    """The operator's, in base64, over `said`."""

    def bans(self, name: str) -> bool:
        """Whether a member's or a node's key is banned."""
        return any(is_of_key(name, banned) for banned in self.banned)


def pause(orders: Orders) -> Orders:
    """Pause all members at their next boundary."""
    return _changed(orders, is_paused=True)


def resume(orders: Orders) -> Orders:
    """End a pause and reset the count of repeated rollbacks."""
    return _changed(orders, is_paused=False, returns=0)


def drain(orders: Orders, node_id: str, alive: Mapping[str, str]) -> Orders:
    """Make a node leave after its round. `alive`: node id of each living member. Raises ConfigError."""
    members = sorted(member for member, node in alive.items() if node == node_id)
    if not members:
        here = ", ".join(sorted(set(alive.values()))) or "none"
        raise ConfigError(f"no living member of this run is on node {node_id!r}; there are {here}")
    leaving = [member for member in orders.leaving if member in alive]
    return _changed(orders, leaving=tuple(dict.fromkeys([*leaving, *members])))


def ban(orders: Orders, who: str, members: Collection[str]) -> Orders:
    """Ban a node's key from the run. `members`: those known to the store. Raises ConfigError.

    `who`: a node id, or the key's short name if several nodes had that id.
    """
    named = {node_name(member) for member in members}
    found = sorted(name for name in named if who in (node_id_of_member(name), short_key(name)))
    if not found:
        known = ", ".join(map(display_name, sorted(named))) or "none"
        raise ConfigError(f"no member of this run is node {who!r}; there are {known}")
    if len(found) > 1:
        keys = ", ".join(str(short_key(name)) for name in found)
        raise ConfigError(f"node {who!r} has had several keys in this run: {keys}; ban one of them")
    return orders if orders.bans(found[0]) else _changed(orders, banned=(*orders.banned, *found))


def unban(orders: Orders, who: str) -> Orders:
    """Lift the ban on a node's key; `who` as for `ban`. Raises ConfigError."""
    kept = tuple(name for name in orders.banned if who not in (node_id_of_member(name), short_key(name)))
    if kept == orders.banned:
        raise ConfigError(f"node {who!r} is not banned; these are: {', '.join(map(display_name, kept)) or 'none'}")
    return _changed(orders, banned=kept)


def require_admitted(orders: Orders, member_id: str) -> None:
    """Raise ConfigError if this node's key is banned."""
    if orders.bans(member_id):
        raise ConfigError(
            f"an operator banned this node (key {short_key(member_id)}) from the run; `zeroband ctl unban "
            f"{node_id_of_member(member_id)}` lets it in again when it is started anew"
        )


def display_name(name: str) -> str:
    """Format a node's name for people."""
    key = short_key(name)
    return node_id_of_member(name) if key is None else f"{node_id_of_member(name)} (key {key})"


def roll_back(orders: Orders, step: int, steps: Collection[int]) -> Orders:
    """Roll the run back to the checkpoint of an inner step. `steps`: available ones. Raises ConfigError."""
    if step not in steps:
        there_are = ", ".join(map(str, sorted(steps))) or "none"
        raise ConfigError(f"there is no good checkpoint of step {step}; there are {there_are}")
    return _changed(orders, rollback=step, skips_data=False)


def answer_loss(orders: Orders, round: int, step: int | None, *, most: int, skips_data: bool) -> Orders:
    """Order a rollback because of a round's loss; only the first order per round takes effect.

    `step`: of the newest checkpoint before that round. Without one, or after `most` consecutive rollbacks to it, the
    run is paused instead. An operator's pending rollback stays.
    """
    if round <= orders.answered:
        return orders
    if orders.rollback is not None:
        return _changed(orders, answered=round)
    returns = orders.returns + 1 if step == orders.returned_to else 1
    if step is None or returns > most:
        return _changed(orders, answered=round, is_paused=True)
    return _changed(orders, answered=round, rollback=step, skips_data=skips_data, returned_to=step, returns=returns)


def give_up_rollback(orders: Orders, step: int) -> Orders:
    """Cancel a rollback to a checkpoint that cannot be loaded, unless another was ordered meanwhile."""
    return _changed(orders, rollback=None) if orders.rollback == step else orders


def _changed(orders: Orders, **fields: object) -> Orders:
    """Return the orders with these fields and the next version; unchanged orders keep theirs."""
    changed = replace(orders, **fields)
    return orders if changed == orders else replace(changed, version=orders.version + 1)


# -- an operator's own key --------------------------------------------------------------------------------------------

_MEMBER_FIELDS = ("version", "answered", "returned_to", "returns", "said", "signature")
"""Fields that members maintain."""
_MEMBER_DECIDED = ("rollback", "skips_data", "is_paused")
"""Fields that members may clear, or set because of a loss."""


class OperatorKey:
    """The operator's key, derived from a token that the nodes do not have."""

    def __init__(self, token: str, run_id: str) -> None:
        salt = f"zeroband operator {run_id}".encode()
        self._key = NodeKey(Scrypt(salt=salt, length=SECRET_BYTES, n=2**14, r=8, p=1).derive(token.encode()))
        self._run_id = run_id

    @property
    def public(self) -> str:
        """Public key: the value of `run.operator`."""
        return self._key.public

    def changed(self, orders: Orders, change: Callable[[Orders], Orders]) -> Orders:
        """Apply a change and sign the result.

        The signed text starts from the operator's own last orders, so nothing unsigned in the store gets signed, except
        for two fields that members maintain: the pause, and the completion of a rollback.
        """
        signed = _operator_orders(orders, self.public, self._run_id) or Orders()
        ours = replace(
            signed,
            **{name: getattr(orders, name) for name in (*_MEMBER_FIELDS, "is_paused")},
            rollback=signed.rollback if signed.rollback == orders.rollback else None,
        )
        after = change(ours)
        if after == ours:
            if ours == orders and orders.is_paused == signed.is_paused:
                return orders
            after = replace(ours, version=orders.version + 1)  # set by a member before: sign it
        kept = {name: value for name, value in asdict(after).items() if name not in ("said", "signature")}
        text = json.dumps(kept, sort_keys=True)
        signature = self._key.sign(_signed_bytes(self._run_id, text))
        return replace(after, said=text, signature=base64.b64encode(signature).decode())


def is_legitimate(
    orders: Orders, before: Orders, operator: str, run_id: str, calls_for_return: Callable[[int], bool]
) -> bool:
    """Whether orders follow from those signed by the operator with this public key.

    Members may change them only to complete a rollback and to answer a round's loss. `before`: the last accepted
    orders. `calls_for_return`: whether this round's loss requires a rollback.
    """
    if orders == before:
        return True
    signed, last = _operator_orders(orders, operator, run_id), _operator_orders(before, operator, run_id) or Orders()
    if signed is None or signed.version < last.version or orders.version < signed.version:
        return False
    answers = orders.answered > before.answered and calls_for_return(orders.answered)
    stood = before if orders.said == before.said else signed
    if not answers and (orders.rollback not in (None, stood.rollback) or orders.is_paused != stood.is_paused):
        return False
    if not answers and orders.rollback is not None and orders.skips_data != stood.skips_data:
        return False
    ours, theirs = (asdict(each) for each in (orders, signed))
    return all(ours[name] == theirs[name] for name in ours if name not in (*_MEMBER_FIELDS, *_MEMBER_DECIDED))


def _operator_orders(orders: Orders, operator: str, run_id: str) -> Orders | None:
    """Return the operator's last orders; defaults if there are none, None if the signature is invalid."""
    if not orders.said:
        return Orders()
    try:
        signature = base64.b64decode(orders.signature, validate=True)
        values: dict[str, Any] = json.loads(orders.said)
        lists: dict[str, Any] = {name: tuple(values[name]) for name in ("leaving", "banned")}
        signed = Orders(**{**values, **lists})
    except (ValueError, TypeError, KeyError):
        return None
    return signed if is_signed(f"#{operator}", _signed_bytes(run_id, orders.said), signature) else None


def _signed_bytes(run_id: str, signed: str) -> bytes:
    return f"zeroband orders 1\0{run_id}\0{signed}".encode()
