"""Records as nodes exchange and keep them: what was written once is written so again, byte for byte, and still read.

`records.json` holds one sample of each as it was first written. Another text there is another protocol (`PROTOCOL`), or
another format of the checkpoints, and takes their new number.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from zeroband.checkpoint.manifest import CheckpointKey, Manifest, Stamp, StoredFile, parse_manifest
from zeroband.checkpoint.ownership import Owner, claim, read_owner
from zeroband.checkpoint.peers import Shares
from zeroband.checkpoint.storage import LocalStorage
from zeroband.data.ledger import SHARED, Ledger
from zeroband.elastic.membership.keys import NodeKey, RunKey
from zeroband.elastic.membership.loss_record import LossRecord
from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import (
    Blame,
    Carried,
    Carry,
    Claim,
    Evidence,
    Gain,
    LinkRates,
    Peer,
    Ready,
    RestartPoint,
    RoundPlan,
    StoreTerm,
    Verdict,
)
from zeroband.elastic.membership.resume_rules import Held, Holding
from zeroband.elastic.membership.succession import ForwardPointer, Line, MemberReport, SplitBrain
from zeroband.elastic.membership.topology import LinkTable
from zeroband.elastic.recovery import state_chunks
from zeroband.elastic.recovery.state_chunks import Section, StateManifest
from zeroband.elastic.store.record_verifier import RecordVerifier
from zeroband.elastic.store.seals import Seals
from zeroband.state.crash_memory import NodeMemory

SAMPLES: dict[str, str] = json.loads(Path(__file__).with_name("records.json").read_text(encoding="utf-8"))
SEALS = Seals(RunKey(bytes(32)), "run", "zeroband:{run}")
A, B = "a#1", "b#2"
NODE = NodeKey(bytes(32))
NODES_SEALS = Seals(RunKey(bytes(32), NODE), "run", "zeroband:{run}")
MEMBER = f"a#00c0ffee.{NODE.public}"

PROGRESS = Progress(
    inner_step=30,
    tokens=12345,
    ledgers={SHARED: Ledger(96, ((4, 8), (12, 16)), {B: ((64, 80),), A: ((80, 90), (92, 96))}), "c/7f": Ledger(8)},
    is_complete=False,
    outer_step=3,
    founding="1-00ff",
    follows=("7-aa11", 12),
    closing=0,
)
LOSSES = LossRecord(loss=3.25, is_finite=True, mean=3.5, rounds=2, from_step=20)
PLAN = RoundPlan(
    version=41,
    epoch=7,
    round=3,
    members=(A, B),
    weights=(2048, 0),
    steps=(10, 4),
    steps_requested=(10, 0),
    late=("c#3",),
    carried=(Carried("c#3", A, "3-00ff", 512, 5, 0.25, 3, counts=True),),
    retries=1,
    network=LinkTable((120, 30), (0,), 25, 25, 80, 1500, (1,)),
    orders=2,
    rollback=20,
    trust=(1.0, 0.25),
    skips_data=True,
    loss=3.25,
    sessions=("s2", "s1"),
    phase_fraction=(1.0, 0.25),
    corpora=("", "b/00ff"),
    is_equal=True,
    sites=(0, 0),
    largest=(0.5, 0.0),
    is_flat=True,
    before="40-00ff",
    silent=(B,),
    gains=(Gain(B, -0.5),),
    blames=(Blame((A, B), "their hashes differ", is_lie=True, consequence="apart", round=2),),
    claims=(("c#3", Claim(96, 104)),),
    proposer=A,
)
EVIDENCE = Evidence(("h0", "h1"), ("c#3",), (B,), ("d#4",), ("s0", "s1"), (A,), ("e#5",))
VERDICT = Verdict(
    PLAN,
    "d1",
    {
        "progress": PROGRESS.to_record(),
        "losses": LOSSES.to_record(),
        "session": "s3",
        "session_before": None,
        "grad_norm": float("inf"),
        "weight": 0,
        "skipped": {"": [[0, 4]]},
    },
)
CARRIES, CLAIM = Carry("c#3", "3-00ff", 0.25), Claim(120, 136, "b/00ff")
READY = Ready(
    4, 2048, "d0", 10, 10, 120, 1500, 3.25, 0.5, "b/00ff", "lab-a", 0.5, (0.25, None), "4-11ee", (CARRIES,), 5, CLAIM
)
STAMP = Stamp(
    run_id="run",
    session="s1",
    round=3,
    inner_step=30,
    record={"progress": PROGRESS.to_record(), "weight": 0, "norm": 0.5},
    state_digest="d0",
    sections=("params", "momentum"),
    members=("a", "b"),
    layout="l0",
    model={"d_model": 4, "vocab_size": 7},
    tokenizer="byte",
    data={"seed": 5},
)
MANIFEST = Manifest(
    STAMP,
    {"outer/a.safetensors": StoredFile(12, "aa"), "nodes/b/state.json": StoredFile(3, "bb", "cc")},
    {"c": "no room"},
    "ff",
)
STATE = StateManifest(
    3, "d0", VERDICT.record, 8, 0, {"params": Section(12, ("h0", "h1")), "momentum": Section(4, ("h2",))}
)
PEER = Peer("a", "10.0.0.1", 4000, True, (B,), (B, "c#3"), ("d#4",), ("e#5", "f#6"), 6379)
LINKS = LinkRates({B: 30}, 80)
ORDERS = Orders(3, True, 20, (A,), True, 2, 20, 1, ("c#3",))
RESTART_POINT = RestartPoint(12, 30, "d0", A, ("s2", "s1"))
GENERATION = StoreTerm(3, "store3")
_PROMISES = (StoreTerm(2, "store2"), GENERATION)
MEMBER_REPORT = MemberReport(_PROMISES, _PROMISES[0], VERDICT, PLAN, "d0", VERDICT.record, ORDERS, {"protocol": "1"})
LINE = Line("first", 7, 4096, ("a#1", "b#1"))
SPLIT_BRAIN = SplitBrain(LINE, Line("second", 5, 1024, ("c#1",)))
FORWARD_POINTER = ForwardPointer(GENERATION, "redis://10.0.0.2:6379", LINE)


@dataclass(frozen=True)
class StoreRecord:
    """How the store's judge writes and reads one kind of record."""

    value: object
    scope: tuple[str, ...]
    write: Callable[[RecordVerifier], str]
    read: Callable[[RecordVerifier, bytes], object]


