"""What many tests share.

A real Redis for every test that decides something through one: one server for the session, empty for each test. The
mesh of a node with one rank.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import redis
from tests.servers import NO_SCRIPTS, SERVERS, Servers

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.tools.cluster import RedisServer

if TYPE_CHECKING:
    from zeroband.node.mesh import LocalMesh


def pytest_configure(config: pytest.Config) -> None:
    """Set what all tests rely on, whatever shell started them.

    Without `--on`, GPUs are hidden: the tests and the processes that they start train on the CPU, as in CI. Interrupts
    interrupt, also where they were ignored; no example of a property fails because it was slow; a run writes a report
    where its test asks for one; gcsfs, which looks once, when it is imported, speaks no gRPC: the server of `buckets`
    does not.
    """
    if config.getoption("--on") is None:
        os.environ.update(dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), ""))
    os.environ["ZERO_BAND_OBSERVE__REPORT"] = "false"
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hypothesis.settings.register_profile("busy machines", deadline=None)
    hypothesis.settings.load_profile("busy machines")
    gc.disable()  # collecting thousands of tests makes no garbage; looking for it takes a fifth of that time


def pytest_collection_finish() -> None:
    """Exempt what collecting the tests made from garbage collection, which begins with the first test."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--on", choices=("cuda", "cpu"), help="device of the GPU checks; cpu tries them out; none: hide GPUs"
    )


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def local() -> Iterator[LocalMesh]:
    """The only rank of a node."""
    from zeroband.node.mesh import init_local_mesh  # loads torch, for which the process that hands out tests has no use

    mesh = init_local_mesh(environ={})
    yield mesh
    mesh.close()


@pytest.fixture
def redis_client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """The empty server, seen from outside."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
        yield client


@pytest.fixture
def redis_url(redis_server: RedisServer, redis_client: redis.Redis) -> str:
    return redis_server.url


@pytest.fixture
def url_without_scripts(tmp_path: Path) -> Iterator[str]:
    """The address of a server that refuses for good what a run asks of it."""
    servers = Servers(SERVERS[0].program, tmp_path / "refusing")
    yield f"redis://127.0.0.1:{servers.start(*NO_SCRIPTS)}"
    servers.close()


@pytest.fixture
def open_store(redis_url: str) -> Iterator[Callable[..., RedisStore]]:
    """Open stores of one run on the empty server; closed at the end."""
    stores: list[RedisStore] = []

    def open_one(
        run_id: str = "run", *, token: str | None = None, lease_s: float = 5.0, retry_s: float = 5.0
    ) -> RedisStore:
        key = None if token is None else RunKey.of(token, run_id)
        stores.append(RedisStore(redis_url, run_id, key=key, lease_s=lease_s, retry_s=retry_s))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., RedisStore]) -> RedisStore:
    return open_store()
