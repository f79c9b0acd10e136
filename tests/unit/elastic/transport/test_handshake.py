"""The handshake as bytes: who gets keys, and who gets nothing."""

from __future__ import annotations

import contextlib
import hmac
import json
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroband.elastic.membership.keys import NodeKey
from zeroband.elastic.transport.handshake import (
    ANSWER_BYTES,
    DATA_CALL,
    HELLO_BYTES,
    MAC_BYTES,
    NO_KEYS,
    PROOF_BYTES,
    Callee,
    Caller,
    Introduction,
    Purpose,
    RunKey,
    StreamKeys,
    new_session,
)
from zeroband.errors import HandshakeFailed, PosesAsAnother

CALLER, CALLEE, THIRD = (NodeKey(bytes([at] * 32)) for at in range(3))
KEY, THEIR_KEY = RunKey(b"k" * 32, CALLER), RunKey(b"k" * 32, CALLEE)
OTHER_KEY = RunKey(b"o" * 32, CALLEE)
A, B = CALLER.new_member_id("node-a"), CALLEE.new_member_id("node-b")
INTRODUCTION = Introduction(A, B, "0123456789abcdef", is_sealed=True)
BODY_BYTES = HELLO_BYTES - MAC_BYTES
PUBLIC = bytes(range(32))
NAMES = st.text('aZ0#-. "\\\0\n{}[]ä€😀', max_size=20)
quickly = settings(deadline=None)


def changed(data: bytes, at: int, change: int) -> bytes:
    return data[:at] + bytes([data[at] ^ change]) + data[at + 1 :]


def hello_with(body: bytes, key: RunKey = KEY) -> bytes:
    """A call by somebody who knows the token and sends what it likes."""
    body = body.ljust(BODY_BYTES, b"\0")[:BODY_BYTES]
    return body + hmac.digest(key.secret, body, "sha256")


def hello_that_says(record: Any) -> bytes:
    said = json.dumps(record).encode()
    return hello_with(DATA_CALL + PUBLIC + len(said).to_bytes(2, "big") + said)


def test_both_ends_agree_on_keys_of_each_direction() -> None:
    caller = Caller(KEY, INTRODUCTION)
    callee = Callee(THEIR_KEY, caller.hello)
    proof, callers = caller.take(callee.answer)
    callees = callee.take(proof)
    assert (callers.seal, callers.open) == (callees.open, callees.seal)
    assert callers.seal != callers.open
    assert [len(key or b"") for key in (callers.seal, callers.open)] == [32, 32]
    assert callee.introduction == INTRODUCTION


def test_messages_have_the_sizes_that_are_read() -> None:
    caller = Caller(KEY, INTRODUCTION)
    callee = Callee(THEIR_KEY, caller.hello)
    assert (len(caller.hello), len(callee.answer)) == (HELLO_BYTES, ANSWER_BYTES)
    assert len(caller.take(callee.answer)[0]) == PROOF_BYTES
    assert caller.hello.startswith(DATA_CALL)


def test_connection_that_is_not_sealed_has_no_keys() -> None:
    caller = Caller(KEY, replace(INTRODUCTION, is_sealed=False))
    callee = Callee(THEIR_KEY, caller.hello)
    proof, keys = caller.take(callee.answer)
    assert (keys, callee.take(proof)) == (NO_KEYS, NO_KEYS)
    assert callee.introduction.is_sealed is False


def test_no_two_connections_have_the_same_keys() -> None:
    """Even with the same names."""
    seen = set[bytes | None]()
    for _ in range(4):
        caller = Caller(KEY, INTRODUCTION)
        _, keys = caller.take(Callee(THEIR_KEY, caller.hello).answer)
        seen |= {keys.seal, keys.open}
    assert len(seen) == 8
    assert len({new_session() for _ in range(100)}) == 100


