"""The stores of a soak, as real servers."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from zeroband.config.store_url import addresses_in
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.tools.chaos.effects import FaultInjector
from zeroband.tools.chaos.plan import Kind, PlannedFault
from zeroband.tools.chaos.stores import Stores
from zeroband.tools.cluster.local import LocalCluster


@pytest.fixture
def local(tmp_path: Path) -> LocalCluster:
    """A cluster that is not started: no fault here strikes a node."""
    return LocalCluster(tmp_path, nodes=1, alone=True)


def survey(stores: Stores) -> int:
    """How many of them answer."""
    store = RedisStore(stores.local_url, "run", retry_s=1.0)
    try:
        return len(store.survey())
    finally:
        store.close()


def test_fault_strikes_the_store_in_use_and_leaves_the_other_one(local: LocalCluster) -> None:
    with Stores(2, None) as stores:
        first, second = addresses_in(stores.local_url)
        injector, lost = FaultInjector(local, stores, Mock()), PlannedFault(1, 0.0, Kind.STORE_LOST, (), 3.0)
        assert survey(stores) == len(stores.pids) == 2
        injector.inject(lost, store=second)
        assert survey(stores) == 1 and stores.at(first).is_running and not stores.at(second).is_running
        injector.undo(lost)
        assert survey(stores) == 2
        stopped = PlannedFault(2, 0.0, Kind.STORE_STOPPED, (), 3.0)
        injector.inject(stopped, store=first)
        assert survey(stores) == 1 and len(stores.pids) == 2, "it is there, and does not answer"
        injector.undo(stopped)
        assert survey(stores) == 2
        folders = stores.folders
    assert len(folders) == 2 and not any(folder.exists() for folder in folders)


def test_lost_store_is_empty_when_another_one_is_started_at_its_address(local: LocalCluster) -> None:
    with Stores(1, None) as stores:
        for kind, is_kept in ((Kind.STORE_RESTARTED, True), (Kind.STORE_LOST, False)):
            store = RedisStore(stores.local_url, "run", retry_s=5.0)
            store.found_or_match({"protocol": "1"})
            injector, fault = FaultInjector(local, stores, Mock()), PlannedFault(1, 0.0, kind, (), 3.0)
            injector.inject(fault, store=stores.local_url)
            injector.undo(fault)
            assert (store.record() is not None) == is_kept
            store.close()