HOLDING = Holding(True, Held(630, 63, "digest", "7-aa11", "1-00ff"), "", 630, "a.00ff", ("b.11aa",))
STORE = {
    "plan": StoreRecord(
        PLAN,
        ("plan",),
        lambda verifier: verifier.seal_plan(PLAN),
        lambda verifier, raw: verifier.plan("k", raw, None),
    ),
    "verdict": StoreRecord(
        VERDICT,
        ("verdict",),
        lambda verifier: verifier.seal_verdict(VERDICT),
        lambda verifier, raw: verifier.verdict("k", raw),
    ),
    "ready": StoreRecord(
        READY,
        ("ready", "4", A),
        lambda verifier: verifier.seal_ready(A, READY),
        lambda verifier, raw: verifier.ready("k", 4, {A: raw}).get(A),
    ),
    "evidence": StoreRecord(
        EVIDENCE,
        ("evidence", PLAN.id, A),
        lambda verifier: verifier.seal_evidence(A, PLAN, EVIDENCE),
        lambda verifier, raw: verifier.evidence("k", PLAN, {A: raw}).get(A),
    ),
    "peer": StoreRecord(
        PEER,
        ("peer", A),
        lambda verifier: verifier.seal_peer(A, PEER),
        lambda verifier, raw: verifier.peers("k", {A: raw}).get(A),
    ),
    "claim": StoreRecord(
        CLAIM,
        ("claim", A),
        lambda verifier: verifier.seal_claim(A, CLAIM),
        lambda verifier, raw: verifier.claims("k", {A: raw}).get(A),
    ),
    "links": StoreRecord(
        LINKS,
        ("links", A),
        lambda verifier: verifier.seal_links(A, LINKS),
        lambda verifier, raw: verifier.links("k", {A: raw}).get(A),
    ),
    "holding": StoreRecord(
        HOLDING,
        ("holding", A),
        lambda verifier: verifier.seal_holding(A, HOLDING),
        lambda verifier, raw: verifier.holdings("k", {A: raw}).get(A),
    ),
    "orders": StoreRecord(
        ORDERS,
        ("orders",),
        lambda verifier: verifier.seal_orders(ORDERS),
        lambda verifier, raw: verifier.orders("k", raw),
    ),
    "restart_point": StoreRecord(
        RESTART_POINT,
        ("restart_point",),
        lambda verifier: verifier.seal_restart_point(RESTART_POINT),
        lambda verifier, raw: verifier.restart_point("k", raw, VERDICT),
    ),
    "member_report": StoreRecord(
        MEMBER_REPORT,
        ("member_report", A),
        lambda verifier: verifier.seal_member_report(A, MEMBER_REPORT),
        lambda verifier, raw: verifier.member_reports("k", {A: raw}).get(A),
    ),
    "forward_pointer": StoreRecord(
        FORWARD_POINTER,
        ("forward_pointer",),
        lambda verifier: verifier.seal_forward_pointer(FORWARD_POINTER),
        lambda verifier, raw: verifier.forward_pointer("k", raw),
    ),
    "split_brain": StoreRecord(
        SPLIT_BRAIN,
        ("split_brain",),
        lambda verifier: verifier.seal_split_brain(SPLIT_BRAIN),
        lambda verifier, raw: verifier.split_brain("k", raw),
    ),
}
LABELS = {
    "generation": StoreRecord(
        GENERATION,
        ("generation",),
        lambda verifier: verifier.seal_generation(GENERATION),
        lambda verifier, raw: verifier.generation("k", raw),
    ),
}
"""Records of the store that say all in their label, or in plain text."""


