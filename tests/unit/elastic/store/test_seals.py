"""Seals: sealed records verify, and nothing else does."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from zeroband.elastic.membership.keys import NodeKey, RunKey
from zeroband.elastic.store.seals import Label, Record, Seals, id_of

OURS = Seals(RunKey(b"k" * 32), "run", "zeroband:{run}")
STRANGERS = {
    "another token": Seals(RunKey(b"x" * 32), "run", "zeroband:{run}"),
    "another run": Seals(RunKey(b"k" * 32), "run", "zeroband:{other}"),
    "no token": Seals(None, "run", "zeroband:{run}"),
}
NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=","), min_size=1, max_size=8)
LABELS = st.builds(
    Label,
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    NAMES,
    st.lists(NAMES.filter("-".__ne__), max_size=3).map(tuple),
)


@given(st.text(), LABELS)
def test_record_comes_back_with_its_label(text: str, label: Label) -> None:
    raw = OURS.seal(text, "vote", "a#1", label=label).encode()
    assert OURS.open(raw, "vote", "a#1") == Record(label, text) and id_of(raw) == label.id


@given(st.text(), st.data())
def test_changed_record_does_not_verify(text: str, data: st.DataObject) -> None:
    raw = bytearray(OURS.seal(text, "vote").encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    assert OURS.open(bytes(raw), "vote") is None
    assert OURS.open(bytes(raw[:at]), "vote") is None


@given(st.binary(max_size=200))
def test_other_bytes_are_no_record(raw: bytes) -> None:
    assert OURS.open(raw, "vote") is None and isinstance(id_of(raw), str)


@pytest.mark.parametrize(
    "rest", ["", "1", "1 2 id -", "one 2 id - text", "1 two id - text", "1" * 5000 + " 2 id - text"]
)
def test_sealed_text_without_a_header_is_no_record(rest: str) -> None:
    """Without a token anyone can seal."""
    key = HKDF(hashes.SHA256(), 32, salt=None, info=b"zeroband store records").derive(b"k" * 32)
    digits = len(OURS.seal("", "vote").split(" ")[0])
    mac = hmac.new(key, "\0".join(("zeroband:{run}", "vote", rest)).encode(), hashlib.sha256).hexdigest()[:digits]
    assert OURS.open(f"{mac} {rest}".encode(), "vote") is None
    assert OURS.open(OURS.seal("text", "vote").encode(), "vote") == Record(Label(), "text")


def test_record_verifies_only_for_its_scope() -> None:
    raw = OURS.seal("d", "vote", "5-abc", "a#1").encode()
    for scope in (("vote", "5-abc", "b#1"), ("vote", "6-abc", "a#1"), ("ready", "5-abc", "a#1"), ("vote", "5-abc")):
        assert OURS.open(raw, *scope) is None


def test_record_with_another_key_does_not_verify() -> None:
    for who, stranger in STRANGERS.items():
        assert OURS.open(stranger.seal("d", "vote").encode(), "vote") is None, who
        assert stranger.token_check != OURS.token_check, who


def test_run_without_a_token_seals_too() -> None:
    raw = STRANGERS["no token"].seal("d", "vote").encode()
    assert Seals(RunKey.of(None, "run"), "run", "zeroband:{run}").open(raw, "vote") == Record(Label(), "d")


# -- what a node says for itself ---------------------------------------------------------------------------------------

NODE, OTHER = NodeKey(b"a" * 32), NodeKey(b"b" * 32)
MEMBER = NODE.new_member_id("a")
SIGNING, POSING = (Seals(RunKey(b"k" * 32, key), "run", "zeroband:{run}") for key in (NODE, OTHER))


@given(st.text(), LABELS)
def test_signed_record_verifies_for_all_nodes(text: str, label: Label) -> None:
    raw = SIGNING.seal(text, "vote", label=label, by=MEMBER).encode()
    assert raw == SIGNING.seal(text, "vote", label=label, by=MEMBER).encode()
    for reader in (SIGNING, POSING, OURS):
        assert reader.open(raw, "vote", by=MEMBER) == Record(label, text)


def test_record_signed_by_another_node_does_not_verify() -> None:
    """Its MAC is valid, by the run's token."""
    forged = POSING.seal("d", "vote", by=MEMBER).encode()
    replayed = SIGNING.seal("d", "ready", by=MEMBER).split(" ", 5)[-1]
    moved = POSING.seal(replayed, "vote").encode()  # signed as something else
    relabelled = POSING.seal(replayed, "ready", label=Label(7)).encode()  # signed for another round
    for raw, scope in ((forged, "vote"), (moved, "vote"), (relabelled, "ready")):
        for reader in (OURS, POSING):
            record = reader.open(raw, scope, by=MEMBER)
            assert record is not None and not record.is_signed
    for text in ("d", "", "not base64 d"):
        record = OURS.open(POSING.seal(text, "vote").encode(), "vote", by=MEMBER)
        assert record is None or not record.is_signed


def test_own_signature_is_not_verified_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seals, others = (Seals(RunKey(b"k" * 32, NODE), "run", "zeroband:{run}") for _ in range(2))
    raw = seals.seal("d", "vote", "5-abc", by=MEMBER).encode()
    monkeypatch.setattr("zeroband.elastic.membership.keys.is_signed", lambda *_: False)
    assert seals.open(raw, "vote", "5-abc", by=MEMBER) == Record(Label(), "d")
    assert others.open(raw, "vote", "5-abc", by=MEMBER) == Record(Label(), "d", is_signed=False)
    for scope in (("vote", "6-abc"), ("ready", "5-abc"), ("vote",)):
        assert seals.open(raw, *scope, by=MEMBER) is None
    for number in range(100):
        seals.seal("d", "vote", str(number), by=MEMBER)
    assert seals.open(raw, "vote", "5-abc", by=MEMBER) == Record(Label(), "d", is_signed=False)


def test_name_without_a_key_is_accepted_by_tools_only() -> None:
    raw = OURS.seal("d", "vote", by="a#1").encode()
    assert OURS.open(raw, "vote", by="a#1") == Record(Label(), "d")
    record = SIGNING.open(raw, "vote", by="a#1")
    assert record is not None and not record.is_signed
