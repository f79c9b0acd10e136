"""Every kind of message, right and wrong, at the ports of a run of three nodes that trains meanwhile.

From those who know nothing: random bytes, halves of calls, changed calls, calls that others made before, connections
that stay silent or speak a byte at a time. From those who know the token: calls with wrong contents, handshakes that
stop, and behind a handshake for each purpose that there is: words of its protocol, changed at random, sealed and not.
The run must commit rounds all the time, lose no node, keep one digest and an exact ledger, leave no traceback, and
close what was opened at it. Each kind must have been sent, else the run proves nothing. Linux.

    python bench/fuzz_port.py --minutes 3 --seed 1 [--stores nodes]

With --stores nodes the three hold the stores of the run, and their ports are called for those as well.

Exit codes: 0 all of that held, 1 something did not.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import random
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from zeroband.config.store_url import NODES as NODES_URL
from zeroband.config.store_url import address_of_nodes
from zeroband.elastic.membership.keys import NodeKey
from zeroband.elastic.membership.records import RoundPlan, View
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.elastic.transport.handshake import (
    ANSWER_BYTES,
    DATA_CALL,
    HELLO_BYTES,
    MAC_BYTES,
    PROOF_BYTES,
    STORE,
    Caller,
    Introduction,
    Purpose,
    RunKey,
    StreamKeys,
    new_session,
)
from zeroband.errors import HandshakeFailed
from zeroband.tools.cluster import LocalCluster
from zeroband.tools.data.audit import audit, read_rounds

NODES, DETECT_S, TOKEN = 3, 3.0, "sesame"
CALLERS = 4
HELD = 50
"""Connections that each caller leaves open; the oldest is closed for another one."""
IMPERSONATES_EVERY_S = 4.0
"""Whoever knows the token can take the place of a link, which costs a round another try."""
LONGEST_GAP_S = 60.0
QUIET_S = 120.0
"""Within so long after the last call a node must have closed everything: an idle request lives for 30 s."""
SPARE = 8
"""Descriptors and threads that a process may have more than before by itself."""
TIMEOUT_S = 5.0
DEADLINE_S = 180.0

TINY = (
    *("--model.d-model", "32", "--model.n-layers", "1", "--model.n-heads", "2", "--model.d-ff", "64"),
    *("--data.seq-length", "32", "--data.hold-out", "0", "--data.source.type", "synthetic"),
    *("--data.source.documents", "200", "--train.total-steps", "1000000", "--train.dtype", "float32"),
    *("--train.threads", "1", "--train.batch-size", "4", "--train.micro-bs", "4"),
    *("--outer.type", "diloco", "--outer.inner-steps", "10", "--comm.backend", "native"),
    *("--fault.detect-s", str(DETECT_S), "--fault.inject", "inner@+0=TAKES0.05"),
)
FRAME = struct.Struct("<IBBHQQIIIII4x")
"""Magic, kind, codec, lane, run, plan, epoch, round, shard, chunk, bytes of payload (kernels/csrc/frame.h)."""
MAGIC = 0x31425A01
TROUBLE = ("Traceback", "Task exception", "the guardian ended", "Segmentation", "malloc", "AddressSanitizer")
"""What no node may print."""


# -- whom it is said to -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A member of the run, and the run as it stands in the store now."""

    member: str
    address: tuple[str, int]
    others: tuple[str, ...]
    key: RunKey
    run_id: str
    plan: RoundPlan | None


def targets_of(view: View, key: RunKey, run_id: str) -> list[Target]:
    """The living members, each as somebody to be called."""
    alive = sorted(view.alive & view.peers.keys())
    return [
        Target(m, (view.peers[m].host, view.peers[m].port), tuple(o for o in alive if o != m), key, run_id, view.plan)
        for m in alive
    ]