def test_keys_follow_from_token_and_run() -> None:
    keys = [RunKey.of(token, run_id) for token, run_id in (("t", "a"), ("u", "a"), ("t", "b"), (None, "a"))]
    assert keys[0] == RunKey.of("t", "a")
    assert len({key.secret for key in keys}) == 4
    assert {len(key.secret) for key in keys} == {32}
    assert RunKey.of(None, "a") == RunKey.of("", "a")


@pytest.mark.parametrize("theirs", [RunKey.of("another token", "run"), RunKey.of("token", "another run")])
def test_caller_of_another_token_or_run_is_refused_before_it_is_answered(theirs: RunKey) -> None:
    with pytest.raises(HandshakeFailed, match="the caller does not know the run's token, or is not of this run"):
        Callee(RunKey.of("token", "run"), Caller(theirs, INTRODUCTION).hello)


def test_callee_that_does_not_know_the_token_is_refused_by_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the call without looking, and cannot know what to answer."""
    caller = Caller(KEY, INTRODUCTION)
    with monkeypatch.context() as blind:
        blind.setattr(hmac, "compare_digest", lambda a, b: True)
        impostor = Callee(OTHER_KEY, caller.hello)
    with pytest.raises(HandshakeFailed, match="the other end does not know the run's token"):
        caller.take(impostor.answer)


def test_token_and_a_record_of_the_messages_do_not_give_the_keys() -> None:
    """Who learns the token later cannot open what was recorded before."""
    caller, reader = Caller(KEY, INTRODUCTION), Caller(KEY, INTRODUCTION)
    answer = Callee(THEIR_KEY, caller.hello).answer
    reader.hello = caller.hello
    with pytest.raises(HandshakeFailed):
        reader.take(answer)
    assert caller.take(answer)


def test_recorded_messages_token_and_both_nodes_own_keys_do_not_give_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the two made for this exchange, and forgot, would: who steals all that lasts opens nothing older."""
    made: list[X25519PrivateKey] = []
    generate = X25519PrivateKey.generate

    def remember() -> X25519PrivateKey:
        made.append(generate())
        return made[-1]

    monkeypatch.setattr(X25519PrivateKey, "generate", remember)
    caller = Caller(KEY, INTRODUCTION)
    callee = Callee(THEIR_KEY, caller.hello)
    _, keys = caller.take(callee.answer)

    def derived(private: X25519PrivateKey) -> StreamKeys | None:
        """The keys as somebody derives them who has the record, the token, both own keys, and this."""
        monkeypatch.setattr(X25519PrivateKey, "generate", lambda: private)
        thief = Caller(KEY, INTRODUCTION)
        thief.hello = caller.hello
        with contextlib.suppress(HandshakeFailed):
            return thief.take(callee.answer)[1]
        return None

    assert derived(made[0]) == keys
    assert derived(generate()) is None
    assert len(made) == 2 and made[0].private_bytes_raw() != made[1].private_bytes_raw()


# -- who it is ---------------------------------------------------------------------------------------------------------


def test_caller_that_poses_as_another_member_is_refused() -> None:
    """It knows the token, and not the key that the member's id carries."""
    caller = Caller(RunKey(KEY.secret, THIRD), INTRODUCTION)
    callee = Callee(THEIR_KEY, caller.hello)
    proof, _ = caller.take(callee.answer)
    with pytest.raises(PosesAsAnother, match="it says that it is node-a#") as refused:
        callee.take(proof)
    assert refused.value.member_id == A


def test_callee_that_poses_as_another_member_is_refused() -> None:
    caller = Caller(KEY, INTRODUCTION)
    with pytest.raises(PosesAsAnother, match="it says that it is node-b#"):
        caller.take(Callee(RunKey(KEY.secret, THIRD), caller.hello).answer)


@pytest.mark.parametrize("name", ["node-a", "node-a#1", f"{A}=", A[:-1], f"node-a#{'A' * 42}B"], ids=range(5))
def test_name_that_carries_no_key_proves_nothing(name: str) -> None:
    caller = Caller(KEY, replace(INTRODUCTION, caller=name))
    callee = Callee(THEIR_KEY, caller.hello)
    proof, _ = caller.take(callee.answer)
    with pytest.raises(PosesAsAnother):
        callee.take(proof)


