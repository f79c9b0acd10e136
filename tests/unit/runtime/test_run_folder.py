"""A node that starts again while the run's store is lost finds its run at the next store."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tests.held_stores import HeldStore, open_at
from tests.stores import RUN_ID, SHARED, a_plan

from zeroband.config import load_config
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import StoreTerm, Verdict
from zeroband.elastic.membership.succession import HandoverState
from zeroband.observe.events import EVENTS_FILE
from zeroband.runtime.run_folder import RUN_FILE, RunFolder

TOKEN, SESSION = "a token of the run", "first"


def test_node_that_starts_while_its_run_moves_to_another_store_continues_it(tmp_path: Path, stack: ExitStack) -> None:
    """The store that it found answers and is empty: members restore nothing there, since they have moved."""
    key = RunKey.of(TOKEN, RUN_ID)
    emptied, other = (stack.enter_context(HeldStore(key, RUN_ID)) for _ in range(2))
    founder = open_at(stack, emptied, other)
    founder.reach(retry_s=5.0)
    places = json.dumps([emptied.place, other.place])
    outer = ("--outer.type", "diloco", "--run.id", RUN_ID, "--run.token", TOKEN, "--data.source.type", "synthetic")
    config = load_config(["--store.url", "nodes", "--store.peers", places, "--fault.detect-s", "3", *outer], environ={})
    (tmp_path / EVENTS_FILE).touch()
    (tmp_path / RUN_FILE).write_text(json.dumps({"session": SESSION}))
    plan = a_plan("a#1")
    verdict = Verdict(plan, "d", {"session": SESSION, "progress": Progress.at_start().to_record()})
    [elsewhere] = [store for store in founder.candidates if other.place in store.address]
    with ThreadPoolExecutor(1) as threads:
        started = threads.submit(RunFolder(tmp_path).prepare, config, "node0", {})
        time.sleep(1.0)
        assert not started.done()
        term = StoreTerm(2, elsewhere.probe("", None).store)
        assert elsewhere.begin(term, HandoverState(verdict, plan, Orders(), SHARED, ("a#1",)))
        started.result(timeout=30)
    assert (tmp_path / "config.toml").exists()
