"""What `config/stability.py` says of a run's configuration: its settings read off the [outer] section. Pure.

Reads the section by the names of its keys, so an algorithm that is added later is judged as soon as it has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroband.config.outer import RoundsConfig, SparseLocoConfig
from zeroband.config.schema import RunConfig
from zeroband.config.stability import AlgorithmSetting, Caution, Method, cautions

UNTIL_THE_NEXT = "full"
"""`outer.overlap` of a mean that travels until the next one is sent: a whole round where there is one fragment."""


def method_of(outer: Mapping[str, Any]) -> Method | None:
    """The method that an [outer] section describes; None for one that no rule knows."""
    match outer["type"]:
        case "ddp" | "demo" | "sparseloco" as method:
            return method
        case "diloco":
            return _of_diloco_family(outer)
        case _:
            return None


def _of_diloco_family(outer: Mapping[str, Any]) -> Method:
    overlap, fragments = outer.get("overlap") or 0, outer.get("fragments") or 1
    if overlap and outer.get("merge") == "eager":
        return "eager"
    if fragments == 1 and overlap in (UNTIL_THE_NEXT, round_steps(outer)):
        return "delayed"
    return "streaming" if overlap or fragments > 1 else "diloco"


def round_steps(outer: Mapping[str, Any]) -> int | None:
    """Inner steps between two outer steps; None where a time decides."""
    if outer["type"] in ("ddp", "demo"):
        return 1
    if outer.get("inner_steps"):
        return int(outer["inner_steps"])
    usual = SparseLocoConfig if outer["type"] == "sparseloco" else RoundsConfig
    return None if outer.get("inner_seconds") else usual.usual_inner_steps


def overlap_steps(outer: Mapping[str, Any]) -> int:
    """Inner steps during which a mean may travel."""
    overlap = outer.get("overlap") or 0
    if overlap == UNTIL_THE_NEXT:
        return (round_steps(outer) or 0) // (outer.get("fragments") or 1)
    return int(overlap)


def setting_of(config: RunConfig, *, params: float | None) -> AlgorithmSetting | None:
    """What the rules look at; None for a node that trains alone. `params`: of the model, where known."""
    if config.outer is None:
        return None
    outer = config.outer.model_dump()
    method = method_of(outer)
    if method is None:
        return None
    usual = AlgorithmSetting(method, config.elastic.start_nodes)
    optimizer = outer.get("optimizer") or outer
    k, chunk = outer.get("k"), outer.get("chunk")
    return AlgorithmSetting(
        method=method,
        nodes=config.elastic.start_nodes,
        params=params,
        inner_steps=round_steps(outer),
        total_steps=config.train.total_steps,
        lr=optimizer.get("lr", usual.lr),
        momentum=optimizer.get("momentum", usual.momentum),
        overlap=overlap_steps(outer),
        alpha=outer.get("alpha", usual.alpha),
        density=k / chunk**2 if method == "sparseloco" and k and chunk else None,
        decay=outer.get("decay", usual.decay),
    )


def cautions_of(config: RunConfig, *, params: float | None = None) -> tuple[Caution, ...]:
    """What is known to go wrong with a run, the worst first; the nodes are those that it waits for at its start."""
    setting = setting_of(config, params=params)
    return () if setting is None else cautions(setting)
