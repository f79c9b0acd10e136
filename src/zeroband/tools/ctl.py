"""`zeroband ctl pause | resume | drain NODE | ban NODE | unban NODE | rollback --step N | status | operator`.

Orders go through the run's store and take effect from the next round on, on all nodes at once; every node records them
in its events. The run is named by the variables that `zeroband store` prints, by --store, --run-id and --token-file, or
by a node's configuration (@file.toml --flags). A rollback also needs --ckpt.path. `operator` prints run.operator for
ZERO_BAND_RUN__OPERATOR_TOKEN: a run with an operator takes orders only from the holder of that token.
Exit codes: 0 done, 2 the order or the arguments are invalid, 1 the store is unreachable.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from zeroband.checkpoint.loading import open_checkpoint, steps_in_order
from zeroband.checkpoint.manifest import Trust
from zeroband.checkpoint.storage import open_storage, reason_of
from zeroband.config import RunConfig, load_config
from zeroband.config.schema import ResumeConfig
from zeroband.elastic.membership import orders
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.orders import OperatorKey
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND, View
from zeroband.elastic.store.interface import Store
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import CheckpointDamaged, ConfigError
from zeroband.observe.view import short_key
from zeroband.observe.words import aligned
from zeroband.tools.arguments import (
    ID_VARIABLE,
    STORE_VARIABLE,
    TOKEN_VARIABLE,
    add_access,
    bounded,
    parser_of,
    run_command,
)

_STORE_RETRY_S = 5.0

_NO_OPERATOR = "None"
"""Value in a run's record without an operator."""


def main(argv: Sequence[str]) -> int:
    """Give an order and print its effect. Returns the exit code."""
    options, rest = _parser().parse_known_args(argv)
    return run_command("ctl", lambda: _order(options, rest))


def _order(options: argparse.Namespace, rest: Sequence[str]) -> int:
    config = config_of_order(options, rest)
    order = Order(options.action, getattr(options, "node", ""), getattr(options, "step", 0))
    if order.action == "operator":
        print(_operator_key(config).public)
        return 0
    with closing(open_store(config)) as store:
        print(obey(order, config, store))
    return 0


def config_of_order(options: argparse.Namespace, settings: Sequence[str]) -> RunConfig:
    """Return a configuration with the run's store, id, token and checkpoints. Raises ConfigError.

    `settings`: optional settings of a node, as for `train`.
    """
    named = {"store.url": options.store, "run.id": options.run_id, "run.token-file": options.token_file}
    flags = [f"--{key}={value}" for key, value in named.items() if value]
    may_be_named = bool(settings or options.store or STORE_VARIABLE in os.environ)
    config = load_config([*settings, *flags], defaults=["--outer.type=ddp"]) if may_be_named else None
    if config is None or config.store.address is None:
        raise ConfigError(
            f"which run? Set {STORE_VARIABLE}, {ID_VARIABLE} and {TOKEN_VARIABLE} as `zeroband store` printed them, or "
            "give --store URL --run-id ID --token-file FILE"
        )
    return config


@dataclass(frozen=True)
class Order:
    """An operator's order to a run."""

    action: str
    """pause, resume, drain, ban, unban, rollback, status or operator."""
    node: str = ""
    """Node id; for bans also the short name of its key."""
    step: int = 0


def open_store(config: RunConfig) -> RedisStore:
    """Open the store of the run that a configuration names. Raises ConfigError, StoreLost."""
    assert config.store.address is not None, "checked by config_of_order and order_desk"
    token = config.run.token.get_secret_value() if config.run.token else None
    store = open_run(config.store.address, config.run.id, token, lease_s=config.fault.time_outs.lease_s)
    try:
        store.operator = _signer(config, (store.record() or {}).get("run.operator", _NO_OPERATOR))
    except BaseException:
        store.close()
        raise
    return store


def open_run(url: str, run_id: str, token: str | None, *, lease_s: float) -> RedisStore:
    """Open the store of an existing run and check the token. Raises ConfigError, StoreLost."""
    key = RunKey.of(token, run_id)
    store = RedisStore(url, run_id, key=key, lease_s=lease_s, retry_s=_STORE_RETRY_S)
    try:
        store.find_run()
        store.require_token()
    except BaseException:
        store.close()
        raise
    return store


def _signer(config: RunConfig, operator: str) -> OperatorKey | None:
    """Return the key that signs orders; None if the run has no operator or no token is set.

    Raises ConfigError if the token is another operator's.
    """
    if operator == _NO_OPERATOR or config.run.operator_token is None:
        return None
    key = _operator_key(config)
    if key.public != operator:
        raise ConfigError(f"run.operator_token is that of {key.public}; the run's operator is {operator}")
    return key


def _operator_key(config: RunConfig) -> OperatorKey:
    if config.run.operator_token is None:
        raise ConfigError("run.operator_token is not set; give it in ZERO_BAND_RUN__OPERATOR_TOKEN")
    return OperatorKey(config.run.operator_token.get_secret_value(), config.run.id)


