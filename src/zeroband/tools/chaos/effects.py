"""Injects planned faults into the processes, network and store of a LocalCluster. One thread, the cluster's owner."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

from zeroband.elastic.store.local_server import RedisServer
from zeroband.node.processes import pids_with, signal_all
from zeroband.node.shm import NodeFolder
from zeroband.observe.process_stat import number_of
from zeroband.tools.chaos.plan import (
    OF_ENVIRONMENT,
    OF_NETWORK,
    OF_PROCESSES,
    OF_RANKS,
    OF_STORE,
    Kind,
    PlannedFault,
)
from zeroband.tools.chaos.stores import StoreOfNode, Stores, StoresOfNodes
from zeroband.tools.cluster.local import LocalCluster
from zeroband.tools.cluster.network import Network
from zeroband.tools.cluster.node_process import NodeProcess

CLOCK_AHEAD_S = 7 * 3600
_FOLDER = "ZEROBAND_CHAOS_FLAGS"
_FLAGS = {Kind.DESCRIPTORS_GONE: "descriptors", Kind.CLOCK_JUMPS: "clock"}
_SITECUSTOMIZE = """
import os, resource, threading, time

where = os.path.join(os.environ["ZEROBAND_CHAOS_FLAGS"], os.environ.get("ZERO_BAND_NODE__ID", "none"))
seconds, nanoseconds, ahead_s = time.time, time.time_ns, [0]
time.time = lambda: seconds() + ahead_s[0]
time.time_ns = lambda: nanoseconds() + ahead_s[0] * 10**9

def is_set(flag):
    return os.path.exists(os.path.join(where, flag))  # needs no descriptor

def look():
    held = []
    while True:
        is_on = is_set("descriptors")
        try:
            while is_on:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        while held and not is_on:
            os.close(held.pop())
        if not is_on:
            ahead_s[0] = AHEAD_S if is_set("clock") else 0
        time.sleep(0.005 if is_on else 0.1)

resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))
threading.Thread(target=look, daemon=True).start()
""".replace("AHEAD_S", str(CLOCK_AHEAD_S), 1)

_TICKS_PER_S = 100.0
_BACKGROUND_PRIORITY = 10
_STOPS_STORE = (Kind.STORE_PAUSED, Kind.STORE_STOPPED)


class EnvironmentFaults:
    """Injects faults from inside a node's processes: descriptor exhaustion and clock jumps.

    A `sitecustomize` module in each Python process polls flag files of its node in `folder`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "begins").mkdir()
        (folder / "begins" / "sitecustomize.py").write_text(_SITECUSTOMIZE)

    def environment(self) -> Mapping[str, str]:
        """Return the environment variables for all nodes."""
        paths = [str(self._folder / "begins"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(paths), _FOLDER: str(self._folder)}

    def set(self, node: str, kind: Kind, *, is_on: bool) -> None:
        """Start or end a fault in all processes of a node."""
        flag = self._folder / node / _FLAGS[kind]
        flag.parent.mkdir(exist_ok=True)
        flag.touch() if is_on else flag.unlink(missing_ok=True)


class FaultInjector:
    """Injects and undoes faults; one fault of a store at a time."""

    def __init__(self, cluster: LocalCluster, stores: Stores | StoresOfNodes, env_faults: EnvironmentFaults) -> None:
        self._cluster, self._stores, self._env_faults = cluster, stores, env_faults
        self._store: RedisServer | StoreOfNode | None = None
        """The faulty store."""
        self._stopped: dict[int, tuple[int, ...]] = {}
        """Stopped processes by the fault's number."""

    @property
    def _network(self) -> Network:
        assert self._cluster.network is not None, "the cluster was given a network"
        return self._cluster.network

    def can_inject(self, fault: PlannedFault) -> bool:
        """Return whether the nodes run, with ranks if the fault needs them."""
        nodes = [self._cluster.nodes[node] for node in fault.nodes]
        return all(node.is_running and (fault.kind not in OF_RANKS or bool(node.rank_pids)) for node in nodes)

    def inject(self, fault: PlannedFault, *, store: str) -> None:
        """Inject a fault. `store`: address of the store in use."""
        if fault.kind in OF_NETWORK:
            self._break_network(fault)
        elif fault.kind in OF_STORE:
            self._store = self._stores.at(store)
            self._store.pause() if fault.kind in _STOPS_STORE else self._store.stop()
        elif fault.kind in OF_ENVIRONMENT:
            self._env_faults.set(fault.nodes[0], fault.kind, is_on=True)
        elif fault.kind is not Kind.ENDED:
            self._inject_into_processes(fault, self._cluster.nodes[fault.nodes[0]])

    def _inject_into_processes(self, fault: PlannedFault, node: NodeProcess) -> None:
        match fault.kind:
            case Kind.MACHINE_KILLED | Kind.RELAY_KILLED | Kind.HOLDER_KILLED:
                node.kill()
            case Kind.RANKS_KILLED:
                signal_all(node.rank_pids, signal.SIGKILL)
            case Kind.OUT_OF_MEMORY:
                signal_all(node.rank_pids[-1:], signal.SIGKILL)
            case Kind.LEAVES:
                signal_all(node.rank_pids, signal.SIGTERM)
            case _:
                pids = node.pids if fault.kind is Kind.MACHINE_FROZEN else node.rank_pids
                self._stopped[fault.number] = pids
                signal_all(pids, signal.SIGSTOP)

    def _break_network(self, fault: PlannedFault) -> None:
        node = fault.nodes[0]
        match fault.kind:
            case Kind.PAIR_CUT:
                self._network.cut_between(*fault.nodes)
            case Kind.SENDS_NOTHING:
                self._network.drop_outgoing(node)
            case Kind.RECEIVES_NOTHING:
                self._network.drop_incoming(node)
            case Kind.LINK_DOWN:
                self._network.link_down(node)
            case _:
                self._network.cut_off(node)

    def undo(self, fault: PlannedFault) -> None:
        """Undo a fault; processes that it ends have exited."""
        if fault.kind in OF_PROCESSES:
            self._cluster.restart(fault.nodes[0])
        elif fault.kind in OF_NETWORK:
            for node in fault.nodes:
                self._network.heal(node)
        elif fault.kind in OF_ENVIRONMENT:
            self._env_faults.set(fault.nodes[0], fault.kind, is_on=False)
        elif fault.kind in OF_STORE:
            assert self._store is not None, "it was struck"
            if fault.kind in _STOPS_STORE:
                self._store.resume()
            else:
                self._store.start(empty=fault.kind is not Kind.STORE_RESTARTED)
        else:
            signal_all(self._stopped.pop(fault.number), signal.SIGCONT)


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU time of living processes, system time included."""
    return sum(number_of(pid, field) or 0 for pid in pids for field in (14, 15)) / _TICKS_PER_S


def set_background(pids: Iterable[int], is_background: bool) -> None:
    """Set processes to background or normal priority. Does nothing unless root.

    Sets the priority of the scheduler's autogroup as well, which otherwise overrides that of processes.
    """
    if os.geteuid() != 0:
        return
    priority = _BACKGROUND_PRIORITY if is_background else 0
    for pid in pids:
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.setpriority(os.PRIO_PROCESS, int(task.name), priority)
            Path(f"/proc/{pid}/autogroup").write_text(str(priority))
        except OSError:  # gone meanwhile, or a kernel without autogroups
            continue


def left_behind(run_id: str, stores: Stores | StoresOfNodes, shm_dir: Path, *, is_closed: bool) -> list[str]:
    """Return leftover processes and shared memory of a run; with `is_closed`, also server folders and networks."""
    folders = NodeFolder.path_of(shm_dir, run_id, "*")
    found = [str(path) for path in folders.parent.glob(folders.name)]
    found += [f"process {pid}" for pid in pids_with("ZERO_BAND_RUN__ID", run_id)]
    if is_closed:
        found += [str(folder) for folder in stores.folders if folder.exists()]
        found += [str(path) for path in Path("/var/run/netns").glob(f"zeroband-{os.getpid()}-*")]
    return found
