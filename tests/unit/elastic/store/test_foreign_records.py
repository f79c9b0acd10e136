"""Records that somebody sealed with the run's key and that say anything: read or not, they raise nothing else.

In a run without a token everybody has the key; in one with a token a node of another build may.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contract.test_records import SEALS, STORE, StoreRecord

from zeroband.config import load_config
from zeroband.config.shared import shared_items
from zeroband.elastic.membership.records import to_record
from zeroband.elastic.store.fact_records import FactBatch, FactLine
from zeroband.elastic.store.patches import patched
from zeroband.elastic.store.record_verifier import RecordVerifier
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.observe.jsonl import FilePlace
from zeroband.tools import ctl, join

DEEP = "[" * 100_000
SHARED = {"protocol": "1", "train.lr": "0.1"}
PLACE = FilePlace("file", 7)
FACTS = FactBatch((FactLine("events.jsonl", PLACE, {"kind": "joined", "n": [1]}),), {"events.jsonl": PLACE})
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.just(-1),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["\ud800", "\x00", "\u2028", "7" * 5000, "{", "../..", "@x", "--a", 'a"b\n[c]']),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a record, the root first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places_in(part, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], odd: Any, *, drops: bool = False) -> Any:
    """The record with another value at a path, or without it."""
    if not path:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    if drops and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(value[path[0]], path[1:], odd, drops=drops)
    return copy


@st.composite
def texts(draw: st.DrawFn, text: str) -> str:
    """Change a value of this text, or some of its characters."""
    how = draw(st.sampled_from(["value", "value", "drop", "cut", "letter", "deep"]))
    if how in ("value", "drop"):
        with contextlib.suppress(ValueError):
            value = json.loads(text)
            path = draw(st.sampled_from(places_in(value)))
            return json.dumps(changed(value, path, draw(ODD), drops=how == "drop"), sort_keys=True)
    at = draw(st.integers(0, max(len(text) - 1, 0)))
    if how == "deep":
        return text[:at] + DEEP + text[at:]
    return text[:at] if how == "cut" else text[:at] + draw(st.characters(codec="utf-8")) + text[at + 1 :]


OTHERS = {
    "run": StoreRecord(
        SHARED, ("run",), lambda verifier: verifier.seal_run(SHARED), lambda verifier, raw: verifier.run("k", raw)
    ),
    "facts": StoreRecord(
        FACTS,
        ("facts", "k", "a"),
        lambda verifier: verifier.seal_facts("k", "a", FACTS),
        lambda verifier, raw: verifier.facts("k", "a", raw),
    ),
}
RECORDS = STORE | OTHERS


@pytest.mark.parametrize("name", RECORDS)
@settings(max_examples=80, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_sealed_record_of_any_content_is_read_or_rejected(name: str, data: st.DataObject) -> None:
    record = RECORDS[name]
    before = SEALS.open(record.write(RecordVerifier(SEALS)).encode(), *record.scope)
    assert before is not None
    raw = SEALS.seal(data.draw(texts(before.text)), *record.scope, label=before.label).encode(errors="surrogatepass")
    record.read(RecordVerifier(SEALS), raw)


@settings(max_examples=80, derandomize=True, database=None)
@given(data=st.data())
def test_patch_of_any_content_gives_a_record_or_is_rejected(data: st.DataObject) -> None:
    raw = STORE["plan"].write(RecordVerifier(SEALS))
    patch = data.draw(texts('{"version": 42, "members": ["a#1", "b#2"], "network": {"rtt_ms": 7}}'))
    with contextlib.suppress(ValueError):
        patched(raw.encode(), f"mac 3 42 42-00 s1 {patch}".encode(errors="surrogatepass"))


# -- what starts on them ----------------------------------------------------------------------------------------------

TOKEN = "sesame"


@pytest.fixture
def founded(
    open_store: Callable[..., RedisStore], redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RedisStore:
    """A run without nodes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZERO_BAND_RUN__TOKEN", TOKEN)
    config = load_config(["@debug/diloco", "--run.id", "run"], {"ZERO_BAND_STORE__URL": redis_url})
    store = open_store(token=TOKEN, retry_s=1.0)
    store.found_or_match({key: str(value) for key, value in shared_items(config).items()})
    return store


def start(url: str) -> Sequence[int]:
    """Exit codes of tools that read the store's records."""
    names = ["--outer.type", "ddp", "--run.id", "run", "--store.url", url]
    return [ctl.main(["status", *names]), join.main([url, "--run-id", "run", "--dry-run"])]


@settings(max_examples=8, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_tool_exits_cleanly_on_a_run_record_of_any_content(
    founded: RedisStore, redis_url: str, redis_client: redis.Redis, data: st.DataObject
) -> None:
    shared = founded.record()
    assert shared is not None or redis_client.delete(founded.keys.run) == 1
    told = dict(shared or SHARED)
    for key in data.draw(st.lists(st.sampled_from(sorted(told)), min_size=1, max_size=3)):
        odd = data.draw(st.one_of(st.none(), ODD.map(str), st.text(max_size=9)))
        told = {k: v for k, v in told.items() if k != key} | ({} if odd is None else {key: odd})
    with contextlib.suppress(ValueError):  # lone surrogates are no text of a store
        redis_client.set(founded.keys.run, founded.verifier.seal_run(told))
    assert {*start(redis_url)} <= {0, 1, 2}
    redis_client.set(founded.keys.run, founded.verifier.seal_run(shared or SHARED))


@settings(max_examples=15, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_tool_exits_cleanly_on_a_verdict_of_any_content(
    founded: RedisStore, redis_url: str, redis_client: redis.Redis, data: st.DataObject
) -> None:
    verdict = STORE["verdict"].value
    path = data.draw(st.sampled_from(places_in(to_record(verdict)["record"])))
    record = changed(to_record(verdict)["record"], path, data.draw(ODD), drops=data.draw(st.booleans()) and bool(path))
    with contextlib.suppress(ValueError):
        foreign = replace(verdict, record=record if isinstance(record, dict) else {})
        redis_client.set(founded.keys.committed, founded.verifier.seal_verdict(foreign))
    assert {*start(redis_url)} <= {0, 1, 2}