def _require_operator(store: Store) -> None:
    """Raise ConfigError if the run has an operator and no operator token is set: members would ignore the order."""
    if isinstance(store, RedisStore) and store.operator is None:
        operator = (store.record() or {}).get("run.operator", _NO_OPERATOR)
        if operator != _NO_OPERATOR:
            raise ConfigError(
                f"the run takes orders signed by run.operator={operator} only; give its run.operator_token in "
                "ZERO_BAND_RUN__OPERATOR_TOKEN"
            )


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("ctl", __doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ORDER")
    access = argparse.ArgumentParser(add_help=False)
    add_access(access)

    def add(name: str, meaning: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=meaning, parents=[access], allow_abbrev=False)

    add("status", "show the run's state in its store")
    add("operator", "print the key of run.operator_token, for run.operator")
    add("pause", "make members wait at their next boundary")
    add("resume", "end a pause")
    add("drain", "make a node leave after its round").add_argument("node", metavar="NODE", help="its node.id")
    for name, meaning in (("ban", "exclude a node's key from the run"), ("unban", "end a ban")):
        add(name, meaning).add_argument("node", metavar="NODE", help="its node.id, or the 8 digits of its key")
    rollback = add("rollback", "roll all members back to a checkpoint")
    rollback.add_argument("--step", type=bounded(int, ge=0), required=True, help="inner step of the checkpoint")
    return parser


def obey(order: Order, config: RunConfig, store: Store) -> str:
    """Give an order to the run of this store. Returns a message for the user. Raises ConfigError, StoreLost."""
    view = store.view(BOOTSTRAP_ROUND)
    if not view.is_known:
        raise ConfigError(f"this store has no run.id={config.run.id!r}; name the run and the store of its nodes")
    if order.action != "status":
        _require_operator(store)
    match order.action:
        case "pause":
            store.give_orders(orders.pause)
            return f"{_boundary(view)}, all nodes wait there until `zeroband ctl resume`"
        case "resume":
            store.give_orders(orders.resume)
            return "the run continues"
        case "drain":
            node_id = order.node
            alive = {member: view.peers[member].node_id for member in view.alive if member in view.peers}
            store.give_orders(lambda given: orders.drain(given, node_id, alive))
            return f"{node_id} leaves after its round"
        case "ban":
            store.give_orders(lambda given: orders.ban(given, order.node, view.peers))
            return f"the run continues without {order.node}; its key is banned until `zeroband ctl unban {order.node}`"
        case "unban":
            store.give_orders(lambda given: orders.unban(given, order.node))
            return f"{order.node} may join again; restart it"
        case "rollback":
            step, steps = order.step, _good_steps(config, order.step)
            store.give_orders(lambda given: orders.roll_back(given, step, steps))
            return f"{_boundary(view)}, all nodes roll back to the checkpoint of step {step}"
        case _:
            return describe(config.run.id, store.view(next_round(view)))


def _good_steps(config: RunConfig, wanted: int) -> list[int]:
    """Return the steps of the run's checkpoints; check that the wanted one is complete. Raises ConfigError."""
    if config.ckpt.path is None:
        raise ConfigError("where are the checkpoints? Give --ckpt.path, the one of the run's nodes")
    storage = open_storage(config.ckpt.path, config.run.id)
    try:
        steps = steps_in_order(storage)
        if wanted in steps:
            token, resume = config.run.token, config.resume or ResumeConfig()
            trust = Trust(None if token is None else token.get_secret_value(), accepts_any=resume.trust)
            open_checkpoint(storage, wanted, trust=trust).require_sizes()
    except OSError as error:
        raise ConfigError(f"cannot read {storage.url}: {reason_of(error)}") from error
    except CheckpointDamaged as error:
        raise ConfigError(f"the checkpoint of step {wanted} cannot be used: {error}") from error
    return steps


def next_round(view: View) -> int:
    """Return the round that follows the newest committed one."""
    return BOOTSTRAP_ROUND if view.committed is None else view.committed.round + 1


def _boundary(view: View) -> str:
    begun = view.plan is not None and view.plan.round == next_round(view)
    return f"after round {next_round(view)}" if begun else f"before round {next_round(view)}"


def describe(run_id: str, view: View) -> str:
    """Describe the run by its store. `view`: of the next round."""
    lines = [f"run {run_id}: {_state(view)}"]
    if view.committed is not None:
        progress, plan = Progress.of_verdict(view.committed), view.committed.plan
        lines.append(f"round {plan.round}, epoch {plan.epoch}, inner step {progress.inner_step}")
    if view.orders.rollback is not None:
        lines.append(f"rolls back to the checkpoint of step {view.orders.rollback} at the next boundary")
    if view.orders.banned:
        lines.append(f"banned: {', '.join(map(orders.display_name, view.orders.banned))}")
    return "\n".join([*lines, *aligned([_row(member, view) for member in sorted(view.alive)])])


def _state(view: View) -> str:
    committed = view.committed
    if committed is None:
        return f"not founded yet, {len(view.alive)} nodes are waiting"
    if Progress.of_verdict(committed).is_complete:
        return "complete"
    if not view.alive:
        return "no node holds a lease"
    if view.orders.is_paused:
        waiting = sum(member in view.ready for member in committed.members)
        return f"paused, {waiting} of {len(committed.members)} members wait before round {committed.round + 1}"
    return f"{len(view.alive)} nodes"


def _row(member: str, view: View) -> tuple[str, ...]:
    """Return member, key, address and activity."""
    peer = view.peers.get(member)
    is_member = view.committed is not None and member in view.committed.members
    doing = "at the boundary" if member in view.ready else "in its round" if is_member else "joining"
    leaves = ", leaves after its round" if member in view.orders.leaving else ""
    key = short_key(member)
    shown = member if key is None else member.rpartition(".")[0]
    return shown, key or "-", "-" if peer is None else f"{peer.host}:{peer.port}", doing + leaves
