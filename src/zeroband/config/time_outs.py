"""The time-outs of a run: their derivation from one, and their required order. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class TimeOuts:
    """All time-outs of a run in seconds; documented in `FaultConfig`."""

    detect_s: float
    lease_s: float
    renew_s: float
    watch_s: float
    hung_s: float
    gloo_timeout_s: float
    store_s: float

    @staticmethod
    def following(detect_s: float, chosen: Mapping[str, float | None]) -> TimeOuts:
        """Derive all time-outs from detect_s; `chosen`: those that the user set, by name."""
        lease_s = chosen["lease_s"] or detect_s
        hung_s = chosen["hung_s"] or max(300.0, 24 * detect_s)
        return TimeOuts(
            detect_s=detect_s,
            lease_s=lease_s,
            renew_s=chosen["renew_s"] or lease_s / 5,
            watch_s=chosen["watch_s"] or min(detect_s / 10, 0.25),
            hung_s=hung_s,
            gloo_timeout_s=chosen["gloo_timeout_s"] or max(600.0, 120 * detect_s, 2 * hung_s),
            store_s=chosen["store_s"] or max(3600.0, 120 * detect_s),
        )

    def require_order(self) -> None:
        """Raise ValueError for two time-outs that contradict each other."""
        order = (
            ("lease_s", self.lease_s, "detect_s", self.detect_s),
            ("renew_s", self.renew_s, "lease_s / 3", self.lease_s / 3),
            ("watch_s", self.watch_s, "detect_s / 2", self.detect_s / 2),
            ("detect_s", self.detect_s, "hung_s", self.hung_s),
            ("hung_s", self.hung_s, "gloo_timeout_s", self.gloo_timeout_s),
            ("detect_s", self.detect_s, "store_s", self.store_s),
        )
        for name, value, bound, most in order:
            if value > most:
                raise ValueError(
                    f"fault.{name}={value:g} is above fault.{bound}={most:g}; leave them out to have them follow from "
                    "fault.detect_s"
                )


TIME_OUT_NAMES = tuple(f.name for f in fields(TimeOuts) if f.name != "detect_s")
"""Time-outs that a user may set besides detect_s."""
