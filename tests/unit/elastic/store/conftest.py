"""What the tests of the store share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.declared_keys import refuse_undeclared_keys
from tests.servers import SERVERS, Servers


@pytest.fixture(autouse=True)
def only_declared_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_undeclared_keys(monkeypatch)


@pytest.fixture(scope="module", params=SERVERS, ids=str)
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., int]]:
    """`launch(*settings, file="")` runs a server on a free port until the end of the module; its port."""
    servers = Servers(request.param.program, tmp_path_factory.mktemp("redis"))
    yield servers.start
    servers.close()
