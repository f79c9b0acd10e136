"""`outer.robust`: what goes with it, and what is refused with the way out."""

from __future__ import annotations

import pytest
from tests.unit.config.conftest import STORE, Load

from zeroband.config.outer import ClipConfig, CustomConfig, DemoConfig, DilocoConfig, SparseLocoConfig, TrimmedConfig
from zeroband.elastic.membership.trust import ScoringRule
from zeroband.kernels.robust import RobustRule
from zeroband.outer.robust import rule_of
from zeroband.runtime.run_rules import rules_of

CLIP = "--outer.robust.type=clip"


def test_it_is_off_unless_it_is_asked_for(load: Load) -> None:
    config = load("--outer.type=diloco", **STORE)
    assert isinstance(config.outer, DilocoConfig) and config.outer.robust is None
    assert not rules_of(config).is_robust and rule_of(None) is None


def test_each_type_has_its_own_knobs(load: Load) -> None:
    flags = ("--outer.type=diloco", "--comm.sites=off")
    config = load(*flags, "--outer.robust.type=trimmed", "--outer.robust.trim=0.4", **STORE)
    assert isinstance(config.outer, DilocoConfig) and config.outer.robust == TrimmedConfig(type="trimmed", trim=0.4)
    assert rules_of(config).is_robust and rule_of(config.outer.robust) == RobustRule("trimmed", trim=0.4)
    centred = load(*flags, "--outer.robust.type=centered_clip", "--outer.robust.iterations=3", **STORE)
    assert isinstance(centred.outer, DilocoConfig)
    assert rule_of(centred.outer.robust) == RobustRule("centered_clip", iterations=3)


@pytest.mark.parametrize("kind", ["sparseloco", "demo"])
def test_payloads_are_clipped_wherever_they_come_from(load: Load, kind: str) -> None:
    """All members see all of them, whatever sites pass them on."""
    config = load(f"--outer.type={kind}", CLIP, **STORE)
    assert isinstance(config.outer, SparseLocoConfig | DemoConfig) and config.outer.robust == ClipConfig(type="clip")
    assert rules_of(config).is_robust


def test_custom_algorithms_have_it_too(load: Load) -> None:
    flags = ("--outer.type=custom", "--outer.algorithm=examples/fed_adam.py", "--comm.sites=off")
    config = load(*flags, CLIP, **STORE)
    assert isinstance(config.outer, CustomConfig) and rules_of(config).is_robust


def test_scores_of_payloads_are_off_unless_asked_for_and_counted_only_with_robust(load: Load) -> None:
    assert rules_of(load("--outer.type=sparseloco", **STORE)).scoring is None
    shown = load("--outer.type=demo", "--outer.score.rounds=50", **STORE)
    assert rules_of(shown).scoring == ScoringRule(rounds=50, members=3, counts=False)
    counted = load("--outer.type=sparseloco", CLIP, "--outer.score.counts=true", **STORE)
    assert rules_of(counted).scoring == ScoringRule(rounds=8, members=3, counts=True)
