"""One network for the session, whole again for each test; skipped with the reason where this machine lets none be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zeroband.tools.cluster import Network


@pytest.fixture(scope="session")
def network_of_session() -> Iterator[Network]:
    if reason := Network.obstacle():
        pytest.skip(reason)
    with Network() as network:
        for node in ("node0", "node1", "node2"):
            network.add(node)
        yield network


@pytest.fixture
def network(network_of_session: Network) -> Iterator[Network]:
    """node0, node1 and node2, which reach each other and the store."""
    yield network_of_session
    network_of_session.heal_all()