class Call:
    """One connection to a node, and what is needed to say something over it."""

    def __init__(self, target: Target, chance: random.Random) -> None:
        self.target, self.chance = target, chance
        self.socket = socket.create_connection(target.address, timeout=TIMEOUT_S)
        self._numbers = 0
        """Of what was sealed so far."""

    def say(self, data: bytes) -> None:
        """Send this; the other end may hang up on it at any byte."""
        with suppress(OSError):
            self.socket.sendall(data)

    def hello(self, purpose: Purpose = Purpose.STATE, *, caller: str | None = None, **changes: str | bool) -> Caller:
        """An honest call, if `caller` is None; else one in the name of that member."""
        own = self.target.key.node
        caller = caller or ("stranger#0" if own is None else own.name("stranger"))
        callee = STORE if purpose == Purpose.STORE else self.target.member
        names = {"caller": caller, "callee": callee, "session": new_session(), "is_sealed": True, **changes}
        key = names.pop("key", self.target.key)
        if purpose == Purpose.STORE:  # there the token alone admits, before a node has a name
            names, key = names | {"caller": "", "session": ""}, replace(self.target.key, node=None)
        return Caller(key, Introduction(**names, purpose=purpose))  # type: ignore[arg-type]

    def answer(self) -> bytes:
        """What the other end says to a call. Raises OSError, EOFError."""
        data = b""
        while len(data) < ANSWER_BYTES:
            part = self.socket.recv(ANSWER_BYTES - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def shake_hands(self, purpose: Purpose, **who: str) -> StreamKeys:
        """Become somebody of the run. Raises OSError, EOFError, HandshakeFailed."""
        caller = self.hello(purpose, **who)
        self.socket.sendall(caller.hello)
        proof, keys = caller.take(self.answer())
        self.socket.sendall(proof)
        return keys

    def forged(self, introduction: bytes, public: bytes | None = None) -> bytes:
        """A call with this introduction, whatever it is, by somebody who knows the token."""
        body = DATA_CALL + (public or self.chance.randbytes(32)) + (len(introduction) & 0xFFFF).to_bytes(2, "big")
        body = (body + introduction)[: HELLO_BYTES - MAC_BYTES].ljust(HELLO_BYTES - MAC_BYTES, b"\0")
        return body + hmac.digest(self.target.key.secret, body, "sha256")

    def record(self, keys: StreamKeys, data: bytes) -> bytes:
        """A sealed record, as requests for a state travel in."""
        assert keys.seal is not None
        length = (len(data) + 16).to_bytes(4, "big")
        self._numbers += 1
        return length + AESGCM(keys.seal).encrypt(self._numbers.to_bytes(12, "big"), data, length)

    def frame(self, keys: StreamKeys, header: bytes, payload: bytes) -> bytes:
        """A sealed frame of the data plane."""
        assert keys.seal is not None
        cipher, first = AESGCM(keys.seal), self._numbers
        self._numbers += 2
        tag, sealed = (
            cipher.encrypt((first + i).to_bytes(12, "big"), part, header) for i, part in enumerate((b"", payload))
        )
        return header + tag + sealed


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The same with some bytes changed, cut out, doubled or put in."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(5):
            case 0:
                changed[at : at + 1] = chance.randbytes(1)
            case 1:
                del changed[at : at + chance.randrange(1, 9)]
            case 2:
                changed[at:at] = chance.randbytes(chance.randrange(1, 9))
            case 3:
                changed[at:at] = changed[at : at + chance.randrange(1, 40)]
            case _:
                del changed[at:]
    return bytes(changed)


# -- what strangers say -----------------------------------------------------------------------------------------------


def say_noise(call: Call) -> None:
    call.say(call.chance.randbytes(call.chance.randrange(1, 2000)))


def say_known_word(call: Call) -> None:
    """Begin as a node does, or as other protocols do, and go on with noise."""
    words = (DATA_CALL, b"zbp1", b"GET / HTTP/1.1\r\n\r\n", b"*1\r\n$4\r\nPING\r\n", b"\x16\x03\x01\x02\x00", b"zbd9")
    call.say(call.chance.choice(words) + call.chance.randbytes(call.chance.randrange(600)))


def say_half_a_call(call: Call) -> None:
    call.say(call.hello().hello[: call.chance.randrange(1, HELLO_BYTES)])


def say_changed_call(call: Call) -> None:
    call.say(mutated(call.hello().hello, call.chance))


def call_with_another_token(call: Call) -> None:
    call.say(call.hello(key=RunKey(call.chance.randbytes(32))).hello)  # type: ignore[arg-type]


def repeat_a_call(call: Call, *, recorded: deque[tuple[Target, bytes, bytes]], with_proof: bool) -> None:
    """Say what somebody of the run said before, on another connection."""
    made = [(hello, proof) for target, hello, proof in list(recorded) if target.member == call.target.member]
    if not made:
        raise EOFError
    hello, proof = call.chance.choice(made)
    call.say(hello)
    if with_proof:
        with suppress(OSError, EOFError):  # a node may hang up on a call that it knows
            call.answer()
        call.say(proof)


def record_a_call(call: Call, *, recorded: deque[tuple[Target, bytes, bytes]]) -> None:
    """Make an honest one, which others repeat; what it asks for is never said."""
    caller = call.hello()
    call.say(caller.hello)
    proof, _ = caller.take(call.answer())
    call.say(proof)
    recorded.append((call.target, caller.hello, proof))


def say_nothing(call: Call) -> None:
    """Take up room."""


def dribble(call: Call) -> None:
    """A byte at a time, never all of it."""
    hello = call.hello().hello
    for at in range(call.chance.randrange(1, 12)):
        call.say(hello[at : at + 1])
        time.sleep(0.02)


# -- what somebody says who knows the token and lies ------------------------------------------------------------------


def stop_before_the_proof(call: Call) -> None:
    call.say(call.hello().hello)
    call.answer()


def give_a_wrong_proof(call: Call) -> None:
    call.say(call.hello().hello)
    call.answer()
    call.say(call.chance.randbytes(call.chance.choice((1, PROOF_BYTES - 1, PROOF_BYTES, 3 * PROOF_BYTES))))


def call_somebody_else(call: Call) -> None:
    call.say(call.hello(callee=call.chance.choice(("", "nobody#1", "\0" * 40, "é" * 30))).hello)


def call_in_the_clear(call: Call) -> None:
    call.say(call.hello(is_sealed=False).hello)


def introduce_nonsense(call: Call) -> None:
    """Introductions that are none: no JSON, other shapes, other types, deep nests, purposes that do not exist."""
    honest = {"caller": "a", "callee": call.target.member, "session": "", "sealed": True, "purpose": "state"}
    odd = call.chance.choice((None, 1, -1e308, [], [[]], {}, True, "x" * 200, "\ud800", float("nan"), "PROBE"))
    choices = (
        json.dumps({**honest, call.chance.choice(list(honest)): odd}).encode(),
        json.dumps({key: value for key, value in honest.items() if key != call.chance.choice(list(honest))}).encode(),
        json.dumps([honest]).encode(),
        b"[" * 440,
        b'{"caller":' * 44,
        b"\xff" * 100,
        b"",
        mutated(json.dumps(honest).encode(), call.chance),
    )
    call.say(call.forged(call.chance.choice(choices)))


def use_a_weak_key(call: Call) -> None:
    """Public keys of low order, with which no secret is agreed on."""
    public = call.chance.choice((b"\0" * 32, b"\1" + b"\0" * 31, b"\xff" * 32, b"\xec" + b"\xff" * 30 + b"\x7f"))
    record = {"caller": "a", "callee": call.target.member, "session": "", "sealed": True, "purpose": "data"}
    call.say(call.forged(json.dumps(record).encode(), public))


# -- what somebody says behind a handshake ----------------------------------------------------------------------------


def request_words(chance: random.Random) -> bytes:
    """A request for state or journal, or nearly one."""
    paths = (
        "/state",
        "/state/1",
        "/state/-1",
        "/state/1/outer/0",
        "/journal/1",
        "/journal/999999999999999999999",
        "//",
    )
    path = chance.choice(
        (*paths, "/../../etc/passwd", "/" + "a" * 9000, "/state/1/" + "%00" * 9, "/journal/1/update/0")
    )
    method = chance.choice(("GET", "GET", "GET", "POST", "HEAD", "PUT", "", "G" * 300))
    headers = chance.choice(
        ("", "Content-Length: -1\r\n", "Content-Length: 1" + "0" * 30 + "\r\n", "a: b\r\n" * 200, ":\r\n")
    )
    words = f"{method} {path} HTTP/{chance.choice(('1.1', '1.0', '9.9', '', '2'))}\r\n{headers}\r\n".encode()
    return words * chance.choice((1, 1, 1, 5))


def frame_words(target: Target, chance: random.Random) -> tuple[bytes, bytes]:
    """Header and payload of a frame that may belong to the transfer that runs now, or nearly does."""
    plan, wild = target.plan, chance.randrange(1 << 32)
    run = int.from_bytes(hashlib.sha256(target.run_id.encode()).digest()[:8], "big")
    number = 0 if plan is None else plan.version << 16 | int(plan.id.rpartition("-")[2], 16) & 0xFFFF
    payload = chance.randbytes(chance.choice((1, 256, 4096)))
    fields = [
        *(MAGIC, chance.choice((1, 2, 3)), chance.choice((0, 1, 2, 3, 255)), 0),
        *(run, number, 0 if plan is None else plan.epoch, 0 if plan is None else plan.round),
        *(chance.randrange(NODES), chance.randrange(4), len(payload)),
    ]
    for _ in range(chance.choice((0, 0, 1, 3))):
        at = chance.randrange(len(fields))
        size = struct.calcsize("<" + FRAME.format[1 + at])
        fields[at] = chance.choice((0, 1, 2, wild, (1 << 8 * size) - 1, fields[at] + 1)) % (1 << 8 * size)
    return FRAME.pack(*fields), payload


def command_words(chance: random.Random) -> bytes:
    """A command for a store, of those that members may give and of others, whole or not."""
    words = (b"GET", b"SET", b"EVALSHA", b"XREAD", b"CONFIG", b"SHUTDOWN", b"MODULE", chance.randbytes(3))
    said = [chance.choice(words), *(chance.randbytes(chance.randrange(100)) for _ in range(chance.randrange(4)))]
    command = b"*%d\r\n" % len(said) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in said)
    return command if chance.random() < 0.7 else command[: chance.randrange(1, len(command))]


