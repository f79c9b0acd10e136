"""Fixtures of the store's tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
from tests.declared_keys import refuse_undeclared_keys
from tests.servers import SERVERS, Servers

from zeroband.elastic.membership.keys import RunKey

_key_of = functools.cache(RunKey.of)


@pytest.fixture(autouse=True)
def only_declared_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_undeclared_keys(monkeypatch)


@pytest.fixture(autouse=True)
def keys_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Derive the key of each token once: the hash is slow on purpose."""
    monkeypatch.setattr(RunKey, "of", staticmethod(_key_of))


@pytest.fixture(scope="module", params=SERVERS, ids=str)
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., int]]:
    """`launch(*settings, file="")` runs a server on a free port until the end of the module; its port."""
    servers = Servers(request.param.program, tmp_path_factory.mktemp("redis"))
    yield servers.start
    servers.close()