def write_share(folder: Path) -> bytes:
    Shares(LocalStorage(folder, "a"), "step", "now", (), CheckpointKey(bytes(32))).publish("b", MANIFEST.files)
    return (folder / "step/parts/now-b.json").read_bytes()


def write_owner(folder: Path) -> bytes:
    claim(LocalStorage(folder, "a"), Owner("run", "s1", "l0"), takes_over=False)
    return (folder / "owner.json").read_bytes()


def write_memory_stamp(folder: Path) -> bytes:
    NodeMemory(folder, launcher="7:100", layout="l0").stamp(("params",), 3, {"weight": 3}, "d0")
    return (folder / "stamp.json").read_bytes()


FILES: dict[str, Callable[[Path], bytes]] = {
    "manifest": lambda folder: MANIFEST.to_json(),
    "state_manifest": lambda folder: STATE.to_json(),
    "share": write_share,
    "owner": write_owner,
    "memory_stamp": write_memory_stamp,
}


def written(name: str, folder: Path) -> str:
    records = STORE | LABELS
    return records[name].write(RecordVerifier(SEALS)) if name in records else FILES[name](folder).decode()


@pytest.mark.parametrize("name", [*STORE, *LABELS, *FILES])
def test_record_is_written_as_it_always_was(name: str, tmp_path: Path) -> None:
    assert written(name, tmp_path) == SAMPLES[name]


def test_record_that_a_member_signs_is_written_and_read_as_it_always_was() -> None:
    """What its text says is that of the unsigned one."""
    verifier, raw = RecordVerifier(NODES_SEALS), SAMPLES["signed_ready"].encode()
    assert verifier.seal_ready(MEMBER, READY).encode() == raw
    assert verifier.ready("k", 4, {MEMBER: raw}) == {MEMBER: READY}
    assert SAMPLES["signed_plan"] == verifier.seal_plan(verifier.signed(PLAN, MEMBER))
    plan = verifier.plan("k", SAMPLES["signed_plan"].encode(), None)
    assert plan is not None and (plan.proposer, plan.members) == (MEMBER, PLAN.members)


