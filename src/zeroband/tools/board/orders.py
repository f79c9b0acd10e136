"""Orders from the page to a run: require the run's token, and go the way of `zeroband ctl`."""

from __future__ import annotations

import hmac
import ipaddress
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from http import HTTPStatus

from zeroband.config import RunConfig
from zeroband.errors import ConfigError, StoreLost, ZerobandError
from zeroband.tools.ctl import Order, obey, open_store

ACTIONS = ("pause", "resume", "drain", "rollback")
WRONG_TOKENS, WRONG_TOKENS_S = 5, 60.0
"""Rate limit of an address: after this number of wrong tokens in this time, all its tokens are refused."""
ADDRESSES = 256
"""Addresses that are tracked; while all of them sent wrong tokens recently, new ones are refused. This limits guessing
to ADDRESSES * WRONG_TOKENS = 1280 tries per minute."""

Give = Callable[[Order], str]
"""Gives an order to the run and returns a message. Raises ConfigError, StoreLost."""


class OrderRefused(ZerobandError):
    """The reason why an order was refused, with an HTTP status."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


def give_through_store(config: RunConfig) -> Give:
    """Return the function that gives orders as `zeroband ctl` does."""

    def give(order: Order) -> str:
        with closing(open_store(config)) as store:
            return obey(order, config, store)

    return give


class OrderDesk:
    """Takes orders with the run's token; without `token`, none. Any thread."""

    def __init__(self, token: str | None, give: Give | None, *, now: Callable[[], float] = time.monotonic) -> None:
        self._token = token
        self._give = give
        self._now = now
        self._lock = threading.Lock()
        self._wrong: dict[str, deque[float]] = {}
        """Times of the newest wrong tokens, by address."""

    @property
    def is_open(self) -> bool:
        return self._token is not None and self._give is not None

    @property
    def why(self) -> str:
        """What an operator needs for giving orders."""
        if self.is_open:
            return "enter the run's token, run.token"
        return (
            "this page is read-only; for orders, start it with the run's store.url and run.token, as for `zeroband ctl`"
        )

    def take(self, authorization: str | None, asked: object, *, client: str) -> str:
        """Check the token and give the order. Returns a message. Raises OrderRefused. `client`: its address."""
        if self._token is None or self._give is None:
            raise OrderRefused(HTTPStatus.FORBIDDEN, self.why)
        self._require_token(self._token, authorization, network_of(client))
        order = order_of(asked)
        try:
            return self._give(order)
        except ConfigError as error:
            raise OrderRefused(HTTPStatus.CONFLICT, str(error)) from error
        except StoreLost as error:
            raise OrderRefused(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error

    def _require_token(self, token: str, authorization: str | None, address: str) -> None:
        scheme, _, given = (authorization or "").partition(" ")
        with self._lock:
            now_s = self._now()
            self._wrong = {a: times for a, times in self._wrong.items() if now_s - times[-1] < WRONG_TOKENS_S}
            times = self._wrong.get(address, deque(maxlen=WRONG_TOKENS))
            has_had_its_tries = len(times) == WRONG_TOKENS and now_s - times[0] < WRONG_TOKENS_S
            if has_had_its_tries or (not times and len(self._wrong) == ADDRESSES):
                raise OrderRefused(HTTPStatus.TOO_MANY_REQUESTS, "too many wrong tokens; try again in a minute")
            is_right = hmac.compare_digest(given.encode(), token.encode()) and scheme.lower() == "bearer"
            if not is_right:
                times.append(now_s)
                self._wrong[address] = times
                raise OrderRefused(HTTPStatus.FORBIDDEN, "this is not the run's token")


def network_of(client: str) -> str:
    """Return the address, for IPv6 its /64, which belongs to one machine."""
    try:
        address = ipaddress.ip_address(client.partition("%")[0])
    except ValueError:
        return client
    return client if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))


def order_of(asked: object) -> Order:
    """Parse the order in a request. Raises OrderRefused."""
    if not isinstance(asked, Mapping):
        raise OrderRefused(HTTPStatus.BAD_REQUEST, "an order must be a JSON object")
    fields: Mapping[object, object] = asked
    action, node, step = fields.get("order"), fields.get("node"), fields.get("step")
    if not isinstance(action, str) or action not in ACTIONS:
        raise OrderRefused(HTTPStatus.BAD_REQUEST, f"order must be one of {', '.join(ACTIONS)}")
    if action == "drain" and not isinstance(node, str):
        raise OrderRefused(HTTPStatus.BAD_REQUEST, "drain needs node")
    if action == "rollback" and (not isinstance(step, int) or isinstance(step, bool)):
        raise OrderRefused(HTTPStatus.BAD_REQUEST, "rollback needs the step of a checkpoint")
    return Order(action, node if isinstance(node, str) else "", step if isinstance(step, int) else 0)
