import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from zeroband.elastic.recovery.state_chunks import Chunk, Section, StateManifest, chunk_hash, parse_manifest
from zeroband.errors import RecoveryFailed
from zeroband.state.slot import bytes_of

LENGTHS = {"params": 10, "momentum": 8}
PARAMS, MOMENTUM = Section(10, ("p0", "p1", "p2")), Section(8, ("m0", "m1"))
MANIFEST = StateManifest(
    round=3,
    state_digest="digest",
    record={"progress": {"b": 1, "a": [2.5, None]}},
    chunk_bytes=4,
    first=0,
    sections={"params": PARAMS, "momentum": MOMENTUM},
)


def altered(**changes: Any) -> bytes:
    return json.dumps(json.loads(MANIFEST.to_json()) | changes).encode()


def test_manifest_crosses_the_wire_unchanged() -> None:
    parsed = parse_manifest(MANIFEST.to_json(), LENGTHS)
    assert parsed == MANIFEST
    assert (parsed.claim, parsed.total_bytes) == (MANIFEST.claim, 18)


def test_claims_are_equal_whatever_the_order_and_kind_of_the_payloads_keys() -> None:
    one = replace(MANIFEST, record={"x": {1: 2, 10: 3}, "y": (1, 2)})
    other = replace(MANIFEST, record={"y": [1, 2], "x": {"10": 3, "1": 2}})
    assert one.claim == other.claim
    assert one.difference(other) == ""


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"round": 4}, "its round is 4, the lead's is 3"),
        ({"state_digest": "mine"}, "its state_digest is 'mine', the lead's is 'digest'"),
        ({"chunk_bytes": 5}, "its chunk_bytes is 5"),
        (
            {"sections": {"params": PARAMS, "momentum": Section(7, ("m0", "m1"))}},
            "its lengths is {'params': 10, 'momentum': 7}",
        ),
        (
            {"sections": {"params": Section(10, ("p0", "XX", "p2")), "momentum": MOMENTUM}},
            "its chunk 1 of params has hash XX",
        ),
        ({"record": {"progress": {}}}, "its record is {'progress': {}}"),
    ],
)
def test_difference_names_the_value_and_makes_another_claim(changes: dict[str, Any], difference: str) -> None:
    other = replace(MANIFEST, **changes)
    assert other.claim != MANIFEST.claim
    assert MANIFEST.difference(other).startswith(difference)


def test_stretch_lists_some_chunks_and_the_whole_is_the_same_in_all() -> None:
    later = replace(MANIFEST, first=2, sections={"params": Section(10, ("p2",)), "momentum": Section(8, ())})
    parsed = parse_manifest(later.to_json(), LENGTHS)
    assert (parsed, parsed.listed()) == (later, {Chunk("params", 2): "p2"})
    assert (parsed.whole, len(list(parsed.chunks()))) == (MANIFEST.whole, 5)
    assert MANIFEST.difference(later) == "its first is 2, the lead's is 0"


def test_chunks_cover_the_sections_and_the_last_one_is_cut() -> None:
    data = memoryview(bytes(range(10)))
    parts = [MANIFEST.part(chunk, data) for chunk in MANIFEST.chunks() if chunk.section == "params"]
    assert [len(part) for part in parts] == [4, 4, 2]
    assert b"".join(parts) == data
    assert [chunk for chunk in MANIFEST.chunks() if chunk.section == "momentum"] == [
        Chunk("momentum", 0),
        Chunk("momentum", 1),
    ]


def test_bytes_of_a_tensor_are_its_own_memory() -> None:
    tensor = torch.zeros(2)
    bytes_of(tensor)[4:] = torch.ones(1).numpy().tobytes()
    assert tensor.tolist() == [0.0, 1.0]


def test_hash_depends_on_every_bit() -> None:
    assert len({chunk_hash(bytes([1 << bit, 0])) for bit in range(8)} | {chunk_hash(b"\0\1"), chunk_hash(b"")}) == 10


HASHES = {"bytes": 10, "hashes": ["a", "b", "c"]}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "nonsense"),
        (b"null", "nonsense"),
        (b"[]", "nonsense"),
        (b"{}", "nonsense"),
        (b"\xff\xfe", "nonsense"),
        (b"[" * 100_000, "nonsense"),
        (b'{"round": ' + b"9" * 5000 + b"}", "nonsense"),
        (altered(round=-1), "round: .*greater than or equal to 0"),
        (altered(round=True), "round: .*valid integer"),
        (altered(round="3"), "round: .*valid integer"),
        (altered(state_digest=None), "state_digest: .*valid string"),
        (altered(state_digest="x" * 10_000), "state_digest: .*at most 120 characters"),
        (altered(record=[]), "record: .*object"),
        (altered(chunk_bytes=0), "chunk_bytes: .*greater than or equal to 1"),
        (altered(chunk_bytes=-4), "chunk_bytes: .*greater than or equal to 1"),
        (altered(chunk_bytes=1 << 40), "chunk_bytes: .*less than or equal to"),
        (altered(chunk_bytes=4.0), "chunk_bytes: .*valid integer"),
        (altered(sections=[]), "sections: .*object"),
        (altered(sections={"params": HASHES}), "this node needs"),
        (altered(sections={"params": HASHES, "momentum": {"bytes": 9, "hashes": ["a", "b", "c"]}}), "this node needs"),
        (altered(sections={"params": HASHES, "momentum": {"bytes": 8, "hashes": ["a"]}}), "lists 1 chunks of 'mom"),
        (
            altered(sections={"params": HASHES, "momentum": {"bytes": 8, "hashes": [1, 2]}}),
            "valid string",
        ),
        (altered(sections={"params": HASHES, "momentum": {"bytes": 8, "hashes": 2}}), "nonsense"),
        (altered(chunk_bytes=1), "lists 2 chunks of 'momentum' from 0, 8 bytes have 8"),
        (altered(first=None), "first: .*valid integer"),
        (MANIFEST.to_json().replace(b'"first"', b'"last"'), "first: Field required"),
        (altered(first=-1), "first: .*greater than or equal to 0"),
        (altered(first=1), "lists 2 chunks of 'momentum' from 1, 8 bytes have 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_manifest_that_does_not_fit_is_refused_in_few_words(data: bytes, why: str) -> None:
    with pytest.raises(RecoveryFailed, match=why) as e:
        parse_manifest(data, LENGTHS)
    assert len(str(e.value)) < 400


def test_sections_of_any_length_are_taken_where_none_is_given() -> None:
    assert parse_manifest(MANIFEST.to_json(), None) == MANIFEST
    endless = altered(sections={"result": {"bytes": 1 << 60, "hashes": []}})
    with pytest.raises(RecoveryFailed, match=r"sections\.result\.bytes: .*less than or equal to"):
        parse_manifest(endless, None)
