"""Checks of the store, this node's address, the other nodes, and whether ckpt.path is shared with them."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from zeroband.checkpoint.layout import MARKS
from zeroband.checkpoint.storage import LocalStorage, open_storage
from zeroband.checks.finding import Finding
from zeroband.checks.machine import look_at_address
from zeroband.config import RunConfig
from zeroband.config.schema import CkptConfig
from zeroband.config.store_url import parse_store_url
from zeroband.elastic.guardian.process import ListenAddress
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND, Peer
from zeroband.elastic.membership.resume_rules import Holding
from zeroband.elastic.store.keys import rehearsal_of
from zeroband.elastic.store.local_server import find_redis_server, outdated
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import ConfigError, StoreLost
from zeroband.kernels import native
from zeroband.node.names import node_id_of
from zeroband.observe.view import node_id_of_member
from zeroband.runtime.checkpoint_reports import CheckpointReports
from zeroband.runtime.own_store import OwnStore
from zeroband.runtime.transport_setup import address_towards, listen_address_of
from zeroband.tools.doctor.pairs import LEASE_S, PairExamination, PairFinding

_STORE_RETRY_S = 5.0


def look_outside(config: RunConfig, nodes: int, wait_s: float) -> list[Finding]:
    """Check the store, this node's address and the other nodes."""
    url = config.store.address
    assert url is not None
    key = RunKey.of(config.run.token.get_secret_value() if config.run.token else None, config.run.id)
    with ExitStack() as stack:
        try:
            host = config.node.advertise_host or address_towards(url)
            findings = [look_at_address(host, config)]
            run_id, waits_s, port = rehearsal_of(config.run.id), _STORE_RETRY_S, None
            if config.store.are_of_nodes:
                waits_s = wait_s
                if not config.node.dial_out_only:
                    findings += look_at_server()
                    own = OwnStore(config, host, Departure(0.0))
                    port = own.port
                    stack.push(own.close)
                    stack.callback(own.serve_until_unused, run_id, lambda view: True)
            if config.store.are_several:
                findings.insert(0, _look_at_stores(config, url, key))
            if nodes == 1 and config.store.are_of_nodes:  # the others may be absent
                return findings
            # without the token if possible, to also find nodes with a different one
            seal = key if config.store.are_of_nodes else None
            store = RedisStore(url, run_id, key=seal, lease_s=LEASE_S, retry_s=_STORE_RETRY_S)
            stack.callback(store.close)
            findings.insert(0, _time_store(store, waits_s))
            if nodes > 1 and native.problem() is None:
                findings += _look_at_pairs(config, store, listen_address_of(config, host, key, port), nodes, wait_s)
            elif nodes > 1:
                seen = "measuring links needs the native library, which is missing"
                findings.append(Finding("nodes", "not met", seen))
            return findings
        except (StoreLost, ConfigError, OSError) as error:
            return [Finding("store and network", "failed", str(error), stops="start")]


def look_at_server() -> Iterator[Finding]:
    """Check the node's Redis server for known vulnerabilities. Raises ConfigError if there is no server."""
    if old := outdated(find_redis_server()):
        what, _, advice = old.partition("; ")
        yield Finding("this node's store", what, advice)


def _look_at_stores(config: RunConfig, url: str, key: RunKey) -> Finding:
    """Report how many of several stores answer, and which one the run uses."""
    with closing(RedisStore(url, config.run.id, key=key, lease_s=LEASE_S, retry_s=_STORE_RETRY_S)) as store:
        store.follow()
        answering, asked, generation = len(store.survey()), len(store.candidates), store.generation
    used = "no run yet"
    if generation is not None:
        used = f"the run uses {parse_store_url(store.address).shown}, generation {generation.number}"
    return Finding("stores", f"{answering} of {asked} answer; {used}")


def _time_store(store: RedisStore, waits_s: float) -> Finding:
    store.reach(retry_s=waits_s)
    times: list[float] = []
    for _ in range(10):
        began_at_s = time.perf_counter()
        store.view(BOOTSTRAP_ROUND)
        times.append(time.perf_counter() - began_at_s)
    return Finding("store", f"answers within {1e3 * statistics.median(times):.1f} ms")