def words_of(call: Call, purpose: Purpose, keys: StreamKeys) -> bytes:
    """Some of what is said on a connection for this purpose, right or nearly right, as it travels."""
    chance = call.chance
    if purpose == Purpose.DATA:
        return b"".join(call.frame(keys, *frame_words(call.target, chance)) for _ in range(chance.randrange(1, 6)))
    if purpose == Purpose.STATE:
        return b"".join(call.record(keys, request_words(chance)) for _ in range(chance.randrange(1, 4)))
    if purpose == Purpose.STORE:
        return b"".join(call.record(keys, command_words(chance)) for _ in range(chance.randrange(1, 6)))
    size = chance.choice((1, 7, 8, 16, 64, 1000, 1 << 16, 1 << 20))  # bursts and probes are bytes without a meaning
    return chance.randbytes(size) if chance.random() < 0.7 else call.record(keys, chance.randbytes(min(size, 1 << 16)))


def speak(call: Call, *, purpose: Purpose) -> None:
    """Say words of the purpose's own protocol, and wait for a part of the answer."""
    keys = call.shake_hands(purpose)
    call.say(words_of(call, purpose, keys))
    call.socket.settimeout(0.05)
    with suppress(OSError):
        call.socket.recv(1 << 16)


def speak_as_a_member(call: Call, *, purpose: Purpose) -> None:
    """Do it in the name of another node, so that it counts as that one's link."""
    if not call.target.others:
        raise EOFError
    keys = call.shake_hands(purpose, caller=call.chance.choice(call.target.others))
    call.say(words_of(call, purpose, keys))


