"""The configuration's settings of rounds, as the rules of membership and outer algorithms take them. Pure functions."""

from __future__ import annotations

from dataclasses import replace

from zeroband.config.outer import DdpConfig, DemoConfig, RoundsConfig, SparseLocoConfig
from zeroband.config.schema import RunConfig
from zeroband.elastic.membership.progress import RunShape
from zeroband.elastic.membership.round_rules import Rules
from zeroband.elastic.membership.trust import ScoringRule
from zeroband.elastic.rounds.phase import PhaseLength


def shape_of(config: RunConfig, sample_tokens: int = 0) -> RunShape:
    """Return what turns rounds into steps and samples. `sample_tokens`: most targets of a sample; 0: unknown."""
    shape = RunShape(config.train.total_steps, config.train.batch_size, sample_tokens=sample_tokens)
    match config.outer:
        case RoundsConfig() as outer:
            return replace(shape, reads_ahead=outer.overlap != 0, closing_rounds=outer.fragments - 1)
        case DemoConfig() as outer:
            return replace(shape, reads_ahead=outer.overlap != 0)
        case _:
            return shape


def phase_length_of(config: RunConfig) -> PhaseLength:
    """Return the length of a phase; with DDP and DeMo one step."""
    if not isinstance(config.outer, RoundsConfig):
        return PhaseLength(1)
    return PhaseLength(config.outer.phase_steps, config.outer.phase_seconds)


def scoring_of(config: RunConfig) -> ScoringRule | None:
    """Return which payloads are scored by held-out loss, if any."""
    score = config.outer.score if isinstance(config.outer, SparseLocoConfig | DemoConfig) else None
    return None if score is None else ScoringRule(score.rounds, score.members, score.counts)


def rules_of(config: RunConfig, transfer_bytes: int = 0, sample_tokens: int = 0) -> Rules:
    """Return the rules of a round. `transfer_bytes`: of a contribution; 0: links do not matter.

    `sample_tokens`: as for `shape_of`.
    """
    outer, elastic = config.outer, config.elastic
    weighs_equally = isinstance(outer, RoundsConfig | DdpConfig) and outer.weights == "equal"
    rules = Rules(
        elastic.min_nodes,
        elastic.start_nodes,
        has_several_stores=config.store.are_several,
        counts_equally=weighs_equally,
        is_robust=isinstance(outer, RoundsConfig | DemoConfig) and outer.robust is not None,
        scoring=scoring_of(config),
        sites=config.comm.sites if config.comm.backend == "native" else "off",
        shape=shape_of(config, sample_tokens),
    )
    if not isinstance(outer, RoundsConfig):
        return rules
    return replace(
        rules,
        straggler_deadline_s=outer.straggler_deadline_s,
        straggler_grace=outer.straggler_grace,
        quorum=outer.quorum,
        transfer_bytes=transfer_bytes,
        syncs_on_demand=outer.overlap_steps is None and outer.fragments == 1 and outer.inner_seconds is not None,
        hidden=1.0 if outer.overlap_steps is None else outer.overlap_steps / outer.phase_steps,
    )