def _look_at_pairs(
    config: RunConfig, store: RedisStore, listen: ListenAddress, nodes: int, wait_s: float
) -> Iterable[Finding]:
    key = RunKey(bytes.fromhex(listen.run_key))
    with (
        PairExamination(store, node_id_of(config), listen, key, is_sealed=config.comm.encryption) as meeting,
        folder_check(config, store, meeting.member_id) as look_at_folder,
    ):
        print(f"listening on port {meeting.port}; waiting for {nodes} nodes ...", flush=True)
        look_at_folder(meeting.gather(nodes, wait_s))
        peers = meeting.probe()
        yield from _who_came(meeting, peers, nodes)
        if (found := look_at_folder(peers)) is not None:
            yield found
        yield from (_pair(pair) for pair in meeting.measure(peers))


def _who_came(meeting: PairExamination, peers: Mapping[str, Peer], nodes: int) -> Iterator[Finding]:
    """Report missing nodes and machines with the same name."""
    namesakes = meeting.namesakes(peers)
    came = ", ".join(sorted(f"{peer.node_id} at {peer.host}" for peer in peers.values()))
    if len(namesakes) > 1:
        name = peers[meeting.member_id].node_id
        another = f"{name}-{1 + namesakes.index(meeting.member_id)}"
        advice = f"each machine of a run needs its own name; here: export ZERO_BAND_NODE__ID={another}"
        yield Finding("node.id", f"{len(namesakes)} machines are called {name} ({came})", advice, stops="start")
    if len(peers) < nodes:
        advice = "run it on all of them at the same time"
        yield Finding("nodes", f"{len(peers)} of {nodes} came ({came})", advice, stops="start")


def _pair(pair: PairFinding) -> Finding:
    ways = {"there": pair.we_reach_it, "back": pair.it_reaches_us}
    reach = ", ".join(f"{way} {'yes' if works else 'no'}" for way, works in ways.items())
    rate = "" if pair.mbit is None or pair.rtt_ms is None else f", {pair.mbit:.0f} Mbit/s, RTT {pair.rtt_ms:.1f} ms"
    stops = "start" if pair.advice else None
    return Finding(f"node {pair.other}", f"{pair.address} {pair.way_taken}, {reach}{rate}", pair.advice, stops=stops)


# -- whether ckpt.path is one folder ----------------------------------------------------------------------------------


@contextlib.contextmanager
def folder_check(
    config: RunConfig, store: RedisStore, member_id: str
) -> Generator[Callable[[Collection[str]], Finding | None]]:
    """Give a function that checks whether members share ckpt.path. `store`: of the examination.

    Uses checkpoint marks under another run's name, removed at the end: the first call creates this node's mark, the
    next one sees the others'.
    """
    run = config.run.model_copy(update={"id": f"{config.run.id}.doctor"})
    reports = CheckpointReports(store, config.model_copy(update={"run": run}), member_id)
    try:
        yield partial(_look_at_folder, config.ckpt, reports, member_id)
    finally:
        reports.close()
        if config.ckpt.path is not None:
            storage = open_storage(config.ckpt.path, run.id)
            for folder in (f"{storage.url}/{MARKS}", storage.url) if isinstance(storage, LocalStorage) else ():
                with contextlib.suppress(OSError):  # others may still have marks there
                    Path(folder).rmdir()


def _look_at_folder(
    ckpt: CkptConfig, reports: CheckpointReports, member_id: str, members: Collection[str]
) -> Finding | None:
    if ckpt.path is None or ckpt.shared is False:
        return None
    try:
        known = reports.exchange(member_id, members, Holding())
    except ConfigError as error:
        return Finding("ckpt.path", "not one folder", str(error), stops="start")
    here, elsewhere = reports.folder_peers(member_id, sorted(known))
    if elsewhere:
        seen = f"{ckpt.path} is another folder on {_names(elsewhere)}: each keeps whole checkpoints"
        return Finding("ckpt.path", seen, "mount one folder on all nodes if they shall share the work")
    return Finding("ckpt.path", f"{ckpt.path} is one folder on {_names(here)}") if len(here) > 1 else None


def _names(members: Collection[str]) -> str:
    return ", ".join(sorted(map(node_id_of_member, members)))
