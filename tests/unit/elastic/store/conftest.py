"""What the tests of the store share."""

from __future__ import annotations

import pytest
from tests.declared_keys import refuse_undeclared_keys


@pytest.fixture(autouse=True)
def only_declared_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_undeclared_keys(monkeypatch)
