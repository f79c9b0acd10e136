"""Records as they come back from JSON: what `to_record` and `to_json` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from zeroband.elastic.membership.epoch import Opening, Peer, Ready, Verdict, View
from zeroband.elastic.membership.topology import LinkTable


def view_to_record(view: View) -> dict[str, Any]:
    """A view as JSON-ready values, for a person to read."""
    return {**asdict(view), "alive": sorted(view.alive)}


def opening_from(record: Mapping[str, Any]) -> Opening:
    """The inverse of `to_record`."""
    fields = _with_tuples(record)
    fields["network"] = LinkTable(**_with_tuples(record["network"]))
    return Opening(**fields)


def _with_tuples(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record whose lists JSON had made of tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}


def verdict_from(record: Mapping[str, Any]) -> Verdict:
    """The inverse of `to_record`."""
    return Verdict(opening_from(record["opening"]), record["digest"], record["record"])


def ready_from(record: Mapping[str, Any]) -> Ready:
    """The inverse of `to_record`."""
    return Ready(**record)


def peer_from(record: Mapping[str, Any]) -> Peer:
    """The inverse of `to_record`."""
    fields: dict[str, Any] = {**record, "cut_off": tuple(record["cut_off"])}
    return Peer(**fields)
