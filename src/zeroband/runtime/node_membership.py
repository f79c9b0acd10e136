"""A node among the others of its run: store, port, data path, memory and lease. Knows no algorithm."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from zeroband.config.outer import CustomConfig, DilocoConfig, RoundsConfig
from zeroband.elastic.guardian.link_report import PARTNERS_FILE, NamesFile
from zeroband.elastic.membership.keys import NodeKey
from zeroband.elastic.membership.reach import DialRoutes, routes_to
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND, RoundPlan, View, view_to_record
from zeroband.elastic.rounds.elastic_device_mesh import ElasticDeviceMesh, on_each_machine, on_first_rank
from zeroband.elastic.rounds.member import Member, NodeIdentity, RunAccess
from zeroband.elastic.store.backup import LiveBackup
from zeroband.elastic.store.failover import StoreFailover
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.elastic.transport.base import DataPlane
from zeroband.elastic.transport.dial import Dialler
from zeroband.elastic.transport.engine import Engine
from zeroband.elastic.transport.gloo_plane import LaneGroups
from zeroband.elastic.transport.handover import POSES, HandedOver, Inbox
from zeroband.elastic.transport.handshake import Purpose, StreamKeys
from zeroband.elastic.transport.links import Links
from zeroband.elastic.transport.native_plane import NativePlane, PeerAccess
from zeroband.elastic.transport.stalls import TransferBounds
from zeroband.errors import JoinRefused, Leaving
from zeroband.node.mesh import gather_json
from zeroband.node.shared_flags import SharedFlags
from zeroband.node.shm import NodeFolder, is_restart, restarting_launcher
from zeroband.observe.log import get_logger
from zeroband.observe.stall import write_bundle
from zeroband.runtime.node_parts import NodeParts
from zeroband.runtime.run_folder import run_keys
from zeroband.runtime.run_rules import rules_of
from zeroband.runtime.transport_setup import (
    address_towards,
    codec_of,
    listen_address_of,
    require_descriptors,
    require_native,
    transfer_threads,
)
from zeroband.state.crash_memory import NodeMemory
from zeroband.state.flat import FlatLayout

_FIRST_CONTACT_S = 30.0
"""Wait for a first answer of Redis: after that, its address is most likely wrong."""

_log = get_logger(__name__)


class NodeMembership:
    """This node's membership, from its store connection to its mesh. Created by all local ranks together.

    `stack`: closes everything. `on_event`: called on local rank 0. Raises ConfigError, JoinRefused, StoreLost, Leaving.
    """

    def __init__(self, node: NodeParts, layout: FlatLayout, stack: ExitStack, on_event: Callable[..., object]) -> None:
        config, local = node.config, node.local
        assert config.store.address is not None and config.outer is not None
        self._node = node
        self._on_event = on_event
        self._store_url = config.store.address
        self._keys = run_keys(config, node.node_dir)
        self.is_left = False
        """Keep the memory when `stack` closes, for the trainer that the launcher starts next."""
        # `stack` closes in reverse order: lease and port first, then the folder that they map, then the store
        self.store = self._open_store(stack)
        self._shared: Mapping[str, str] = on_first_rank(local, self._match_run)
        self.folder = NodeFolder.path_of(config.node.shm_dir, config.run.id, node.node_id)
        """The node's folder in shared memory."""
        self.memory = NodeMemory(
            self.folder,
            launcher=restarting_launcher(os.environ),
            layout=layout.digest(),
            is_restart=is_restart(os.environ),
        )
        on_each_machine(local, lambda: self._claim_folder(stack))
        self.flags = SharedFlags(self.folder / "flags", create=False)
        stack.callback(self.flags.close)
        self._pids: tuple[int, ...] = tuple(gather_json(os.getpid(), local))[: local.ranks_here]
        """Process ids of the ranks on this machine; of the first machine on all ranks."""
        self._host = config.node.advertise_host or address_towards(self._store_url)
        self._links: Links | None = None
        self._inbox: Inbox | None = None
        """Receives other nodes' connections; on local rank 0 only."""
        self._open_port(stack)
        self.mesh = ElasticDeviceMesh(
            local.twin(),
            self._new_member(),
            self._open_data_plane(),
            self.flags,
            rules_of(config, self._transfer_bytes(layout), node.sample_tokens),
            start_timeout_s=config.elastic.start_timeout_s,
            trainer=local,
        )
        stack.callback(self.mesh.close)

    @property
    def own_key(self) -> NodeKey:
        """The key pair of this node."""
        assert self._keys.node is not None, "run_keys sets it"
        return self._keys.node

    # -- the store ----------------------------------------------------------------------------------------------

    def _open_store(self, stack: ExitStack) -> RedisStore:
        """Connect to the store, with a short wait: the address may be wrong."""
        config, departure = self._node.config, self._node.departure

        def before_retry() -> None:
            if departure.is_overdue(time.monotonic()):
                raise Leaving("asked to leave while Redis was out of reach")

        store = RedisStore(
            self._store_url,
            config.run.id,
            key=self._keys,
            lease_s=config.fault.time_outs.lease_s,
            retry_s=config.fault.time_outs.store_s,
            before_retry=before_retry,
        )
        store.verifier.on_forgery = lambda place, member: self._report_impostor(member, place)
        store.on_left_out = self._report_refused_plan
        if isinstance(config.outer, RoundsConfig):
            store.quorum = config.outer.quorum
        if config.run.operator is not None:
            store.take_orders_of(config.run.operator, config.run.id, config.rollback)
        stack.callback(store.close)
        if config.run.token is None and self._node.local.rank == 0:
            _log.warning(
                "no run.token: anyone who reaches the store or a node's port can join this run and fetch the model"
            )
        waits_s = config.elastic.start_timeout_s if config.store.are_of_nodes else _FIRST_CONTACT_S
        on_first_rank(self._node.local, lambda: store.reach(retry_s=waits_s, least_stores=config.least_stores))
        store.trust_address()
        return store

    def _match_run(self) -> dict[str, str]:
        try:
            return self.store.found_or_match(self._node.shared)
        except JoinRefused:
            if self._node.resumes and self._forget_dead_run():
                return self.store.found_or_match(self._node.shared)
            raise

    def _forget_dead_run(self) -> bool:
        """Wait until the store's run is known to be alive or dead: nodes that resume a dead one may differ from it."""
        time_outs = self._node.config.fault.time_outs
        deadline_s = time.monotonic() + 2 * time_outs.lease_s
        while not (is_dead := self.store.forget_dead_run()) and time.monotonic() < deadline_s:
            time.sleep(time_outs.renew_s)
        return is_dead

    def _report_impostor(self, member_id: str, where: str) -> None:
        self._on_event("impostor", member_id=member_id, where=where)

    def _report_refused_plan(self, plan: RoundPlan) -> None:
        reason = f"{plan.proposer} opened it without most members, which are alive and reach one another"
        self._on_event("plan_refused", round=plan.round, reason=reason)

    # -- memory, port and data path -----------------------------------------------------------------------------

    def _claim_folder(self, stack: ExitStack) -> None:
        config = self._node.config
        launcher = restarting_launcher(os.environ, left=True)
        folder = NodeFolder(
            config.node.shm_dir, config.run.id, self._node.node_id, self.memory.set_aside, launcher=launcher
        )
        stack.callback(lambda: folder.close(is_left=self.is_left))
        SharedFlags(folder.path / "flags", create=True).close()

    def _open_port(self, stack: ExitStack) -> None:
        """Start receiving other nodes' connections. On local rank 0."""
        config = self._node.config
        if config.comm.backend == "native":
            require_native(is_sealed=config.comm.encryption)
        if self._node.local.rank != 0:
            return
        require_descriptors(config)

        def refuse_impostor(connection: socket.socket, what: HandedOver) -> None:
            connection.close()
            self._report_impostor(what.caller, what.session)

        takers: dict[str, Callable[[socket.socket, HandedOver], object]] = {POSES: refuse_impostor}
        if config.comm.backend == "native":
            engine = Engine(transfer_threads(config), beat_s=TransferBounds.of(config.fault.time_outs).beat_s)
            self._links = Links(engine, self._keys, config.comm.encryption)
            takers[Purpose.DATA] = self._links.accept
        self._inbox = Inbox(takers)
        stack.callback(self._inbox.close)

    def serve_state(self, take: Callable[[socket.socket, StreamKeys], object]) -> None:
        """Start answering nodes that ask for this one's state. On local rank 0."""
        assert self._inbox is not None, "only local rank 0 serves"
        self._inbox.route(Purpose.STATE, lambda connection, what: take(connection, what.keys))
        self.flags.set_serves_state(True)

    def dialler(self) -> Dialler:
        """Return a dialler that asks other nodes for their state under this node's identity."""
        return Dialler(self._keys, self.own_key.name(self._node.node_id), self._node.config.comm.encryption)

    def _open_data_plane(self) -> DataPlane:
        """Open the data path of comm.backend."""
        config, faults = self._node.config, self._node.faults
        comm, bounds = config.comm, TransferBounds.of(config.fault.time_outs)
        if comm.backend == "native":
            on_partners = NamesFile(self.folder, PARTNERS_FILE).write
            reach = None if self._links is None else PeerAccess(self._links, self._routes, on_partners)
            return NativePlane(
                config.run.id,
                self.flags,
                codec_of(config),
                reach,
                faults,
                streams=comm.streams,
                paced=comm.rate_control,
                bounds=bounds,
            )
        return LaneGroups(
            self.store,
            self.flags,
            faults,
            lanes=comm.lanes,
            owned=range(self._node.local.rank, comm.lanes, self._node.local.world_size),
            host=self._host,
            chunk_bytes=int(comm.chunk_mb * 1e6),
            gloo_timeout_s=config.fault.time_outs.gloo_timeout_s,
            bounds=bounds,
        )

    def _routes(self, own: str, members: Sequence[str]) -> Mapping[str, DialRoutes]:
        peers = self.store.view(BOOTSTRAP_ROUND).peers
        return {member: routes_to(own, member, peers) for member in members if member in peers}

    def _transfer_bytes(self, layout: FlatLayout) -> int:
        """Return the size of an encoded contribution; 0 for payloads, which are too small for links to matter."""
        outer = self._node.config.outer
        if not isinstance(outer, DilocoConfig | CustomConfig):
            return 0
        return codec_of(self._node.config).encoded_size(layout.numel // outer.fragments)

    # -- the lease ----------------------------------------------------------------------------------------------

    def replace_member(self) -> None:
        """Become a new member after a fence. Called by all local ranks."""
        if self._node.local.rank == 0:
            self.mesh.member.close()
        self.mesh.replace_member(self._new_member())

    def _new_member(self) -> Member | None:
        """Create a new membership; None on ranks other than 0."""
        if self._node.local.rank != 0:
            return None
        node, config = self._node, self._node.config
        identity = NodeIdentity(
            node_id=node.node_id,
            listen=listen_address_of(config, self._host, self._keys, node.port),
            rank_pids=self._pids,
            launcher_pid=os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid(),
            shm_dir=self.folder,
            site=config.node.site,
            store_port=0 if node.port is None else node.port.number,
            corpus=node.corpus,
        )
        run = RunAccess(
            store=self.store,
            store_url=self._store_url,
            run_id=config.run.id,
            shared=self._shared,
            on_stall=self._record_stall,
            inbox=self._inbox,
            on_event=self._on_event,
            start_mover=self._start_failover,
            name_member=self.own_key.new_member_id,
        )
        return Member(run, identity, self.flags, config.fault.time_outs, node.departure)

    def _start_failover(self, member_id: str, memory: LiveBackup) -> StoreFailover | None:
        if not self.store.has_several:
            return None
        survey_s = self._node.config.fault.time_outs.lease_s / 2
        return StoreFailover(self.store, member_id, memory, self.flags, self._on_event, survey_s=survey_s)

    def _record_stall(self, reason: str, view: View) -> None:
        write_bundle(self._node.node_dir, reason=reason, view=view_to_record(view), rank_pids=self._pids)
