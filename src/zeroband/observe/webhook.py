"""Alerts to a webhook: pure rules turn a node's lines into alerts, and a BackgroundSink sends them.

The sink's thread waits for the receiver, and rate and attempts are bounded, so a slow or failing receiver costs
training nothing.
"""

from __future__ import annotations

import math
import random
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from zeroband.config.schema import AlertKind
from zeroband.observe.jsonl import encode_line
from zeroband.observe.log import get_logger
from zeroband.observe.sinks import Service
from zeroband.observe.view import node_id_of_member

_SPIKE = 2.0
"""Factor over the mean of the previous losses."""
_LOSSES, _LEAST_LOSSES = 20, 5
_LEAST_FREE = 0.05

_ATTEMPTS = 5
_ANSWER_S = 5.0
_MOST, _MOST_IN_S = 20, 600.0
"""Rate limit of a node: messages per seconds."""

_OF_ONE_NODE: Mapping[str, tuple[AlertKind, str]] = {
    "update_refused": ("loss_spike", "update not finite and dropped"),
    "rollback_ordered": ("loss_spike", "the run rolls back to a checkpoint"),
    "rollback_given_up": ("loss_spike", "the run is paused: no rollback is possible or allowed"),
    "checkpoint_failed": ("checkpoint", "a checkpoint failed"),
    "checkpoint_left_out": ("checkpoint", "a checkpoint was committed without this node's own state"),
    "run_failed": ("run_failed", "the trainer failed"),
}
"""Events that each node reports for itself."""
_OVER = ("left", "run_finished", "run_failed")

_log = get_logger(__name__)


@dataclass(frozen=True)
class Alert:
    """A message about the run."""

    kind: AlertKind
    words: str
    at_s: float | None
    """Wall clock of the node, for display; None: now."""
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])


class AlertRules:
    """Derives alerts from a node's lines and from time passing. Pure.

    What all members see is reported by the one with the smallest node id. `now_s`: of a monotonic clock.
    """

    def __init__(self, node_id: str, *, stalled_s: float) -> None:
        self._node_id = node_id
        self._stalled_s = stalled_s
        self._members: tuple[str, ...] = ()
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._is_odd = False
        self._is_full = False
        self._progress_s: float | None = None
        """Time of the last progress; None while none is expected."""

    def _speaks_for(self, members: Collection[str]) -> bool:
        return self._node_id == min(map(node_id_of_member, members), default=self._node_id)

    def add(self, record: Mapping[str, Any], now_s: float) -> Iterator[Alert]:
        """Add a line of events.jsonl or metrics.jsonl."""
        if "kind" in record:
            yield from self._add_event(record, now_s)
        else:
            self._progress_s = now_s
            if "train/loss" in record:
                yield from self._judge_loss(float(record["train/loss"]), record)

    def _add_event(self, record: Mapping[str, Any], now_s: float) -> Iterator[Alert]:
        kind, at_s = str(record["kind"]), float(record["at_s"])
        fields = {name: value for name, value in record.items() if name not in ("kind", "at_s")}
        if kind in ("joined", "round_committed", "resumed"):
            self._progress_s = now_s
        elif kind in ("paused", "fenced", *_OVER):
            self._progress_s = None
        if kind in ("epoch_changed", "round_committed"):
            self._members = tuple(record["members"])
        if kind == "peer_lost":
            lost = record["member_ids"]
            if self._speaks_for([member for member in self._members if member not in lost]):
                yield Alert("node_lost", f"lost {', '.join(map(node_id_of_member, lost))}", at_s, fields)
        elif kind == "run_finished" and self._speaks_for(self._members):
            yield Alert("run_finished", "the run is done", at_s, fields)
        elif kind in _OF_ONE_NODE:
            alert_kind, words = _OF_ONE_NODE[kind]
            why = fields.get("reason") or fields.get("error")
            yield Alert(alert_kind, f"{words}: {why}" if why else words, at_s, fields)

    def _judge_loss(self, loss: float, record: Mapping[str, Any]) -> Iterator[Alert]:
        usual = sum(self._losses) / len(self._losses) if len(self._losses) >= _LEAST_LOSSES else math.inf
        is_odd, was_odd = not loss <= _SPIKE * usual or math.isinf(loss), self._is_odd
        self._is_odd = is_odd
        if not is_odd:
            self._losses.append(loss)
        elif not was_odd and self._speaks_for(self._members):
            words = f"the loss is {loss:.4g}" + ("" if math.isinf(usual) else f", previously {usual:.4g}")
            yield Alert("loss_spike", words, float(record["at_s"]), {"step": record["step"], "loss": str(loss)})

    def pass_time(self, now_s: float, free_ratio: float | None) -> Iterator[Alert]:
        """Check for a stall and a full disk. `free_ratio`: of the disk of run.dir, if known."""
        if self._progress_s is not None and now_s - self._progress_s > self._stalled_s:
            silent_s, self._progress_s = now_s - self._progress_s, None  # once, until the next progress
            if self._speaks_for(self._members):
                yield Alert("run_stalled", f"no step for {silent_s:.0f} s", None, {"silent_s": round(silent_s)})
        is_full, was_full = free_ratio is not None and free_ratio < _LEAST_FREE, self._is_full
        self._is_full = is_full
        if is_full and not was_full:
            yield Alert("disk", f"{free_ratio:.1%} of the disk of run.dir is free", None, {"free_ratio": free_ratio})


