"""Where a node listens."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from zeroband.config.schema import NodeSection, RunConfig
from zeroband.elastic.membership.keys import RunKey
from zeroband.runtime.transport_setup import listen_address_of

ALL = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def listens_on(host: str, **node: Any) -> str | None:
    return listen_address_of(RunConfig(node=NodeSection(**node)), host, RunKey(b"k" * 32)).bind_host


def test_node_listens_on_the_advertised_address_where_it_has_it_else_on_all() -> None:
    assert [listens_on(host) for host in ("127.0.0.1", "localhost", "203.0.113.7")] == ["127.0.0.1", "127.0.0.1", ALL]
    assert listens_on("203.0.113.7", bind_host="10.0.0.1") == "10.0.0.1"


def test_name_that_means_loopback_on_its_own_machine_only_is_no_address_to_listen_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
    assert listens_on("myhost") == ALL