def speak_damaged(call: Call, *, purpose: Purpose) -> None:
    """Say words that were changed after they were sealed."""
    keys = call.shake_hands(purpose)
    call.say(mutated(words_of(call, purpose, keys), call.chance))


def speak_noise(call: Call, *, purpose: Purpose) -> None:
    """Say what nobody sealed."""
    call.shake_hands(purpose)
    call.say(call.chance.randbytes(call.chance.randrange(1, 5000)))


def stay_silent(call: Call, *, purpose: Purpose) -> None:
    call.shake_hands(purpose)


def leave_at_once(call: Call, *, purpose: Purpose) -> None:
    call.shake_hands(purpose)
    call.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    call.socket.close()


Kind = Callable[[Call], object]


GUARDED = tuple(purpose for purpose in Purpose if purpose != Purpose.STORE)
"""What the port of a node that holds no store is called for."""


def kinds(purposes: Sequence[Purpose] = GUARDED) -> dict[str, Kind]:
    """All that is said at ports, by name; behind a handshake for each of these purposes."""
    recorded: deque[tuple[Target, bytes, bytes]] = deque(maxlen=50)
    plain = (
        *(say_noise, say_known_word, say_half_a_call, say_changed_call, call_with_another_token, say_nothing, dribble),
        *(stop_before_the_proof, give_a_wrong_proof, call_somebody_else, call_in_the_clear, introduce_nonsense),
        use_a_weak_key,
    )
    found: dict[str, Kind] = {kind.__name__: kind for kind in plain}
    found["record_a_call"] = partial(record_a_call, recorded=recorded)
    found["repeat_a_call"] = partial(repeat_a_call, recorded=recorded, with_proof=False)
    found["repeat_a_call_and_its_proof"] = partial(repeat_a_call, recorded=recorded, with_proof=True)
    for purpose in purposes:
        for kind in (speak, speak_as_a_member, speak_damaged, speak_noise, stay_silent, leave_at_once):
            found[f"{purpose.value}: {kind.__name__}"] = partial(kind, purpose=purpose)
    return found


