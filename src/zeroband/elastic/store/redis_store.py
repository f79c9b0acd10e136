"""The store of a run in Redis, or in one of several: its start, leases and rounds.

All writes that decide something are compare-and-set, fenced by the plan that they build on; what runs inside Redis
is in `scripts`. What is found there counts if it was sealed by a node of this run (`verifier`).
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from zeroband.elastic.membership.ballots import Present, is_voted_for, may_leave_out
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.loss_record import LossRecord, reason_to_go_back
from zeroband.elastic.membership.orders import OperatorKey, Orders, is_legitimate
from zeroband.elastic.membership.plan_checks import is_undisputed, required_members
from zeroband.elastic.membership.records import (
    Attempt,
    Claim,
    Evidence,
    LinkRates,
    Peer,
    Ready,
    RestartPoint,
    RoundPlan,
    StoreTerm,
    Verdict,
    View,
)
from zeroband.elastic.store import scripts
from zeroband.elastic.store.backup import StoreBackup
from zeroband.elastic.store.interface import Store, record_of, require_equal
from zeroband.elastic.store.keys import HISTORY_LENGTH, ROUND_TTL_S, RUN_TTL_S, SPENT_TTL_S
from zeroband.elastic.store.patches import patch_of, patched, tag_of
from zeroband.elastic.store.record_verifier import LEAVES_OUT_MOST, NOT_VOTED_FOR
from zeroband.elastic.store.redis_run import PAUSE_MAX_S
from zeroband.elastic.store.seals import id_of
from zeroband.elastic.store.store_cache import RECORDS, Reader, StoreCache, pairs, text_of
from zeroband.elastic.store.store_in_use import StoreInUse, stamp_of
from zeroband.errors import ConfigError, JoinRefused, StoreLost

if TYPE_CHECKING:  # the guardian needs no schema of a run
    from zeroband.config.schema import RollbackConfig

MEASURED_AT_ONCE, MEASURING_MS = 4, 10_000
"""Most links of a run that are measured at a time, and the time for each."""

_ASK_AGAIN = 8
"""Immediate retries of a compare-and-set while other nodes change its input."""

_CLAIM_AGAIN_S = 0.05
"""Longest pause of a joiner before it claims samples again; many may join at once."""

_EXPECTED, _ANY = 2, "-"
"""Sent in place of a verdict that is the expected one; in place of that one's tag: any verdict."""

_LARGE = 4096
"""Records of at least this many characters are sent as patches. For shorter ones computing and applying a patch takes
longer than sending them whole."""

_NEVER = 1 << 31
"""More than there can be members."""

_WHOLE_LEASES, _WHOLE_MEMBERS = 6, 64
"""After this many lease times a look reads everything again, so that silent damage in the store is found; with more
than _WHOLE_MEMBERS members the time grows in proportion."""


class _OwnRecord(NamedTuple):
    """What a member writes for itself: that it is ready, or with a plan its vote."""

    word: str
    plan: RoundPlan | None = None


