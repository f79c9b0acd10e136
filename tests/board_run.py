"""A scripted run of four nodes as the documents of the board's API. Pure: a moment in, JSON values out.

Seconds of the script: nodes come in from 2 on, the first round is committed at 20, node2 is killed at 300.5 and noticed
at 302, is back at 330, holds the state at 346 and is a member again from 350 on; the run ends at 600.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

BEGAN_AT_S = 1_790_000_000.0
"""Wall clock at second 0 of the script."""

NODES = ("node0", "node1", "node2", "node3")
VICTIM = "node2"
JOINED_S = {"node0": 2.0, "node1": 4.0, "node2": 6.0, "node3": 9.0}
FIRST_ROUND_S, ROUND_S = 10.0, 10.0
KILLED_S, NOTICED_S, STARTED_AGAIN_S, FETCHING_S, FETCHED_S, BACK_S = 300.5, 302.0, 330.0, 334.0, 346.0, 350.0
END_S = 600.0
STEPS_PER_ROUND, TOKENS_PER_STEP = 10, 65_536
TOTAL_STEPS = 590
PARAMETERS = 14_700_000
STATE_BYTES = 4 * PARAMETERS
DIGESTS = ("7c1f", "e04a", "91bb", "2d6e", "f3c8", "5a97")

Document = dict[str, Any]


@dataclass(frozen=True)
class ScriptedRun:
    """The run and what is unusual about it; `state` and `series` are the answers of the API."""

    run_id: str = "amber-heron"
    names: Mapping[str, str] | None = None
    """Other names for the nodes."""
    sample: str = "The harbour was quiet, and the boats came in one after another before the weather turned."
    problem: str | None = None
    orders_refused: str | None = None
    """Why no orders are taken, if so."""
    cost_per_hour: float | None = 11.6
    is_paused: bool = False
    extra_nodes: int = 0
    """More nodes that train from second 12 on."""

    def state(self, now_s: float, at_s: float | None = None) -> Document:
        """The document of /api/state at a second of the script, or of an earlier one at a wall clock."""
        now = min(now_s, END_S + 3600)
        t = now if at_s is None else min(max(at_s - BEGAN_AT_S, 0.0), now)
        newest = min(t, END_S)
        rounds = committed(newest)
        return {
            "run_id": self.run_id,
            "place": f"runs/{self.run_id}",
            "version": "0.1.0",
            "now_s": BEGAN_AT_S + now,
            "at_s": BEGAN_AT_S + t,
            "from_s": BEGAN_AT_S,
            "to_s": BEGAN_AT_S + min(now, END_S),
            "age_s": max(now - END_S, 0.0) + 0.4,
            "problem": self.problem,
            "run": self._run(newest, rounds),
            "nodes": [self._node(name, newest) for name in self._present(newest)],
            "waiting_for": self._waiting(newest),
            "guarantees": guarantees(newest, rounds),
            "links": [self._link(a, b, newest) for a in self._present(newest) for b in self._present(newest) if a != b],
            "rounds": [self._round(n) for n in range(max(0, rounds - 120), rounds)],
            "membership": [
                {"id": self._called(name), "spans": [list(span) for span in spans(name, newest)]}
                for name in self._present(newest)
            ],
            "events": [self._event(*event) for event in happened(newest)][-200:],
            "checkpoints": [
                {
                    "step": n * STEPS_PER_ROUND,
                    "round": n - 1,
                    "at_s": BEGAN_AT_S + round_ends(n - 1) + 1.8,
                    "bytes": 3 * STATE_BYTES,
                    "took_s": 1.8,
                }
                for n in range(10, rounds + 1, 10)
            ],
            "sample": {"node_id": self._called("node0"), "at_s": BEGAN_AT_S + 0.9 * newest, "text": self.sample}
            if rounds >= 5
            else None,
            "orders": {"allowed": self.orders_refused is None, "why": self.orders_refused or ""},
        }

    def series(self, now_s: float, by: str) -> Document:
        """The document of /api/series at a second of the script."""
        moments = [min(round_ends(n), END_S) for n in range(committed(min(now_s, END_S)))]
        steps = [(n + 1) * STEPS_PER_ROUND for n in range(len(moments))]
        x = {
            "tokens": [step * TOKENS_PER_STEP * 4 for step in steps],
            "time": [BEGAN_AT_S + moment for moment in moments],
            "bytes": [sent_bytes(moment) for moment in moments],
            "step": steps,
        }[by]
        held = [i for i in range(len(moments)) if i % 5 == 4]
        series = [
            ("loss", "Training loss", "nats/token", x, [loss_at(moment) for moment in moments]),
            ("held_out", "Held-out loss", "nats/token", [x[i] for i in held], [held_out_at(moments[i]) for i in held]),
            ("tokens_per_s", "Tokens per second", "tokens/s", x, [rate_at(moment) for moment in moments]),
            ("mfu", "Model FLOPs utilisation", "", x, [mfu_at(moment) for moment in moments]),
            ("nodes", "Nodes", "nodes", x, [float(len(members(moment))) for moment in moments]),
        ]
        keys = ("key", "title", "unit", "x", "y")
        return {"by": by, "series": [dict(zip(keys, one, strict=True)) for one in series]}

    def _called(self, name: str) -> str:
        return (self.names or {}).get(name, name)

    def _present(self, t: float) -> Iterator[str]:
        yield from (name for name in NODES if t >= JOINED_S[name] - 2)
        if t >= 12:
            yield from (f"node{n}" for n in range(len(NODES), len(NODES) + self.extra_nodes))

    def _run(self, t: float, rounds: int) -> Document:
        state, words = words_of_run(t)
        if self.is_paused and state == "training":
            state, words = "paused", f"Paused before round {rounds} by an operator"
        so_far = None if self.cost_per_hour is None else self.cost_per_hour * t / 3600
        return {
            "state": state,
            "words": words,
            "step": rounds * STEPS_PER_ROUND,
            "total_steps": TOTAL_STEPS,
            "round": rounds - 1 if rounds else None,
            "epoch": epoch_at(t) if rounds else None,
            "store": None,
            "tokens": rounds * STEPS_PER_ROUND * TOKENS_PER_STEP * 4,
            "tokens_per_s": rate_at(t) if rounds else None,
            "mfu": mfu_at(t) if rounds else None,
            "left_s": END_S - t if rounds else None,
            "parameters": PARAMETERS,
            "loss": loss_at(t) if rounds else None,
            "held_out": held_out_at(t) if rounds >= 5 else None,
            "config_words": "14.7 M parameters, DiLoCo with 10 inner steps, int8 between nodes, AdamW 4e-4",
            "cost": None if so_far is None else {"so_far": so_far, "per_hour": self.cost_per_hour, "currency": "USD"},
            "sent_bytes": sent_bytes(t),
            "ddp_bytes": sent_bytes(t) * 40,
        }

    def _node(self, name: str, t: float) -> Document:
        state, why, join = standing(name, t)
        if self.is_paused and state == "training":
            state, why = "paused", "stands before the next round, as an operator ordered"
        rounds = committed(min(t, KILLED_S) if name == VICTIM and t < BACK_S else t)
        trains = state in ("training", "finished", "late", "paused")
        number = int(name.removeprefix("node"))
        return {
            "id": self._called(name),
            "state": state,
            "why": why,
            "join": join,
            "step": rounds * STEPS_PER_ROUND + (int((t % ROUND_S) / ROUND_S * 9) if state == "training" else 0),
            "loss": loss_at(t) + 0.01 * math.sin(t + number) if rounds else None,
            "tokens_per_s": (31_400.0 + 700 * math.sin(number * 2 + t / 30)) if trains and rounds else None,
            "mfu": mfu_at(t + number) if trains and rounds else None,
            "round": rounds - 1 if rounds else None,
            "digest": digest(rounds - 1) if rounds else None,
            "sent_bytes": sent_bytes(t) // 4,
            "received_bytes": sent_bytes(t) // 4 + (STATE_BYTES if name == VICTIM and t > FETCHED_S else 0),
            "key": "0a1b2c3d",
            "memory_bytes": 9_300_000_000 if state != "lost" else None,
            "last_at_s": BEGAN_AT_S + (KILLED_S if name == VICTIM and KILLED_S < t < STARTED_AGAIN_S else t),
            "starts": 2 if name == VICTIM and t >= STARTED_AGAIN_S else 1,
        }

    def _waiting(self, t: float) -> Document | None:
        if KILLED_S <= t < NOTICED_S:
            words = f"Everybody waits for {self._called(VICTIM)}: no byte of its transfer comes"
            return {"nodes": [self._called(VICTIM)], "since_s": BEGAN_AT_S + KILLED_S, "words": words}
        return None

    def _link(self, a: str, b: str, t: float) -> Document:
        m, n = int(a.removeprefix("node")), int(b.removeprefix("node"))
        is_away = VICTIM in (a, b) and KILLED_S <= t < FETCHING_S
        rate = None if t < 12 else 96.0 - 17 * abs(m - n) + 4 * ((m * 3 + n) % 4)
        return {
            "from": self._called(a),
            "to": self._called(b),
            "mbit_s": None if is_away or rate is None else max(rate, 3.0),
            "rtt_ms": None if is_away or rate is None else 12.0 + 31.0 * abs(m - n),
            "is_cut_off": is_away and t >= NOTICED_S,
        }

    def _round(self, number: int) -> Document:
        ends = round_ends(number)
        names = members(ends)
        is_long = ends > NOTICED_S and round_ends(number - 1) <= NOTICED_S
        nodes: Document = {}
        for position, name in enumerate(names):
            compute = 7.4 + 0.35 * ((position * 7 + number * 3) % 5)
            transfer = 0.9 + 0.1 * ((number + position) % 3)
            wait = ROUND_S - compute - transfer - 0.15
            nodes[self._called(name)] = {
                "end_s": BEGAN_AT_S + ends,
                "compute_s": compute - (1.5 if is_long else 0.0),
                "wait_s": max(wait, 0.05) + (1.5 if is_long else 0.0),
                "transfer_s": transfer,
                "apply_s": 0.15,
            }
        return {
            "round": number,
            "epoch": epoch_at(ends),
            "committed_at_s": BEGAN_AT_S + ends,
            "members": len(names),
            "retries": 1 if is_long else 0,
            "nodes": nodes,
        }

    def _event(self, at: float, name: str, kind: str, words: str, level: str = "info") -> Document:
        words = words.replace(VICTIM, self._called(VICTIM))
        return {"at_s": BEGAN_AT_S + at, "node_id": self._called(name), "kind": kind, "words": words, "level": level}


class NoRun(ScriptedRun):
    """A board that found no run."""

    def state(self, now_s: float, at_s: float | None = None) -> Document:
        """The document of /api/state where there is no run."""
        document = replace(ScriptedRun()).state(0.0)
        unknown = dict.fromkeys(document["run"]) | {"state": "waiting", "words": "No run here yet"}
        empty: dict[str, list[Any]] = {key: [] for key in ("nodes", "links", "rounds", "membership", "events")}
        return document | empty | {
            "run_id": None,
            "place": "runs",
            "now_s": BEGAN_AT_S + now_s,
            "at_s": BEGAN_AT_S + now_s,
            "from_s": None,
            "to_s": None,
            "age_s": None,
            "run": unknown,
            "guarantees": [
                guarantee | {"state": "unknown", "words": "not seen yet", "evidence": []}
                for guarantee in document["guarantees"]
            ],
        }  # fmt: skip

    def series(self, now_s: float, by: str) -> Document:
        """The document of /api/series where there is no run."""
        return {"by": by, "series": []}


def committed(t: float) -> int:
    """Rounds that are committed at a second of the script."""
    return max(0, int((t - FIRST_ROUND_S) // ROUND_S))


def round_ends(number: int) -> float:
    """Second of the script at which a round is committed."""
    return FIRST_ROUND_S + ROUND_S * (number + 1)


def digest(number: int) -> str:
    """The outer state's digest after a round."""
    return (DIGESTS[number % 6] + DIGESTS[(number // 6 + 1) % 6]) * 4


def epoch_at(t: float) -> int:
    """The epoch: the four came in one after another, then one went and came back."""
    return 4 + (t >= NOTICED_S) + (t >= BACK_S)


def members(t: float) -> Sequence[str]:
    """Members of the round that ends at a second."""
    return [name for name in NODES if name != VICTIM or not KILLED_S <= t < BACK_S + ROUND_S]


def loss_at(t: float) -> float:
    """Training loss in nats per token."""
    return 3.05 + 6.4 * math.exp(-t / 75) + 0.03 * math.sin(t * 1.7) + 0.02 * math.sin(t * 0.31)


def held_out_at(t: float) -> float:
    """Held-out loss in nats per token."""
    return 3.12 + 6.3 * math.exp(-t / 78)


def rate_at(t: float) -> float:
    """Tokens per second of the run."""
    return len(members(t)) * 31_400.0 + 1_900 * math.sin(t / 11)


def mfu_at(t: float) -> float:
    """Model FLOPs utilisation, 0 to 1."""
    return 0.412 + 0.012 * math.sin(t / 17)


def sent_bytes(t: float) -> int:
    """Bytes that all nodes have sent."""
    return int(committed(t) * 4 * 1.5 * PARAMETERS)


def words_of_run(t: float) -> tuple[str, str]:
    """State and words of the run."""
    if t >= END_S:
        return "finished", f"Finished after {TOTAL_STEPS} steps"
    if t < FIRST_ROUND_S + 2:
        return "waiting", "Waiting for the first round: nodes are coming in"
    if NOTICED_S <= t < BACK_S:
        return "training", "Training with 3 of 4 nodes"
    return "training", "Training with 4 nodes"


def standing(name: str, t: float) -> tuple[str, str, Document | None]:
    """State of a node, why, and how far it is on its way in."""
    joined = JOINED_S.get(name, 12.0)
    if t < joined:
        return "joining", "waits to be let in", {"state": "waiting", "percent": None, "bytes_per_s": None}
    if name == VICTIM and KILLED_S <= t < BACK_S:
        if t < NOTICED_S:
            return "late", f"silent for {t - KILLED_S:.0f} s", None
        if t < STARTED_AGAIN_S:
            return "lost", "its guardian is gone: the process was killed", None
        if t < FETCHING_S:
            return "starting", "its trainer starts for the second time", None
        if t < FETCHED_S:
            percent = 100 * (t - FETCHING_S) / (FETCHED_S - FETCHING_S)
            rate = STATE_BYTES / (FETCHED_S - FETCHING_S)
            join = {"state": "fetching", "percent": percent, "bytes_per_s": rate}
            return "joining", "fetches the state from node0, node1 and node3", join
        join = {"state": "verified", "percent": 100.0, "bytes_per_s": None}
        return "joining", "holds the verified state; waits for the next round", join
    if t >= END_S:
        return "finished", "all steps are done", None
    return "training", "", None


def spans(name: str, t: float) -> list[tuple[float, float | None, str]]:
    """Spans of states of a node up to a second of the script."""
    joined = JOINED_S.get(name, 12.0)
    changes = [(joined - 2, "joining"), (joined, "training")]
    if name == VICTIM:
        changes += [(KILLED_S, "late"), (NOTICED_S, "lost"), (STARTED_AGAIN_S, "starting"), (FETCHING_S, "joining")]
        changes += [(BACK_S, "training")]
    changes = [change for change in [*changes, (END_S, "finished")] if change[0] <= t]
    ends = [at for at, _ in changes[1:]]
    return [
        (BEGAN_AT_S + at, BEGAN_AT_S + end if end is not None else None, state)
        for (at, state), end in zip(changes, [*ends, None], strict=True)
    ]


def guarantees(t: float, rounds: int) -> list[Document]:
    """The four guarantees and their evidence."""
    known = rounds > 0
    evidence = [f"round {n}: {len(members(round_ends(n)))} nodes, digest {digest(n)[:8]}" for n in range(rounds)][-5:]
    tokens = f"{rounds * STEPS_PER_ROUND * TOKENS_PER_STEP * 4:,} tokens dealt out, none twice, none left out"
    lost = [f"{VICTIM}: noticed {NOTICED_S - KILLED_S:.1f} s after its last sign of life (bound: 5 s)"]
    return [
        {
            "key": "divergence",
            "title": "No silent divergence",
            "state": "good" if known else "unknown",
            "words": f"All members agree after {rounds} rounds" if known else "No round yet",
            "evidence": evidence,
        },
        {
            "key": "ledger",
            "title": "No silent data loss",
            "state": "good" if known else "unknown",
            "words": "Every token is counted once" if known else "No round yet",
            "evidence": [tokens] if known else [],
        },
        {
            "key": "checkpoint",
            "title": "Only committed state is visible",
            "state": "good" if rounds >= 10 else "unknown",
            "words": f"{rounds // 10} checkpoints verified" if rounds >= 10 else "No checkpoint yet",
            "evidence": [f"step {n * 100}: 176 MB, every file verified" for n in range(1, rounds // 10 + 1)][-5:],
        },
        {
            "key": "detection",
            "title": "Bounded detection",
            "state": "good" if t >= NOTICED_S else "unknown",
            "words": "1 loss, noticed within 1.5 s" if t >= NOTICED_S else "No node was lost yet",
            "evidence": lost if t >= NOTICED_S else [],
        },
    ]


def happened(t: float) -> Iterator[tuple[Any, ...]]:
    """Events up to a second: when, node, kind, words, level."""
    told: list[tuple[Any, ...]] = []
    for name in NODES:
        told.append((JOINED_S[name] - 2, name, "node_started", "The trainer is up"))
        told.append((JOINED_S[name], name, "joined", "Is a member from round 0 on"))
    words = "A checkpoint is durable: 176 MB"
    told += [(round_ends(n) + 1.8, "node0", "checkpoint_committed", words) for n in range(9, committed(t), 10)]
    told += [
        (KILLED_S + 1.2, "node0", "transfer_stalled", f"No byte from {VICTIM} for 1.2 s", "warning"),
        (NOTICED_S, "node1", "peer_lost", f"{VICTIM} was lost", "error"),
        (NOTICED_S + 0.1, "node0", "round_retried", "Round 29 is tried again with 3 of 4 nodes", "warning"),
        (STARTED_AGAIN_S, VICTIM, "node_started", "The trainer is up, for the second time"),
        (FETCHING_S, VICTIM, "recovering", "Fetches the state of round 31 from the others"),
        (FETCHED_S, VICTIM, "recovered", "Holds the verified state of round 33"),
        (BACK_S, VICTIM, "joined", "Is a member again, from round 34 on"),
        (END_S, "node0", "run_finished", "All steps are done"),
    ]
    yield from sorted((one for one in told if one[0] <= t), key=lambda one: one[0])