# -- saying it --------------------------------------------------------------------------------------------------------


@dataclass
class Fuzz:
    """Callers in threads, which say everything in turn to all targets until `stop`."""

    look: Callable[[], list[Target]]
    """Whom to call; asked once a second."""
    seed: int
    per_s: float
    purposes: Sequence[Purpose]
    """For which the ports are called."""
    sent: Counter[str] = field(default_factory=Counter)
    """What was said, by kind."""
    failed: Counter[str] = field(default_factory=Counter)
    """Where the other end did not take it or did not answer, by kind."""
    problems: list[str] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _targets: list[Target] = field(default_factory=list)
    _impersonated_at_s: float = 0.0

    def start(self) -> None:
        self._targets = self.look()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CALLERS)]
        self._threads.append(threading.Thread(target=self._keep_looking))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _keep_looking(self) -> None:
        while not self._is_over.wait(1.0):
            self._targets = self.look() or self._targets

    def _run(self, number: int) -> None:
        chance, held = random.Random(f"{self.seed}/{number}"), deque[Call]()
        known, names = kinds(self.purposes), list[str]()
        while not self._is_over.wait(CALLERS / self.per_s):
            names = names or chance.sample(list(known), len(known))
            name = names.pop()
            if name == f"{Purpose.DATA.value}: {speak_as_a_member.__name__}" and not self._may_impersonate():
                continue
            try:
                self._say(name, known[name], chance, held)
            except Exception as error:  # noqa: BLE001 - a mistake of this tool's, which must not pass for silence
                self.problems.append(f"{name}: {error!r}")
        for call in held:
            call.socket.close()

    def _say(self, name: str, kind: Kind, chance: random.Random, held: deque[Call]) -> None:
        try:
            call = Call(chance.choice(self._targets), chance)
        except OSError:
            with self._lock:
                self.failed[name] += 1
            return
        held.append(call)
        if len(held) > HELD:
            held.popleft().socket.close()
        try:
            kind(call)
        except (OSError, EOFError, HandshakeFailed):
            with self._lock:
                self.failed[name] += 1
            return
        with self._lock:
            self.sent[name] += 1

    def _may_impersonate(self) -> bool:
        with self._lock:
            is_due = time.monotonic() - self._impersonated_at_s > IMPERSONATES_EVERY_S
            if is_due:
                self._impersonated_at_s = time.monotonic()
            return is_due