def _behind(prefix: str, words: Mapping[str, bytes]) -> dict[str, bytes]:
    """The words whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): word for name, word in words.items() if name.startswith(prefix)}


class RedisStore(StoreInUse, Store):
    """The store of real runs.

    `url`: of several stores, with blanks between them or held by nodes, the one in use is found at the first call
    (`reach`).
    `key`: of the run, made of its token; None: it has none. `lease_s`: life of a lease. `retry_s`: how long a call
    is retried, with jittered back-off, before it raises StoreLost; one attempt takes no longer than a lease, or
    `answer_s`.
    `before_retry`: called before every further attempt; what it raises ends the call.
    """

    def __init__(
        self,
        url: str,
        run_id: str,
        *,
        key: RunKey | None = None,
        lease_s: float = 5.0,
        retry_s: float,
        answer_s: float | None = None,
        before_retry: Callable[[], None] = lambda: None,
    ) -> None:
        answer_s = min(max(1.0, lease_s), retry_s) if answer_s is None else answer_s
        super().__init__(
            *(url, run_id),
            key=key,
            lease_s=lease_s,
            retry_s=retry_s,
            answer_s=answer_s,
            before_retry=before_retry,
        )
        self._seen = StoreCache()
        self._seeing = threading.Lock()
        self._expected = b""
        """The verdict that this node could write itself, which need not be told."""
        self._own = ""
        """The member that speaks through this store; empty: none did yet."""
        self._told_peer: tuple[str, Peer, str] | None = None
        """What was told last of where a member is, and its record: it is told again with each renewal."""
        self._shared: Mapping[str, str] | None = None
        """What all nodes share; None: this node has not compared it."""
        self._newest: Verdict | None = None
        """The newest verdict that was believed."""
        self._voted_on = ""
        """RoundPlan of the newest vote that was given through this store."""
        self._proven_round = -1
        """Round of which every signature is verified, since somebody asked for that."""
        self._doubted = "", 0.0
        """The newest plan whose verdict was not shown to be voted for, or that left this member out; since when."""
        self.quorum = 0.5
        """Part of the weight that may go on without members that are late."""
        self.operator: OperatorKey | None = None
        """Signs the orders that are given through this store; None: they carry no signature, as those of members."""
        self.on_left_out: Callable[[RoundPlan], object] = lambda plan: None
        """Told of a plan that does not count, since it goes on without most members that live."""
        self._granted_ms, self._living_then = 0, frozenset[str]()
        """When this node's lease was renewed last, by the store's clock, and who was alive then."""
        self._whole_leases = _WHOLE_LEASES * random.uniform(0.75, 1.25)  # not all members at one time

    @property
    def session(self) -> str:
        """Session of the run that this node is in; records of another one do not count. Empty: it is in none yet."""
        return self.verifier.session

    @session.setter
    def session(self, session: str) -> None:
        self.verifier.session = session
        with self._seeing:
            self._era += 1
            self._seen = self._seen.in_another_session(self._era)

    @property
    def _silence_ms(self) -> int:
        """Without any renewal for so long, the store itself was out of reach: a guardian renews five times a lease."""
        return self._lease_ms // 2

    # -- the run ------------------------------------------------------------------------------------------------

    def found_or_match(self, shared: Mapping[str, str]) -> dict[str, str]:
        record = record_of(shared)
        deadline_s, has_another_token = time.monotonic() + self._lease_ms / 1000, False
        while True:
            is_first = time.monotonic() < deadline_s
            if has_another_token and not is_first:  # never overwrite a record sealed with another token
                raise JoinRefused("run.token", "another", "this one")
            args = [self.verifier.seal_run(record), RUN_TTL_S, self.verifier.rejected(self.keys.run), self._silence_ms]
            raw, other_protocol, is_alive = self.run_script(scripts.FOUND, *args, int(is_first))
            waits = is_first and bool(is_alive)
            if other_protocol and not waits:
                raise JoinRefused("protocol", text_of(other_protocol), record["protocol"])
            theirs = self.verifier.run(self.keys.run, raw)
            if theirs is not None:
                require_equal(theirs, record)
                self._shared = record
                return record
            has_another_token = self._names_another_token(raw or self.verifier.rejected(self.keys.run))
            if has_another_token and not waits:
                raise JoinRefused("run.token", "another", "this one")
            if waits:
                time.sleep(min(PAUSE_MAX_S, self._lease_ms / 10_000))

    def _names_another_token(self, raw: bytes) -> bool:
        """Whether a record of the run was sealed with a token that this node does not have."""
        return id_of(raw) not in ("", self.verifier.token_check)

    def require_token(self) -> None:
        """Raise ConfigError where the run's record was sealed with another token than this one's."""
        raw, _, _ = self.run_script(scripts.READ, at={"record": self.keys.run})
        if raw and self._names_another_token(raw) and self.verifier.run(self.keys.run, raw) is None:
            raise ConfigError(
                "run.token: the nodes of this run have another one; give theirs, as run.token or ZERO_BAND_RUN__TOKEN"
            )

    def record(self) -> dict[str, str] | None:
        """Return what the run's nodes share, as its first one wrote it. None: there is no such run, or it is forged."""
        raw, _, _ = self.run_script(scripts.READ, at={"record": self.keys.run})
        return self.verifier.run(self.keys.run, raw)

    def forget_dead_run(self) -> bool:
        return bool(self.run_script(scripts.CLEAR, self._lease_ms, self._silence_ms))

    def propose_restart_point(self, restart_point: RestartPoint, view: View) -> bool:
        verifier, keys = self.verifier, self.keys
        names = [keys.restart_point, keys.plan, keys.committed]
        before = [verifier.seal_restart_point(view.restart_point), verifier.seal_plan(view.plan)]
        before.append(verifier.seal_verdict(view.committed))
        args = [
            *before,
            verifier.seal_restart_point(restart_point),
            RUN_TTL_S,
            self._silence_ms,
            *map(verifier.rejected, names),
        ]
        return bool(self.run_script(scripts.BEGIN, *args))

    def restore(self, known: StoreBackup) -> bool:
        keys, verifier, member = self.keys, self.verifier, known.member_id
        round = 0 if known.ready is None else known.ready.round
        ours = [
            *(verifier.seal_plan(known.plan), verifier.seal_verdict(known.committed)),
            *(verifier.seal_run(known.run), verifier.seal_orders(known.orders)),
            "" if known.ready is None else verifier.seal_ready(member, known.ready),
            "" if known.vote is None else verifier.seal_vote(member, *known.vote),
        ]
        places = [keys.plan, keys.committed, keys.run, keys.orders, f"{keys.ready(round)} {member}"]
        places.append(f"{keys.votes} {member}")
        args = [RUN_TTL_S, self._lease_ms, HISTORY_LENGTH, ROUND_TTL_S, member, *ours, *map(verifier.rejected, places)]
        args += [stamp_of(known.generation), "" if known.vote is None else known.vote[0].id]
        return self.run_script(scripts.RESTORE, *args, at=self.keys.of_round(round)) == 1

    # -- leases -------------------------------------------------------------------------------------------------

    def renew_lease(
        self, member_id: str, peer: Peer, *, first: bool = False, listed_version: int = 0
    ) -> dict[str, Peer] | None:
        args: list[str | bytes | int] = [member_id, self._lease_ms, self._silence_ms, int(first)]
        args += [self._sealed_peer(member_id, peer), RUN_TTL_S]
        refuted, known = b"", self._known()
        for _ in range(_ASK_AGAIN):
            seen = [refuted, known.changes, known.alive_tag, known.peers.change]
            granted, against, *living, now_ms = self.run_script(scripts.RENEW, *args, *seen)
            if granted:
                peers = self._living(known, *living)
                self._granted_ms, self._living_then = int(now_ms), known.alive
                return peers
            plan = self.verifier.plan(self.keys.plan, against, None)
            is_newer = plan is not None and plan.version > listed_version
            is_out = plan is not None and member_id not in (*plan.members, *plan.late)
            if plan is not None and is_newer and is_out and not self._was_taken(plan, int(now_ms)):
                return None
            refuted = against
        raise StoreLost(f"somebody changes {self.keys.plan} all the time; {member_id} could not renew its lease")

    def _sealed_peer(self, member_id: str, peer: Peer) -> str:
        told = self._told_peer
        if told is None or told[:2] != (member_id, peer):
            told = self._told_peer = member_id, peer, self.verifier.seal_peer(member_id, peer)
        return told[2]

    def _was_taken(self, plan: RoundPlan, now_ms: int) -> bool:
        """Whether this node's lease cannot have run out, and one member opened a round without several others.

        The node takes the lease again: its trainer sees who else lives, and so whether the round may go on without it.
        """
        others = self._living_then.difference(plan.members)
        went_on = len(self._living_then) - len(others)
        return 0 <= now_ms - self._granted_ms < self._lease_ms and went_on <= 1 < len(others)

    def _living(self, known: StoreCache, times: Sequence[Any], alive: Any, peers: Sequence[Any]) -> dict[str, Peer]:
        """The living members, as a renewal tells what is new of them."""
        known.learn_times(*times)
        known.learn_alive(alive)
        if known.peers.learn(peers, known.change, lambda new: self.verifier.peers(self.keys.peers, new)):
            self._find_stores_of(known.peers.read)
        known.view = None
        self._keep(known)
        return {member: peer for member, peer in known.peers.read.items() if member in known.alive}

    def _living_nodes(self) -> dict[str, str]:
        with self._seeing:
            view = self._seen.view
        if view is None:
            return {}
        return {peer.node_id: member for member, peer in view.peers.items() if member in view.alive}

    def release_lease(self, member_id: str) -> None:
        self._end(member_id, forget=True)

    def expire_lease(self, member_id: str) -> None:
        self._end(member_id, forget=False)

    def _end(self, member_id: str, *, forget: bool) -> None:
        self.run_script(scripts.END_LEASE, member_id, int(forget))

    def lease_ends_ms(self) -> dict[str, int]:
        leases = self.call(lambda: self._redis.zrangebyscore(self.keys.leases, "-inf", "+inf", withscores=True))
        return {text_of(member): int(end) for member, end in leases if abs(end) < float("inf")}

    def is_renewed(self, before_ms: int, end_ms: int) -> bool:
        return 0 < end_ms - before_ms < self._silence_ms

    def say_leaving(self, member_id: str) -> frozenset[str]:
        word = self.verifier.seal_leaving(member_id)
        alive, leaving = self.run_script(scripts.LEAVE, member_id, self._silence_ms, ROUND_TTL_S, word)
        return frozenset(map(text_of, alive)) - self.verifier.leaving(self.keys.leaving, pairs(leaving))

    # -- rounds -------------------------------------------------------------------------------------------------

    def view(self, round: int) -> View:
        self._proven_round = round
        return self._look(round)

    def await_change(
        self, round: int, seen: View | None, *, within_s: float, whole: bool = True, ends_with: RoundPlan | None = None
    ) -> View:
        wait_ms = int(1000 * min(within_s, self._answer_s / 2))
        return self._look(round, whole=whole, seen=seen, wait_ms=wait_ms, ends_with=ends_with)

    def announce_ready(self, member_id: str, ready: Ready, *, enough: int | None = None) -> View:
        self._own = member_id
        said = _OwnRecord(self.verifier.seal_ready(member_id, ready))
        return self._look(ready.round, said, whole=enough is None, enough_ready=_NEVER if enough is None else enough)

    def testify(self, plan: RoundPlan, member_id: str, evidence: Evidence, *, again: bool = False) -> bool:
        key, word = self.keys.attempt(plan.id), self.verifier.seal_evidence(member_id, plan, evidence)
        args = [plan.id, member_id, word, SPENT_TTL_S, self.verifier.rejected(f"{key} said {member_id}"), int(again)]
        return bool(self.run_script(scripts.TESTIFY, *args, at={"attempt": key}))

    def attempt(self, plan_id: str) -> Attempt | None:
        verifier, key = self.verifier, self.keys.attempt(plan_id)
        raw, failed, votes, kept, tag = self.run_script(scripts.READ_ATTEMPT, plan_id, at={"attempt": key})
        known = pairs(kept)
        names = [key, f"{key} vote", f"{key} failed"]
        if raw:
            names = [self.keys.plan, self.keys.votes, self.keys.failed]
        else:
            raw, failed, votes = known.get("plan"), known.get("failed"), _behind("vote ", known)
        plan = verifier.past_plan(names[0], raw, plan_id)
        if plan is None:
            return None
        return Attempt(
            plan,
            verifier.votes(names[1], plan, votes if isinstance(votes, dict) else pairs(votes)),
            verifier.evidence(f"{key} said", plan, _behind("said ", known)),
            verifier.failure(names[2], plan, failed) or "",
            text_of(tag),
        )

    def vote(self, plan: RoundPlan, member_id: str, digest: str, *, generation: StoreTerm | None = None) -> View:
        self._own, self._voted_on = member_id, plan.id
        said = _OwnRecord(self.verifier.seal_vote(member_id, plan, digest), plan)
        enough, stamp = len(plan.members), stamp_of(generation)
        return self._look(plan.round, said, whole=False, enough_votes=enough, stamp=stamp)

    def _known(self) -> StoreCache:
        """What this node has seen of the store, if that is not too old; else nothing. To learn in."""
        with self._seeing:
            seen, now_s = self._seen, time.monotonic()
            leases = self._whole_leases * max(1.0, len(seen.alive) / _WHOLE_MEMBERS)
            if seen.era != self._era or now_s - seen.began_at_s > leases * self._lease_ms / 1000:
                seen = self._seen = StoreCache(era=self._era, began_at_s=now_s)
            return seen.fork()

    def _keep(self, known: StoreCache) -> None:
        """Have what was learned be known to the next look, unless another thread has learned more meanwhile."""
        with self._seeing:
            seen = self._seen
            is_newer = known.is_set_back or known.born != seen.born or known.change >= seen.change
            if known.era == seen.era and is_newer:
                self._seen = known

    def _look(
        self,
        round: int,
        said: _OwnRecord | None = None,
        *,
        whole: bool = True,
        enough_ready: int = _NEVER,
        enough_votes: int = _NEVER,
        seen: View | None = None,
        wait_ms: int = 0,
        stamp: str | None = None,
        ends_with: RoundPlan | None = None,
    ) -> View:
        """Look once.

        `said`: what is written first, in the same round trip, if the store is in the generation of this `stamp`, or in
        that of the store in use. `wait_ms`: for news, where `seen` is the newest. `ends_with`: as in `await_change`.
        """
        keys, known, expected = self.keys, self._known(), self._expected
        known.ask_for_round(round)
        args: list[str | bytes | int] = [self._silence_ms, known.changes, *map(known.tag, RECORDS)]
        args += [known.alive_tag, known.ready.change, known.peers.change, known.plan_id, known.votes.change]
        args += [int(whole), enough_ready, enough_votes, self._own]
        puts_off = ends_with is not None and known.plan == ends_with and id_of(expected) != ends_with.id
        args += [known.ready.tag(self._own), known.votes.tag(self._own)]
        args.append(_ANY if puts_off else tag_of(expected))
        if said is not None:
            args += [said.word, ROUND_TTL_S, self._stamp if stamp is None else stamp]
            args.append("" if said.plan is None else said.plan.id)
        waits = wait_ms > 0 and seen is not None and seen is known.view  # else another thread has seen more already
        wait = ("XREAD", "BLOCK", wait_ms, "COUNT", 1, "STREAMS", keys.news, f"{known.change}-0") if waits else ()
        told = self.run_script(scripts.VIEW, *args, wait=wait, at=self.keys.of_round(round))
        if puts_off and told[2] == _EXPECTED and (newest := self._known().view) is not None:
            return newest  # another thread may have seen more meanwhile
        try:
            told[1:3] = self._whole(known, told[1], told[2], expected)
        except ValueError:  # it was damaged; who knows nothing is told all of it
            known.records, known.view = {}, None
            self._keep(known)
            return self._look(
                round, said, whole=whole, enough_ready=enough_ready, enough_votes=enough_votes, stamp=stamp
            )
        view = self._learn(known, round, told)
        self._keep(known)
        return self._look(round, whole=whole) if known.peers.unseen else view  # some were forgotten

    def _whole(self, known: StoreCache, plan: Any, committed: Any, expected: bytes) -> tuple[Any, Any]:
        """The plan and the verdict, where they were told by what this node has. Raises ValueError."""
        if isinstance(plan, list):
            plan = patched(known.records.get("plan") or b"", plan[0])
            self.verifier.require_sealed(plan, "plan")
        if isinstance(committed, list):
            committed = patched(known.records.get("committed") or b"", committed[0])
            self.verifier.require_sealed(committed, "verdict")
        return plan, expected if committed == _EXPECTED else committed

    def _learn(self, known: StoreCache, round: int, told: Sequence[Any]) -> View:
        """Take over what a look told. Returns the view of it: the one from before where nothing is new."""
        keys, verifier = self.keys, self.verifier
        times, *records, alive, ready, peers, votes, is_settling, own_ready, own_vote = told
        known.learn_times(*times)
        has_new_alive = known.learn_alive(alive)
        must_prove = not known.is_proven and self._proves(round)
        if known.learn_records(records) or known.view is None or known.is_doubted or must_prove:
            self._judge_records(known)
        plan, ready_key = known.plan, keys.ready(round)
        read_ready, read_votes = self._readers(known, round)
        is_new = [
            has_new_alive,
            must_prove and known.ready.prove(read_ready),
            must_prove and known.votes.prove(read_votes),
            known.peers.learn(peers, known.change, lambda raw: verifier.peers(keys.peers, raw)),
            known.ready.learn(ready, known.change, read_ready),
            known.votes.learn(votes, known.change, read_votes),
        ]
        if is_new[3]:
            self._find_stores_of(known.peers.read)
        if self._own:
            is_new.append(known.ready.learn_own(self._own, own_ready, read_ready))
            is_new.append(known.votes.learn_own(self._own, own_vote, read_votes))
        settles = bool(is_settling) or known.is_doubted
        if known.view is not None and not any(is_new) and known.view.is_settling == settles:
            return known.view
        view = View(
            plan=plan,
            committed=known.committed,
            alive=known.alive,
            ready=known.ready.read,
            votes=known.votes.read if plan is not None else {},
            failed=known.failed,
            peers=known.peers.read,
            is_known=known.is_known,
            is_settling=settles,
            orders=known.orders,
            restart_point=known.restart_point,
            unseen_ready=known.ready.unseen,
            unseen_votes=known.votes.unseen if plan is not None else 0,
            generation=known.generation,
            refused={m: why for m in known.ready.rejected if (why := verifier.malformed(f"{ready_key} {m}"))},
            is_proven=known.is_proven,
        )
        known.view = view.counted()
        return known.view

    def _readers(self, known: StoreCache, round: int) -> tuple[Reader[Ready], Reader[str]]:
        """What reads who is ready and what members voted for, behind the records of this look."""
        verifier, keys, plan, taken = self.verifier, self.keys, known.plan, self._taken(known)
        voters = frozenset[str]() if plan is None else taken & required_members(plan)

        def read_ready(raw: Mapping[str, bytes]) -> dict[str, Ready]:
            known.ready.is_proven &= not raw.keys() & taken
            return verifier.ready(keys.ready(round), round, raw, taken)

        def read_votes(raw: Mapping[str, bytes]) -> dict[str, str]:
            known.votes.is_proven &= not raw.keys() & voters
            return verifier.votes(keys.votes, plan, raw, voters)

        return read_ready, read_votes

    def _proves(self, round: int | None) -> bool:
        """Whether every signature of a round is verified."""
        return round == self._proven_round or self.verifier.is_wary

    def _taken(self, known: StoreCache) -> frozenset[str]:
        """Members of the round before whose words this one need not prove, since it takes part with them."""
        committed = known.committed
        if committed is None or known.round is None or self._own not in committed.members or self._proves(known.round):
            return frozenset()
        is_next = 0 <= known.round - committed.round <= 1
        return frozenset(committed.members) - {self._own} if is_next else frozenset()

    def _judge_records(self, known: StoreCache) -> None:
        """Read the records that exist once per run; some are valid only together with others."""
        keys, verifier, raw = self.keys, self.verifier, known.records.get
        known.is_doubted = False
        committed = self._believed(known, verifier.verdict(keys.committed, raw("committed")))
        known.orders = verifier.orders(keys.orders, raw("orders"))
        known.committed, shown = committed, known.plan
        taken, proves = self._taken(known), self._proves(known.round)

        def is_taken(plan: RoundPlan) -> bool:
            was_taken = known.is_taken if plan == shown else is_undisputed(plan, self._own, taken)
            known.is_taken = was_taken and not proves
            return known.is_taken or (plan == shown and not proves)

        plan = verifier.plan(keys.plan, raw("plan"), committed, is_taken=is_taken)
        known.is_taken &= plan is not None
        before = committed or self._newest
        if plan is not None and before is not None and plan.round > before.round:
            plan = self._lawful(known, plan, before)
        if plan != known.plan:
            known.forget_votes()
        known.plan, known.view = plan, None
        known.failed = verifier.failure(keys.failed, plan, raw("failed"))
        known.is_known = verifier.run(keys.run, raw("run")) is not None
        known.generation = verifier.generation(keys.generation, raw("generation")) if self.generation else None
        is_of_a_member = committed is not None and self._own in (*committed.members, *committed.plan.late)
        restart_point = verifier.restart_point(keys.restart_point, raw("restart_point"), committed)
        known.restart_point = None if is_of_a_member else restart_point  # the run is not dead: this member lives

    def _believed(self, known: StoreCache, verdict: Verdict | None) -> Verdict | None:
        """The verdict, if members voted for it. Else the one before, and the store counts as settling for a lease.

        A member of the round has compared it with its own vote; it asks for the others' votes where it was not in it,
        as a joiner does. A member that never voted on it, of a run with one store, knows that it is forged.
        """
        before, own = self._newest, self._own
        if verdict is None or (before is not None and verdict.round <= before.round):
            return verdict
        has_voted = self.verifier.is_expected(verdict) or verdict.plan.id == self._voted_on
        name, raw = self.keys.committed, known.records["committed"] or b""
        listed = (*before.members, *before.plan.late) if before is not None else ()
        if has_voted or (before is None and not self.verifier.is_of_a_node):
            self._newest = verdict
            return verdict
        if own in listed and own in verdict.members and not self.has_several:
            self.verifier.reject(name, raw, NOT_VOTED_FOR)
            return None
        if before is None or own in listed:
            if not self.verifier.is_of_its_proposer(name, raw, verdict.plan):
                return None
            is_voted = self._is_voted_for(known, verdict, verdict.members if before is None else before.members)
            takes_part = verdict.members if is_voted else known.alive
            may_go_on = before is None or self._may_leave_out(known, verdict.plan, before, takes_part)
            if may_go_on is False:
                self._reject_taken(known, "committed", verdict.plan)
                return None
            if not (is_voted and may_go_on) and self._has_doubts(verdict.plan):
                known.is_doubted = True
                return before
        self._newest = verdict
        return verdict

    def _lawful(self, known: StoreCache, plan: RoundPlan, before: Verdict) -> RoundPlan | None:
        """The plan, unless it leaves this member out and must not; the store counts as settling while it may not."""
        may_go_on = self._may_leave_out(known, plan, before, known.alive)
        if may_go_on is False:
            self._reject_taken(known, "plan", plan)
            return None
        if may_go_on is None and self._has_doubts(plan):
            known.is_doubted = True
            return None
        return plan

    def _may_leave_out(
        self, known: StoreCache, plan: RoundPlan, before: Verdict, takes_part: Collection[str]
    ) -> bool | None:
        """As in `membership.ballots`, by what this node has seen; `takes_part`: as there."""
        key = self.keys.ready(plan.round)
        if known.round == plan.round and self._own not in plan.members:
            self._proven_round = plan.round
            known.ready.prove(lambda raw: self.verifier.ready(key, plan.round, raw))
        ready = known.ready.read if known.round == plan.round else {}
        here = Present(known.alive, known.peers.read, ready, self.quorum)
        return may_leave_out(plan, before, self._own, here, takes_part)

    def _reject_taken(self, known: StoreCache, name: str, plan: RoundPlan) -> None:
        """Have a record not count by which one member goes on without most others; say who opened its round."""
        if self.verifier.reject(getattr(self.keys, name), known.records[name] or b"", LEAVES_OUT_MOST):
            self.on_left_out(plan)

    def _has_doubts(self, plan: RoundPlan) -> bool:
        """Whether this plan, which is in doubt, has been so for less than a lease."""
        now_s = time.monotonic()
        if self._doubted[0] != plan.id:
            self._doubted = plan.id, now_s
        return 1000 * (now_s - self._doubted[1]) <= self._lease_ms

    def _is_voted_for(self, known: StoreCache, verdict: Verdict, members: Collection[str]) -> bool:
        """Whether the votes here show that most of these members which a verdict lists have voted for it."""
        key = self.keys.votes if known.plan_id == verdict.plan.id else self.keys.last_votes
        votes = self.verifier.votes(key, verdict.plan, pairs(self.run_script(scripts.READ_SAID, at={"said": key})))
        return is_voted_for(verdict, votes, {*members} - {self._own})

    def claim_samples(self, member_id: str, choose: Callable[[Mapping[str, Claim]], Claim]) -> Claim:
        deadline_s = time.monotonic() + self._lease_ms / 1000
        while time.monotonic() < deadline_s:
            said = self.run_script(scripts.READ_SAID, at={"said": self.keys.claims})
            words = sorted(one + b" " + other for one, other in zip(said[::2], said[1::2], strict=True))
            known = hashlib.sha1(b" ".join(words), usedforsecurity=False).hexdigest()
            claim = choose(self.verifier.claims(self.keys.claims, pairs(said)))
            sealed = self.verifier.seal_claim(member_id, claim)
            if self.run_script(scripts.CLAIM, member_id, sealed, ROUND_TTL_S, known):
                return claim
            time.sleep(random.uniform(0.0, _CLAIM_AGAIN_S))
        raise StoreLost(f"others change {self.keys.claims} all the time; {member_id} could not claim samples")

    def claims(self) -> Mapping[str, Claim]:
        said = self.run_script(scripts.READ_SAID, at={"said": self.keys.claims})
        return self.verifier.claims(self.keys.claims, pairs(said))

    def tell_links(self, member_id: str, links: LinkRates) -> None:
        sealed = self.verifier.seal_links(member_id, links)
        self.run_script(scripts.TELL_LINKS, member_id, sealed, RUN_TTL_S)

    def may_measure(self, member_id: str) -> bool:
        return bool(self.run_script(scripts.MEASURE, member_id, MEASURED_AT_ONCE, MEASURING_MS))

    def has_measured(self, member_id: str) -> None:
        self.call(lambda: self._redis.zrem(self.keys.measuring, member_id))

    def links(self) -> Mapping[str, LinkRates]:
        keys, known = self.keys, self._known()
        if known.links.change != known.links_change or known.links.unseen:
            times, links = self.run_script(scripts.READ_LINKS, known.changes, known.links.change)
            known.learn_times(*times)
            known.links.learn(links, known.links_change, lambda raw: self.verifier.links(keys.links, raw))
            known.view = None  # it may be older than the changes that count as seen now
            self._keep(known)
        return known.links.read

    def signed(self, plan: RoundPlan, member_id: str) -> RoundPlan:
        return self.verifier.signed(plan, member_id)

    def propose_plan(
        self,
        plan: RoundPlan,
        *,
        current: RoundPlan | None,
        generation: StoreTerm | None = None,
        heard: Attempt | None = None,
    ) -> bool:
        verifier, keys = self.verifier, self.keys
        before, after = verifier.seal_plan(current), verifier.seal_plan(plan)
        args = [before, plan.round, after, RUN_TTL_S, plan.orders]
        args += [self._silence_ms, *map(verifier.rejected, (keys.plan, keys.committed, keys.orders))]
        args += [stamp_of(generation), _patch_of(before, after), "" if heard is None else heard.tag, SPENT_TTL_S]
        attempt = keys.attempt("" if current is None else current.id)
        return bool(self.run_script(scripts.OPEN, *args, at={"attempt": attempt}))

    def report_failure(self, plan: RoundPlan, reason: str) -> bool:
        verifier, keys = self.verifier, self.keys
        word = verifier.seal_failure(plan, reason, by=self._own)
        args = [plan.version, word, ROUND_TTL_S, verifier.rejected(keys.committed), verifier.rejected(keys.failed)]
        return bool(self.run_script(scripts.FAIL, *args, plan.id))

    def expect_verdict(self, verdict: Verdict) -> None:
        self._expected = self.verifier.expect(verdict)

    def propose_verdict(self, verdict: Verdict, *, generation: StoreTerm | None = None) -> bool:
        plan, keys, verifier = verdict.plan, self.keys, self.verifier
        before, after = verifier.seal_verdict(self._known().committed), verifier.seal_verdict(verdict)
        args = [verifier.seal_plan(plan), verdict.round, after, RUN_TTL_S, HISTORY_LENGTH, self._silence_ms]
        args += [SPENT_TTL_S, verifier.rejected(keys.committed), verifier.rejected(keys.failed), stamp_of(generation)]
        shared = self._shared if verdict.session != self.session else None
        args += [_patch_of(before, after), "" if shared is None else verifier.seal_run(shared, verdict.sessions)]
        listed = (*plan.members, *plan.late)
        for _ in range(_ASK_AGAIN):
            outcome = self.run_script(
                scripts.COMMIT, *args, *self._done_orders(plan), *listed, at=self.keys.of_round(verdict.round)
            )
            if outcome != 2:
                return bool(outcome)
        return False

    def _done_orders(self, plan: RoundPlan) -> tuple[bytes, str]:
        """The orders as they stand, and as they are once this round did what they say; nothing where it does not."""
        if plan.rollback is None:
            return b"", ""
        raw, orders, _ = self._look_at_orders()
        if orders.rollback != plan.rollback:
            return b"", ""
        return raw, self.verifier.seal_orders(replace(orders, rollback=None, version=orders.version + 1))

    def _look_at_orders(self) -> tuple[bytes, Orders, int]:
        """The orders, as they stand there and as they count; the newest version that a round was opened under."""
        verifier, keys = self.verifier, self.keys
        raw, plan, committed = self.run_script(scripts.READ, at={"record": keys.orders})
        current = verifier.plan(keys.plan, plan, verifier.verdict(keys.committed, committed))
        return raw or b"", verifier.orders(keys.orders, raw), 0 if current is None else current.orders

    def take_orders_of(self, operator: str, run_id: str, rollback: RollbackConfig | None) -> None:
        """Have orders count only if they follow from what the operator of this public key signed.

        `rollback`: as the run has it, by which members answer a loss themselves.
        """

        def calls_for_return(round: int) -> bool:
            newest = self._newest
            if newest is None or newest.round != round:
                return False
            return bool(reason_to_go_back(LossRecord.of(newest.record), rollback))

        self.verifier.are_ordered = lambda orders, before: is_legitimate(
            orders, before, operator, run_id, calls_for_return
        )

    def history(self) -> list[Verdict]:
        raw = self.run_script(scripts.READ_HISTORY)
        return self.verifier.past_verdicts(self.keys.history, cast("list[bytes]", raw)[::-1])

    def give_orders(self, change: Callable[[Orders], Orders]) -> Orders:
        deadline_s = time.monotonic() + self._lease_ms / 1000
        while True:
            raw, orders, newest = self._look_at_orders()
            if orders.version < newest:  # the store lost some; those who know them bring them back
                if time.monotonic() < deadline_s:
                    time.sleep(PAUSE_MAX_S)
                    continue
                orders = replace(orders, version=newest)
            changed = change(orders) if self.operator is None else self.operator.changed(orders, change)
            if changed == orders or self.run_script(scripts.ORDER, raw, self.verifier.seal_orders(changed), RUN_TTL_S):
                return changed


def _patch_of(before: str, after: str) -> str:
    return patch_of(before, after) if len(after) >= _LARGE else ""