def test_node_without_a_key_of_its_own_gets_nothing_of_one_that_has() -> None:
    caller = Caller(RunKey(KEY.secret), replace(INTRODUCTION, caller="node-a#1"))
    callee = Callee(THEIR_KEY, caller.hello)
    proof, _ = caller.take(callee.answer)
    with pytest.raises(PosesAsAnother):
        callee.take(proof)


def test_signature_of_one_end_or_of_another_exchange_is_none_of_this_one() -> None:
    own = Introduction(A, A, "session", is_sealed=True)
    caller, other = Caller(KEY, own), Caller(KEY, own)
    callee, another = Callee(KEY, caller.hello), Callee(KEY, other.hello)
    proof, (wrong, _) = caller.take(callee.answer)[0], other.take(another.answer)
    for signature in (callee.answer[-64:], wrong[-64:]):
        with pytest.raises(PosesAsAnother):
            callee.take(proof[:-64] + signature)
    assert callee.take(proof)


@quickly
@given(st.binary(max_size=2 * HELLO_BYTES))
def test_garbage_is_no_call(data: bytes) -> None:
    with pytest.raises(HandshakeFailed):
        Callee(THEIR_KEY, data)


@pytest.mark.parametrize("size", [0, 4, HELLO_BYTES - 1, HELLO_BYTES + 1])
def test_call_of_another_size_is_refused(size: int) -> None:
    hello = (Caller(KEY, INTRODUCTION).hello + b"\0")[:size]
    with pytest.raises(HandshakeFailed, match="not a call to the data plane"):
        Callee(THEIR_KEY, hello)


@quickly
@given(st.binary(min_size=BODY_BYTES - len(DATA_CALL), max_size=BODY_BYTES - len(DATA_CALL)), st.integers(0, 450))
def test_garbage_of_somebody_who_knows_the_token_is_refused(data: bytes, size: int) -> None:
    """And raises nothing else."""
    body = DATA_CALL + data[:32] + size.to_bytes(2, "big") + data[34:]
    with pytest.raises(HandshakeFailed):
        Callee(THEIR_KEY, hello_with(body))


@quickly
@given(at=st.integers(0, HELLO_BYTES - 1), change=st.integers(1, 255))
def test_call_that_was_changed_on_the_way_is_refused(at: int, change: int) -> None:
    with pytest.raises(HandshakeFailed):
        Callee(THEIR_KEY, changed(Caller(KEY, INTRODUCTION).hello, at, change))


@quickly
@given(at=st.integers(0, ANSWER_BYTES - 1), change=st.integers(1, 255))
def test_answer_that_was_changed_on_the_way_is_refused(at: int, change: int) -> None:
    caller = Caller(KEY, INTRODUCTION)
    with pytest.raises(HandshakeFailed):
        caller.take(changed(Callee(THEIR_KEY, caller.hello).answer, at, change))


@quickly
@given(at=st.integers(0, PROOF_BYTES - 1), change=st.integers(1, 255))
def test_proof_that_was_changed_on_the_way_is_refused(at: int, change: int) -> None:
    caller = Caller(KEY, INTRODUCTION)
    callee = Callee(THEIR_KEY, caller.hello)
    proof, _ = caller.take(callee.answer)
    with pytest.raises(HandshakeFailed):
        callee.take(changed(proof, at, change))


@pytest.mark.parametrize("size", [0, 31, 32, ANSWER_BYTES - 1, ANSWER_BYTES + 1])
def test_answer_of_another_size_is_refused(size: int) -> None:
    caller = Caller(KEY, INTRODUCTION)
    answer = (Callee(THEIR_KEY, caller.hello).answer + b"\0")[:size]
    with pytest.raises(HandshakeFailed):
        caller.take(answer)


