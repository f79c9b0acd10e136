"""LocalCluster: nodes of one run on this machine with their own Redis. Owned by one thread."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from pydantic import SecretStr

import zeroband
from zeroband.config.keys import dotted, schema_keys
from zeroband.config.load import given_settings
from zeroband.config.sources import ENV_DELIMITER, ENV_PREFIX
from zeroband.config.store_url import NODE_PORT, NODES
from zeroband.elastic.store.local_server import RedisServer
from zeroband.errors import ConfigError
from zeroband.node.gpus import share_of, visible_gpus
from zeroband.node.launch import free_port
from zeroband.node.names import AUTO, new_run_name
from zeroband.node.processors import usable_processors
from zeroband.node.shm import NodeFolder
from zeroband.observe.facts import FolderFacts
from zeroband.observe.status import RunReader, RunView, render
from zeroband.tools.cluster.interrupts import uninterrupted
from zeroband.tools.cluster.network import Network
from zeroband.tools.cluster.node_process import NodeProcess, NodeSpec

PACKAGE = Path(zeroband.__file__).parent
TRAINER = PACKAGE / "train.py"

_POLL_S = 0.05
_PEERS = 3
"""Number of founders in `store.peers` if each node holds a store."""


class LocalCluster:
    """Several nodes of one run as real processes.

        with LocalCluster(tmp_path, ["@configs/debug/diloco.toml"], nodes=3) as cluster:
            for _ in range(3):
                cluster.start()
            cluster.wait_until(lambda run: (run.round or 0) >= 2, timeout_s=60)
            cluster.nodes["node1"].kill()
            cluster.restart("node1")
            assert set(cluster.wait(timeout_s=120).values()) == {0}

    `directory`: becomes run.dir. `arguments`: of every node, before those given to `start`. `nodes`: number of
    founders. `run_id`: None generates one. `script`: what each rank runs. `store_url`: None starts a server for this
    cluster; "nodes": each node holds one. `alone`: no store, for runs without [outer]. `env`: added to this process's
    environment. `network`: gives each node a namespace; None: loopback. `redis`: the cluster's server, not started yet;
    None: one without persistence. `node`: starts a node.
    Leaving the context kills every process and removes its shared memory.
    """

    def __init__(
        self,
        directory: Path,
        arguments: Sequence[str] = (),
        *,
        nodes: int,
        run_id: str | None = None,
        script: Path = TRAINER,
        store_url: str | None = None,
        alone: bool = False,
        env: Mapping[str, str] | None = None,
        network: Network | None = None,
        redis: RedisServer | None = None,
        node: Callable[[NodeSpec], NodeProcess] = NodeProcess,
    ) -> None:
        self.run_id = run_id or f"local-{secrets.token_hex(4)}"
        self.run_dir = directory.absolute() / self.run_id
        self.nodes: dict[str, NodeProcess] = {}
        """Nodes by id; each restart makes a new NodeProcess."""
        self.redis: RedisServer | None = redis
        """The cluster's own server, running while the context lasts."""
        self.network = network
        self.store_url = store_url
        """URL for the nodes; this process, outside their network, uses `redis.local_url`."""
        self._has_own_store = store_url is None and not alone
        assert self._has_own_store or redis is None
        self.arguments = tuple(arguments)
        self._founders = nodes
        self._store_ports: dict[str, int] = {}
        """Ports of stores held by nodes."""
        self._script, self._node = script, node
        self._env = {**os.environ, **(env or {})}
        self._gpus = visible_gpus(self._env)
        self._reader = RunReader(FolderFacts(self.run_dir))
        self._stack = ExitStack()

    def __enter__(self) -> LocalCluster:
        if self._has_own_store:
            self.redis = self.redis or (self.network.redis_server() if self.network else RedisServer())
            self._stack.enter_context(self.redis)
            self.store_url = self.redis.url
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(
        self,
        node_id: str | None = None,
        *,
        ranks: int = 1,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        launch: Sequence[str] = (),
    ) -> NodeProcess:
        """Start a node. `node_id`: default node0, node1, ... `arguments`, `env`: override the cluster's.

        `launch`: further options of its launcher.
        """
        node_id = node_id or f"node{len(self.nodes)}"
        spec = NodeSpec(
            node_id=node_id,
            ranks=ranks,
            script=self._script,
            arguments=(*self.arguments, *arguments),
            env={**self.environment(node_id, ranks), **(env or {})},
            node_dir=self.run_dir / node_id,
            memory=self._memory_of(node_id, env or {}),
            prefix=tuple(self.network.prefix(node_id)) if self.network else (),
            launch=tuple(launch),
        )
        return self._run(spec)

    def restart(self, node_id: str, *, arguments: Sequence[str] | None = None) -> NodeProcess:
        """Restart a node that has ended. `arguments`: its own ones from now on; None: as before."""
        spec = self.nodes[node_id].spec
        if arguments is not None:
            spec = replace(spec, arguments=(*self.arguments, *arguments))
        return self._run(spec)

    def _run(self, spec: NodeSpec) -> NodeProcess:
        arguments, secrets = without_secrets(spec.arguments)
        spec = replace(spec, arguments=arguments, env={**spec.env, **secrets})
        old = self.nodes.get(spec.node_id)
        assert old is None or not old.is_running, f"{spec.node_id} is running"
        node = self.nodes[spec.node_id] = self._node(spec)
        self._stack.callback(node.kill)
        return node

    def environment(self, node_id: str, ranks: int) -> dict[str, str]:
        """Return the environment of a node."""
        env = {
            "OMP_NUM_THREADS": str(max(1, usable_processors() // (self._founders * ranks))),
            **self._env,
            "PYTHONUNBUFFERED": "1",
            "ZERO_BAND_NODE__ID": node_id,
            "ZERO_BAND_RUN__ID": self.run_id,
            "ZERO_BAND_RUN__DIR": str(self.run_dir.parent),
            "ZERO_BAND_ELASTIC__START_NODES": str(self._founders),
        }
        if PACKAGE.parent.name != "site-packages":  # run from a checkout that may not be installed
            paths = [str(PACKAGE.parent), *filter(None, [self._env.get("PYTHONPATH")])]
            env["PYTHONPATH"] = os.pathsep.join(paths)
        if self.store_url is not None:
            env["ZERO_BAND_STORE__URL"] = self.store_url
        if self.store_url == NODES:
            founders = [f"node{number}" for number in range(min(self._founders, _PEERS))]
            env["ZERO_BAND_STORE__PEERS"] = json.dumps([self.store_place(founder) for founder in founders])
            if self._founders == 1 and node_id == founders[0]:
                env["ZERO_BAND_BOOTSTRAP"] = "true"
            env["ZERO_BAND_NODE__PORT"] = self.store_place(node_id).rpartition(":")[2]
        if self.network is not None:
            env["ZERO_BAND_NODE__ADVERTISE_HOST"] = self.network.address(node_id)
        first_rank = sum(node.spec.ranks for other, node in self.nodes.items() if other != node_id)
        if gpus := share_of(self._gpus, first_rank=first_rank, ranks=ranks):
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return env

    def store_place(self, node_id: str) -> str:
        """Return host and port of the store that a node holds, with `store_url` = "nodes"."""
        if self.network is not None:
            return f"{self.network.address(node_id)}:{NODE_PORT}"
        if node_id not in self._store_ports:
            self._store_ports[node_id] = free_port()
        return f"127.0.0.1:{self._store_ports[node_id]}"

    def _memory_of(self, node_id: str, env: Mapping[str, str]) -> Path:
        shm_dir = {**self._env, **env}.get("ZERO_BAND_NODE__SHM_DIR", "/dev/shm")
        return NodeFolder.path_of(Path(shm_dir), self.run_id, node_id)

    def view(self) -> RunView:
        """Return the run as its files show it now."""
        return self._reader.read()

    @property
    def running(self) -> list[NodeProcess]:
        """The running nodes."""
        return [node for node in self.nodes.values() if node.is_running]

    def wait_until(self, condition: Callable[[RunView], bool], *, timeout_s: float) -> RunView:
        """Wait until a condition holds. Returns the view that fulfils it.

        Raises TimeoutError, with the run's state and console tails, after the timeout or when all nodes have ended.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            is_over = not self.running
            view = self.view()
            if condition(view):
                return view
            if is_over or time.monotonic() > end_s:
                why = "every node has ended" if is_over else f"not within {timeout_s:g} s"
                raise TimeoutError(f"{why}\n{self.describe()}")
            time.sleep(_POLL_S)

    def wait(self, *, timeout_s: float) -> dict[str, int]:
        """Wait until every node has ended. Returns exit codes by node id. Raises TimeoutError as `wait_until` does."""
        end_s = time.monotonic() + timeout_s
        codes: dict[str, int] = {}
        for node in self.nodes.values():
            try:
                codes[node.node_id] = node.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"{node.node_id} runs for longer than {timeout_s:g} s\n{self.describe()}") from None
        return codes

    def describe(self) -> str:
        """Return the run's state, exit codes and console tails, for error messages."""
        consoles = [
            f"-- {node.node_id}, exit code {node.exit_code}\n{node.console_tail()}" for node in self.nodes.values()
        ]
        return "\n".join([render(self.view()), *consoles])

    def stop(self, *, grace_s: float, in_hurry: Callable[[], bool] = lambda: False) -> None:
        """Ask every node to end and wait; kill them after `grace_s` or once `in_hurry`."""
        for node in self.running:
            node.terminate()
        end_s = time.monotonic() + grace_s
        while self.running and time.monotonic() < end_s and not in_hurry():
            time.sleep(_POLL_S)
        for node in self.nodes.values():
            node.kill()

    def close(self) -> None:
        """Kill the nodes, remove their shared memory, stop the server. Not interrupted by Ctrl-C."""
        with uninterrupted():
            self._stack.close()


# -- what a command is asked to start ---------------------------------------------------------------------------------


def asked_run(arguments: Sequence[str], prefix: str | None = None) -> tuple[Path, str]:
    """Return `run.dir` and `run.id` from flags or environment; without an id, a new name.

    Files are ignored: each start is a new run. `prefix`: of a name with the time; None: a name of words. Raises
    ConfigError.
    """
    asked = given_settings(arguments, os.environ, with_files=False)
    directory, run_id = Path(asked.get(("run", "dir")) or "runs"), asked.get(("run", "id"))
    if run_id == AUTO:
        raise ConfigError("run.id='auto': this command generates a name by default; drop it")
    if run_id is None:
        by_time = time.strftime(f"{prefix}-%Y%m%d-%H%M%S", time.gmtime())
        run_id = new_run_name(directory) if prefix is None else by_time
    return directory, run_id


def without_secrets(arguments: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return a node's arguments without secrets, and the secrets as environment variables.

    Command lines are visible to every user of the machine.
    """
    schema = schema_keys()
    names = {dotted(path): path for path in schema.keys if SecretStr in schema.kinds(path)}
    kept: list[str] = []
    secrets: dict[str, str] = {}
    left = [*arguments]
    while left:
        flag, equals, value = left.pop(0).partition("=")
        path = names.get(flag.removeprefix("--").replace("-", "_")) if flag.startswith("--") else None
        if path is None or not (equals or left):
            kept.append(flag + equals + value)
        else:
            secrets[ENV_PREFIX + ENV_DELIMITER.join(path).upper()] = value if equals else left.pop(0)
    return tuple(kept), secrets
