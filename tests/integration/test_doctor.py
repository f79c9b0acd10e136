"""`zeroband doctor` with a real store and real connections, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.stores import free_port

from zeroband.config import load_config
from zeroband.elastic.guardian.process import ListenAddress
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.records import Peer
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.tools.cluster import RedisServer
from zeroband.tools.doctor import outside, pairs
from zeroband.tools.doctor.command import main
from zeroband.tools.doctor.outside import folder_check
from zeroband.tools.doctor.pairs import PairExamination, PairFinding

Examine = Callable[[str, str], list[PairFinding]]


@pytest.fixture
def redis_url() -> Iterator[str]:
    with RedisServer() as redis:
        yield redis.local_url


@pytest.fixture
def examine(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """What one of three nodes finds, with its token."""
    for name, value in (("LEASE_S", 1.5), ("_CONNECT_S", 5.0), ("_LONG_ENOUGH_S", 0.05), ("_RENEW_S", 0.1)):
        monkeypatch.setattr(pairs, name, value)

    def one(node_id: str, token: str) -> list[PairFinding]:
        store = RedisStore(redis_url, "run.doctor", lease_s=5.0, retry_s=5.0)
        try:
            key = RunKey.of(token, "run")
            with PairExamination(store, node_id, ListenAddress("127.0.0.1"), key, is_sealed=True) as meeting:
                assert len(meeting.gather(3, 10.0)) == 3
                return meeting.measure(meeting.probe())
        finally:
            store.close()

    return one


@pytest.mark.slow
def test_nodes_measure_one_another_and_one_with_another_token_is_found_out(examine: Examine) -> None:
    tokens = {"a": "right", "b": "right", "c": "wrong"}
    with ThreadPoolExecutor(3) as threads:
        found = dict(zip(tokens, threads.map(examine, tokens, tokens.values()), strict=True))
    by_pair = {(node, pair.other): pair for node, seen in found.items() for pair in seen}
    assert len(by_pair) == 6 and all(pair.we_reach_it and pair.it_reaches_us for pair in by_pair.values())
    for pair in (by_pair["a", "b"], by_pair["b", "a"]):
        assert pair.advice == "" and pair.mbit is not None and pair.mbit > 1 and pair.rtt_ms is not None
    for stranger in (by_pair["a", "c"], by_pair["c", "b"]):
        assert stranger.mbit is None and "are run.token and comm.encryption the same" in stranger.advice


@pytest.mark.slow
def test_machines_of_one_name_are_told_so_with_a_name_for_each(
    redis_url: str, examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`examine` only makes it quick."""
    config = load_config(["@debug/diloco", "--store.url", redis_url, "--node.id", "vm"])
    monkeypatch.setattr(outside, "address_towards", lambda url: "127.0.0.1")
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: outside.look_outside(config, 2, 10.0), range(2)))
    wrong = [finding for findings in found for finding in findings if finding.is_fatal]
    assert [finding.seen for finding in wrong] == 2 * ["2 machines are called vm (vm at 127.0.0.1, vm at 127.0.0.1)"]
    names = sorted(finding.advice.rpartition("here: export ZERO_BAND_NODE__ID=")[2] for finding in wrong)
    assert names == ["vm-1", "vm-2"]
    assert [[f.what for f in findings if "Mbit/s" in f.seen] for findings in found] == 2 * [["node vm"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paths", "shared", "seen"),
    [
        (("nfs", "nfs"), "auto", "is one folder on a, b"),
        (("a", "b"), "auto", "is another folder on b: each keeps whole checkpoints"),
        (("a", "b"), "true", "is not the folder of b"),
        (("a", "b"), "false", ""),
    ],
)
def test_nodes_find_out_whether_ckpt_path_is_one_folder_and_leave_nothing_there(
    redis_url: str, tmp_path: Path, paths: tuple[str, str], shared: str, seen: str
) -> None:
    store = RedisStore(redis_url, "run.doctor", lease_s=5.0, retry_s=5.0)
    with contextlib.closing(store), ExitStack() as stack:
        for name in "ab":
            store.renew_lease(name, Peer(name, "127.0.0.1", 1, False), first=True)
        checks = [
            stack.enter_context(
                folder_check(
                    load_config([f"--ckpt.path={tmp_path / path}", f"--ckpt.shared={shared}", "--run.id=run"]),
                    store,
                    name,
                )
            )
            for name, path in zip("ab", paths, strict=True)
        ]
        for check in checks:
            check({"a", "b"})
        found = checks[0]({"a", "b"})
    assert ("" if found is None else f"{found.seen} {found.advice}").find(seen) >= 0 and (found is None) == (not seen)
    assert found is None or found.is_fatal == (shared == "true")
    assert not [file for file in tmp_path.rglob("*") if file.parent != tmp_path]


def doctor(*arguments: str) -> int:
    return main(["@configs/debug/diloco.toml", *arguments])


@pytest.mark.slow
def test_node_alone_is_told_of_its_store(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--store.url", redis_url) == 0
    assert "answers within" in capsys.readouterr().out


@pytest.mark.slow
def test_node_that_waited_for_others_in_vain_is_a_problem(
    redis_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "LEASE_S", 0.1)
    assert doctor("--store.url", redis_url, "--nodes", "8", "--wait-s", "0") == 3
    said = capsys.readouterr().out
    assert "FAIL  nodes" in said and "1 of 8 came" in said


@pytest.mark.slow
def test_nodes_that_cannot_be_met_without_the_library_are_named(
    redis_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside.native, "problem", lambda: "install a C++ compiler")
    assert doctor("--store.url", redis_url, "--nodes", "8", "--comm.backend", "gloo") == 0
    assert "note  nodes" in capsys.readouterr().out


@pytest.mark.slow
def test_store_that_is_not_there_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "_STORE_RETRY_S", 0.1)
    assert doctor("--store.url", "redis://127.0.0.1:1") == 3
    said = capsys.readouterr().out
    assert "FAIL" in said and "127.0.0.1:1" in said


@pytest.mark.slow
def test_wrong_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--comm.codecs", "int8") == 2
    assert "comm.codec" in capsys.readouterr().err


@pytest.mark.slow
def test_node_that_is_to_hold_a_store_is_told_whether_it_can_and_which_others_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    port = free_port()
    asked = ("--store.url=nodes", f'--store.peers=["127.0.0.1:{port}", "127.0.0.1:{free_port()}"]')
    assert doctor(*asked, f"--node.port={port}") == 0
    assert "1 of 2 answer; no run yet" in capsys.readouterr().out
    with RedisServer(host="127.0.0.1", port=port):
        assert doctor(*asked, f"--node.port={port}") == 3
    assert f"node.port={port} is taken" in capsys.readouterr().out