def test_call_that_is_repeated_leads_nowhere() -> None:
    """Whoever recorded a whole exchange can have the call answered again, and no more than that."""
    caller = Caller(KEY, INTRODUCTION)
    first = Callee(THEIR_KEY, caller.hello)
    proof, keys = caller.take(first.answer)
    again = Callee(THEIR_KEY, caller.hello)
    assert again.answer != first.answer
    with pytest.raises(HandshakeFailed, match="a call was repeated by somebody who did not make it"):
        again.take(proof)
    assert keys == caller.take(first.answer)[1]


def test_proof_of_one_end_is_none_of_the_other() -> None:
    caller = Caller(KEY, INTRODUCTION)
    callee = Callee(THEIR_KEY, caller.hello)
    with pytest.raises(HandshakeFailed):
        callee.take(callee.answer[32:])


def test_answer_to_another_call_is_refused() -> None:
    caller, other = Caller(KEY, INTRODUCTION), Caller(KEY, INTRODUCTION)
    with pytest.raises(HandshakeFailed):
        caller.take(Callee(THEIR_KEY, other.hello).answer)


@pytest.mark.parametrize("public", [b"\0" * 32, b"\1" + b"\0" * 31], ids=["zero", "one"])
def test_public_key_that_makes_the_secret_known_is_refused(public: bytes) -> None:
    """With it anybody who sees the exchange would know what the two agreed on."""
    caller = Caller(KEY, INTRODUCTION)
    body = caller.hello[:4] + public + caller.hello[36:BODY_BYTES]
    with pytest.raises(HandshakeFailed, match="not a public key"):
        Callee(THEIR_KEY, hello_with(body))
    with pytest.raises(HandshakeFailed, match="not a public key"):
        caller.take(public + b"\0" * (ANSWER_BYTES - 32))


INTRODUCED = {"caller": "a", "callee": "b", "session": "c", "sealed": True, "purpose": "data"}


@pytest.mark.parametrize(
    "record",
    [
        *(None, 7, "a", [], ["caller", "callee"], {}),
        *({name: value for name, value in INTRODUCED.items() if name != left_out} for left_out in INTRODUCED),
        *(INTRODUCED | {"purpose": purpose} for purpose in ("", "telnet", None, ["data"])),
    ],
    ids=str,
)
def test_call_without_an_introduction_is_refused(record: Any) -> None:
    with pytest.raises(HandshakeFailed, match="no introduction in the call"):
        Callee(THEIR_KEY, hello_that_says(record))


@pytest.mark.parametrize("sealed", [1, "yes", None, [True]], ids=str)
def test_only_true_is_sealed(sealed: Any) -> None:
    callee = Callee(THEIR_KEY, hello_that_says(INTRODUCED | {"sealed": sealed}))
    assert callee.introduction == Introduction("a", "b", "c", is_sealed=False)


@pytest.mark.parametrize("too_long", ["caller", "callee", "session"])
def test_names_that_do_not_fit_are_refused(too_long: str) -> None:
    with pytest.raises(HandshakeFailed, match="are too long"):
        Caller(KEY, replace(INTRODUCTION, **{too_long: "x" * 400}))


def test_longest_names_that_fit_come_over() -> None:
    length = 1
    while True:
        introduction = replace(INTRODUCTION, caller="ä" * length)
        try:
            hello = Caller(KEY, introduction).hello
        except HandshakeFailed:
            break
        assert Callee(THEIR_KEY, hello).introduction == introduction
        length += 1
    assert length > 20


def test_longest_names_of_a_run_fit() -> None:
    """To a relay a caller names three members."""
    longest = CALLER.new_member_id("n" * 64)
    assert Caller(KEY, Introduction(longest, longest, longest, False, Purpose.ANSWER)).hello


@given(NAMES, NAMES)
def test_any_names_come_over(caller: str, callee: str) -> None:
    introduction = Introduction(caller, callee, new_session(), is_sealed=True)
    assert Callee(THEIR_KEY, Caller(KEY, introduction).hello).introduction == introduction