@pytest.mark.parametrize("name", STORE | LABELS)
def test_record_of_the_store_is_read_as_it_was_written(name: str) -> None:
    record = (STORE | LABELS)[name]
    assert record.read(RecordVerifier(SEALS), SAMPLES[name].encode()) == record.value


def without(record: dict[str, object], *names: str) -> dict[str, object]:
    return {name: value for name, value in record.items() if name not in names}


CHANGES: dict[str, Callable[[dict[str, object]], object]] = {
    "one key more": lambda record: record | {"more": 1},
    "one key less": lambda record: without(record, max(record)),
    "numbers as text": lambda record: {name: str(value) for name, value in record.items()},
    "all of it none": dict.fromkeys,
    "a list": list,
}


@pytest.mark.parametrize("name", STORE)
@pytest.mark.parametrize("change", CHANGES)
def test_record_of_another_shape_does_not_count_though_it_is_sealed(name: str, change: str) -> None:
    verifier, record = RecordVerifier(SEALS), SEALS.open(SAMPLES[name].encode(), *STORE[name].scope)
    assert record is not None
    text = json.dumps(CHANGES[change](json.loads(record.text)), sort_keys=True)
    raw = SEALS.seal(text, *STORE[name].scope, label=record.label).encode()
    assert STORE[name].read(verifier, raw) in (None, Orders())
    assert raw in (verifier.rejected("k"), verifier.rejected(f"k {A}"))


def test_names_that_the_store_compares_stay() -> None:
    assert PLAN.id == "41-140cb2be72ae"


def test_progress_and_losses_are_read_from_a_verdict() -> None:
    verdict = RecordVerifier(SEALS).verdict("", SAMPLES["verdict"].encode())
    assert verdict is not None
    assert Progress.from_record(verdict.record["progress"]) == PROGRESS
    assert LossRecord.of(verdict.record) == LOSSES


def test_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert parse_manifest(SAMPLES["manifest"].encode()) == MANIFEST
    assert Progress.from_record(parse_manifest(SAMPLES["manifest"].encode()).stamp.record["progress"]) == PROGRESS
    storage = LocalStorage(tmp_path, "a")
    storage.write("owner.json", (SAMPLES["owner"].encode(),))
    assert read_owner(storage) == Owner("run", "s1", "l0")
    storage.write("step/parts/now-b.json", (SAMPLES["share"].encode(),))
    shares = Shares(storage, "step", "now", ("outer/a.safetensors",), CheckpointKey(bytes(32)))
    assert shares.read("b") == MANIFEST.files


def test_checkpoint_of_before_is_read_whose_run_had_one_ledger() -> None:
    progress = Progress.from_record(
        parse_manifest(SAMPLES["manifest_with_one_ledger"].encode()).stamp.record["progress"]
    )
    assert progress == replace(PROGRESS, ledgers={SHARED: PROGRESS.ledgers[SHARED]})


def test_state_is_served_as_it_always_was() -> None:
    assert state_chunks.parse_manifest(SAMPLES["state_manifest"].encode(), STATE.lengths) == STATE


def test_memory_of_a_crashed_trainer_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "stamp.json").write_text(SAMPLES["memory_stamp"], encoding="utf-8")
    (tmp_path / "params.f32").write_bytes(bytes(8))
    memory = NodeMemory(tmp_path, launcher="7:100", layout="l0", is_restart=True)
    assert memory.set_aside(tmp_path) == ("held-params.f32", "held-stamp.json")
    assert (tmp_path / "held-stamp.json").read_text(encoding="utf-8") == SAMPLES["memory_stamp"]