# -- what must hold ---------------------------------------------------------------------------------------------------


def is_guardian(pid: int) -> bool:
    try:
        return b"guardian" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def opened_by(pid: int) -> tuple[int, int]:
    """Descriptors and threads of a process; none where it has ended."""
    try:
        descriptors, threads = (sum(1 for _ in Path(f"/proc/{pid}/{what}").iterdir()) for what in ("fd", "task"))
        return descriptors, threads
    except OSError:
        return 0, 0


def ended(cluster: LocalCluster, before: Collection[int], guardians: Collection[int]) -> list[str]:
    """Processes that have ended, but for guardians of nodes that were fenced: who comes back has another one."""
    gone = set(before) - {pid for node in cluster.nodes.values() for pid in node.pids}
    fenced = sum(len(node.events("fenced")) for node in cluster.nodes.values())
    print(f"{fenced} times a node was left behind and came back, with another guardian")
    wrong = [f"process {pid} has ended" for pid in gone.difference(guardians)]
    if len(gone.intersection(guardians)) > fenced:
        wrong.append(f"{len(gone.intersection(guardians))} guardians have ended, and {fenced} nodes were left behind")
    return wrong


def leaks(cluster: LocalCluster, before: Mapping[int, tuple[int, int]]) -> list[str]:
    """Processes that have more open than before, after some time to close it."""
    end_s = time.monotonic() + QUIET_S
    while True:
        now = {pid: opened_by(pid) for node in cluster.nodes.values() for pid in node.pids}
        more = [
            f"process {pid}: {then} descriptors and threads before, {now.get(pid)} now"
            for pid, then in before.items()
            if pid in now and any(count > past + SPARE for count, past in zip(now[pid], then, strict=True))
        ]
        if not more or time.monotonic() > end_s:
            return more
        time.sleep(1.0)


@dataclass
class Rounds:
    """How the run gets on, looked at by one thread."""

    newest: int = -1
    moved_at_s: float = 0.0
    longest_gap_s: float = 0.0

    def see(self, view: View, now_s: float) -> None:
        newest = -1 if view.committed is None else view.committed.round
        self.longest_gap_s = max(self.longest_gap_s, now_s - self.moved_at_s if self.moved_at_s else 0.0)
        if newest > self.newest:
            self.newest, self.moved_at_s = newest, now_s


def what_is_wrong(cluster: LocalCluster) -> list[str]:
    """What the nodes recorded and printed, once all have ended."""
    wrong: list[str] = []
    digests: dict[int, set[str]] = {}
    for node in cluster.nodes.values():
        said = node.console.read_text(errors="replace")
        wrong += [f"{node.node_id} printed {word!r}" for word in TROUBLE if word in said]
        for event in node.events("round_committed"):
            digests.setdefault(event["round"], set()).add(event["digest"])
    wrong += [f"round {round} has {len(found)} digests" for round, found in digests.items() if len(found) != 1]
    result = audit(read_rounds(cluster.run_dir))
    if not digests or not result.is_exact:
        wrong.append(f"rounds {len(digests)}, accounts {result.accounts}")
    return wrong