class Webhook(Service):
    """Posts alerts as JSON: `{text, run, node, kind, words, at_s, fields}`; Slack shows `text`.

    `url` is a secret and never logged. Redirects are not followed. A message is dropped after some failed attempts;
    the first failure and the recovery are logged.
    """

    every_s = 5.0

    def __init__(
        self,
        url: str,
        *,
        kinds: Collection[str],
        run_id: str,
        node_id: str,
        rules: AlertRules,
        free_ratio: Callable[[], float | None],
    ) -> None:
        self._url, self._kinds, self._rules, self._free_ratio = url, frozenset(kinds), rules, free_ratio
        self._who = {"run": run_id, "node": node_id}
        self._sent_at_s: deque[float] = deque(maxlen=_MOST)
        """Times of the newest messages, failed ones included."""
        self._dropped = 0
        self._is_failing = False
        self._opener = urllib.request.build_opener(_NoRedirect)

    def write(self, record: Mapping[str, Any]) -> None:
        self._send(self._rules.add(record, time.monotonic()))

    def pass_time(self) -> None:
        self._send(self._rules.pass_time(time.monotonic(), self._free_ratio()))

    def close(self) -> None: ...

    def _send(self, alerts: Iterable[Alert]) -> None:
        for alert in alerts:
            if alert.kind not in self._kinds:
                continue
            now_s = time.monotonic()
            if len(self._sent_at_s) == _MOST and now_s - self._sent_at_s[0] < _MOST_IN_S:
                self._dropped += 1
                continue
            self._sent_at_s.append(now_s)
            failure = self._post_with_retries(self._body_of(alert))
            if not failure:
                self._dropped = 0  # the text reported the count
            self._note(failure)

    def _post_with_retries(self, body: bytes) -> str:
        """Post a message, up to `_ATTEMPTS` times with growing pauses. Returns the last error, empty on success."""
        for attempt in range(1, _ATTEMPTS):
            failure, is_final = self._post(body)
            if not failure or is_final:
                return failure
            time.sleep(random.uniform(0.5, 1.0) * 2 ** (attempt - 1))
        return self._post(body)[0]

    def _note(self, failure: str) -> None:
        if bool(failure) != self._is_failing:
            self._is_failing = bool(failure)
            if failure:
                _log.warning("the webhook is failing", extra={"fields": {"reason": failure}})
            else:
                _log.info("the webhook works again")

    def _body_of(self, alert: Alert) -> bytes:
        text = f"zeroband run {self._who['run']}, node {self._who['node']}: {alert.kind}: {alert.words}"
        if self._dropped:
            text += f" ({self._dropped} messages dropped before)"
        at_s = time.time() if alert.at_s is None else alert.at_s
        body = {"text": text, **self._who, "kind": alert.kind, "words": alert.words, "at_s": round(at_s, 3)}
        return encode_line({**body, "fields": dict(alert.fields)})

    def _post(self, body: bytes) -> tuple[str, bool]:
        """Post a message. Returns the error, empty on success, and whether retrying is useless."""
        headers = {"Content-Type": "application/json", "User-Agent": "zeroband"}
        request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
        try:
            with self._opener.open(request, timeout=_ANSWER_S) as answer:
                answer.read(1)
        except urllib.error.HTTPError as error:
            return f"HTTP status {error.code}", error.code < 500 and error.code not in (408, 429)
        except Exception as error:  # noqa: BLE001 - http.client and ssl raise many kinds; none may end the thread
            reason = getattr(error, "reason", None)
            return f"{urlsplit(self._url).hostname}: {reason or type(error).__name__}", False
        return "", False


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, so that no other server receives alerts."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None