def fuzz(folder: Path, minutes: float, seed: int, per_s: float, *, are_of_nodes: bool) -> list[str]:
    """Start the run, say everything to it, end it; what did not hold. Prints what was said and how the run got on."""
    env = {"OMP_NUM_THREADS": "1", "ZERO_BAND_RUN__TOKEN": TOKEN}
    arguments = (*TINY, "--data.cache-dir", str(folder / "cache"))
    store_url, purposes = NODES_URL if are_of_nodes else None, tuple(Purpose) if are_of_nodes else GUARDED
    with LocalCluster(folder, arguments, nodes=NODES, env=env, store_url=store_url) as cluster:
        for _ in range(NODES):
            cluster.start()
        cluster.wait_until(lambda run: (run.round or 0) >= 5, timeout_s=DEADLINE_S)
        places = [cluster.store_place(node) for node in cluster.nodes]
        url = address_of_nodes(places) if are_of_nodes else cluster.store_url
        assert url is not None
        key = RunKey.of(TOKEN, cluster.run_id, node=NodeKey.new())
        before = {pid: opened_by(pid) for node in cluster.nodes.values() for pid in node.pids}
        guardians = frozenset(filter(is_guardian, before))
        with closing(RedisStore(url, cluster.run_id, key=key, lease_s=DETECT_S, retry_s=30.0)) as store:
            said, rounds = Fuzz(lambda: targets_of(store.view(0), key, cluster.run_id), seed, per_s, purposes), Rounds()
            first, end_s = store.view(0).committed, time.monotonic() + 60 * minutes
            said.start()
            while time.monotonic() < end_s and len(cluster.running) == NODES:
                rounds.see(store.view(0), time.monotonic())
                time.sleep(0.2)
            said.stop()
        wrong = [*said.problems, *leaks(cluster, before), *ended(cluster, before, guardians)]
        wrong += [
            f"{node.node_id} ended with {node.exit_code}" for node in cluster.nodes.values() if not node.is_running
        ]
        cluster.stop(grace_s=DEADLINE_S)
        wrong += [f"{n.node_id} left with {n.exit_code}" for n in cluster.nodes.values() if n.exit_code != 0]
        wrong += what_is_wrong(cluster)
        if wrong:
            print(cluster.describe())
    report(said, kinds(purposes), rounds.newest - (first.round if first else 0), rounds.longest_gap_s)
    wrong += [f"nothing of the kind {name} was sent" for name in kinds(purposes) if said.sent[name] == 0]
    if rounds.longest_gap_s > LONGEST_GAP_S or rounds.moved_at_s == 0:
        wrong.append(f"no round for {rounds.longest_gap_s:.1f} s; at most {LONGEST_GAP_S:g} s may pass")
    return wrong


def report(said: Fuzz, names: Collection[str], rounds: int, gap_s: float) -> None:
    print("\n| what | said | not taken or not answered |\n|---|---|---|")
    for name in names:
        print(f"| {name} | {said.sent[name]} | {said.failed[name]} |")
    print(f"| all | {said.sent.total()} | {said.failed.total()} |")
    print(f"\n{rounds} rounds were committed meanwhile; the longest time without one was {gap_s:.1f} s.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls-per-s", type=float, default=40.0)
    parser.add_argument("--stores", choices=("one", NODES_URL), default="one", help="nodes: each node holds one")
    parser.add_argument("--folder", type=Path, help="keep the run's files there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        wrong = fuzz(
            folder, arguments.minutes, arguments.seed, arguments.calls_per_s, are_of_nodes=arguments.stores == NODES_URL
        )
    for problem in wrong:
        print(f"WRONG: {problem}")
    print("failed" if wrong else f"all held: {NODES} nodes, {arguments.minutes:g} minutes, seed {arguments.seed}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
