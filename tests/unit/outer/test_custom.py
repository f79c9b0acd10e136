"""An algorithm from a file of its own: found, checked, and a full member of the family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zeroband.config.outer import ClipConfig, CustomConfig, DemoConfig, DilocoConfig, TrimmedConfig
from zeroband.errors import ConfigError
from zeroband.kernels.one_rounding import exact_sqrt
from zeroband.outer.custom import load_algorithm
from zeroband.outer.registry import are_rounds_steps
from zeroband.state.digest import digest_of

FED_ADAM = Path(__file__).resolve().parents[3] / "examples" / "fed_adam.py"
LR, BETA1, BETA2, TAU = 0.003, 0.9, 0.99, 0.001
StartRun = Callable[..., Any]
Noise = Callable[..., Tensor]


def custom(path: Path | str = FED_ADAM, *settings: str) -> CustomConfig:
    return CustomConfig(type="custom", algorithm=str(path), inner_steps=1, settings=settings)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    """written(source): a file of this content."""

    def write(source: str) -> Path:
        path = tmp_path / "algorithm.py"
        path.write_text(source)
        return path

    return write


def test_it_is_equal_to_the_formula_over_twenty_rounds(start_run: StartRun, noise: Noise) -> None:
    run = start_run(custom(), "a", "b")
    theta = run["a"].params.clone()
    m, v = torch.zeros(22), torch.zeros(22)
    for number in range(20):
        updates = {"a": noise(number), "b": noise(100 + number)}
        reports = run.round(**updates)
        d = torch.zeros(22)
        for update in updates.values():
            d = d + (theta - (theta + update)) * 0.5
        m = m * BETA1 + d * (1 - BETA1)
        v = v * BETA2 + d * d * (1 - BETA2)
        theta = theta - m / (exact_sqrt(v) + TAU) * LR
        assert {report.state_digest for report in reports.values()} == {digest_of(theta, m, v)}, number
        assert torch.equal(run["a"].params, theta)


def test_step_may_use_operations_that_processors_compute_differently(
    start_run: StartRun, noise: Noise, written: Callable[[str], Path]
) -> None:
    path = written(
        "from zeroband.outer.algorithm import Algorithm\n"
        "class Mine(Algorithm):\n"
        "    def step(self, outer, result, *, outer_step):\n"
        "        outer['params'].addcdiv_(result, result.square().sqrt().add_(0.1), value=-0.7)\n"
        "ALGORITHM = Mine\n"
    )
    run = start_run(custom(path), "a")
    theta, update = run["a"].params.clone(), noise(1)
    run.round(a=update)
    d = theta - (theta + update)
    assert torch.equal(run["a"].params, theta + d / (exact_sqrt(d * d) + 0.1) * -0.7)


def test_settings_reach_the_step(start_run: StartRun, noise: Noise) -> None:
    run = start_run(custom(FED_ADAM, "lr=0.5", "beta1=0", "tau=1e-3"), "a")
    theta, update = run["a"].params.clone(), noise(1)
    run.round(a=update)
    d = theta - (theta + update)
    assert torch.equal(run["a"].params, theta - d / (exact_sqrt(d * d * (1 - BETA2)) + TAU) * 0.5)


def test_round_that_loses_a_member_goes_on_with_the_others(start_run: StartRun, noise: Noise) -> None:
    run = start_run(custom(), "a", "b", "c", inject={"c": ["reduced@1=SIGKILL"]})
    reports = run.round(a=noise(1), b=noise(2), c=noise(3))
    assert {name: (report.members, report.retries) for name, report in reports.items()} == {
        "a": (("a", "b"), 1),
        "b": (("a", "b"), 1),
    }
    assert len({report.state_digest for report in reports.values()}) == 1


def test_joiner_gets_the_whole_outer_state(start_run: StartRun, noise: Noise) -> None:
    run = start_run(custom(), "a", "b")
    run.round(a=noise(1), b=noise(2))
    copy = run["a"].outer.copy_state()
    assert tuple(copy.sections) == ("params", "mean", "squares")
    run.add("c").outer.adopt(copy.round, copy.record, copy.sections)
    reports = run.round_with_joiner("c", a=noise(3), b=noise(4))
    assert len(reports) == 3 and len({report.state_digest for report in reports.values()}) == 1


def test_update_that_is_not_finite_is_left_out(start_run: StartRun, noise: Noise) -> None:
    run = start_run(custom(), "a", "b")
    reports = run.round(a=noise(1), b=torch.full((22,), float("nan")))
    assert (reports["b"].weights, reports["b"].is_left_out) == ((10, 0), True)
    assert run["b"].params.isfinite().all() and torch.equal(run["a"].params, run["b"].params)


def test_one_that_synchronises_at_every_step_is_known_as_such(written: Callable[[str], Path]) -> None:
    """Its inner optimizer must get the same bits on nodes with other numbers of ranks."""
    path = written("from zeroband.outer.ddp import Ddp\n\nclass Mine(Ddp): pass\n\nALGORITHM = Mine\n")
    assert (load_algorithm(custom(path)).is_every_step, load_algorithm(custom()).is_every_step) == (True, False)


def test_rounds_are_steps_where_the_class_says_so(written: Callable[[str], Path]) -> None:
    mine = custom(written("from zeroband.outer.ddp import Ddp\n\nclass Mine(Ddp): pass\n\nALGORITHM = Mine\n"))
    for config in (mine, DemoConfig(type="demo"), None):
        assert are_rounds_steps(config)
    for config in (custom(), DilocoConfig(type="diloco")):
        assert not are_rounds_steps(config)


@pytest.mark.parametrize(
    "rounds",
    [{}, {"inner_steps": 4}, {"inner_seconds": 2.0}, {"inner_steps": 1, "straggler_deadline_s": 1.0}],
    ids=["nothing set", "steps", "seconds", "deadline"],
)
def test_one_that_synchronises_at_every_step_needs_rounds_of_one(
    written: Callable[[str], Path], rounds: dict[str, Any]
) -> None:
    """Samples are dealt out for a round: with longer ones some were trained twice, and others never."""
    path = written("from zeroband.outer.ddp import Ddp\n\nclass Mine(Ddp): pass\n\nALGORITHM = Mine\n")
    with pytest.raises(ConfigError, match=r"algorithm\.py' is a StepAlgorithm.*set outer\.inner_steps = 1, and"):
        load_algorithm(CustomConfig(type="custom", algorithm=str(path), **rounds))


ROBUST = ClipConfig(type="clip")


def test_one_that_synchronises_at_every_step_is_never_robust(written: Callable[[str], Path]) -> None:
    path = written("from zeroband.outer.ddp import Ddp\n\nclass Mine(Ddp): pass\n\nALGORITHM = Mine\n")
    config = CustomConfig(type="custom", algorithm=str(path), inner_steps=1, robust=ROBUST)
    with pytest.raises(ConfigError, match=r"is a StepAlgorithm; outer\.robust is for many inner steps"):
        load_algorithm(config)


def test_one_with_an_exchange_that_adds_up_is_not_taken_for_robust(
    start_run: StartRun, written: Callable[[str], Path]
) -> None:
    """It gives its own, so the section would change nothing."""
    path = written(
        "from zeroband.elastic.rounds.exchange import MeanExchange\nfrom zeroband.outer.algorithm import Algorithm\n"
        "class Mine(Algorithm):\n"
        "    def exchange(self): return MeanExchange(self.parts)\n"
        "    def step(self, outer, result, *, outer_step): outer['params'].sub_(result)\n"
        "ALGORITHM = Mine\n"
    )
    with pytest.raises(ConfigError, match=r"has its own exchange, which outer\.robust does not change"):
        start_run(custom(path).model_copy(update={"robust": ROBUST}), "a")


def test_robust_one_moves_by_what_most_agree_on(start_run: StartRun, noise: Noise) -> None:
    run = start_run(custom().model_copy(update={"robust": TrimmedConfig(type="trimmed")}), "a", "b", "c")
    before = run["a"].params
    run.round(a=noise(1), b=1.001 * noise(1), c=-1000 * noise(1))  # equal ones would count once
    delta = before - (before + noise(1))
    step = (1 - BETA1) * delta / (((1 - BETA2) * delta.square()).sqrt() + TAU)
    torch.testing.assert_close(run["a"].params, before - LR * step)


def test_eager_updates_need_an_outer_step_that_is_sgd(written: Callable[[str], Path]) -> None:
    eager = {"inner_steps": 4, "overlap": "full", "merge": "eager"}
    with pytest.raises(ConfigError, match=r"outer\.merge = \"eager\" needs an outer step that is SGD"):
        load_algorithm(CustomConfig(type="custom", algorithm=str(FED_ADAM), **eager))
    path = written(
        "from zeroband.config.outer import OuterSGDConfig\nfrom zeroband.outer.algorithm import Algorithm\n"
        "class Plain(Algorithm):\n    outer_sgd = OuterSGDConfig(lr=1.0, momentum=0.0)\n"
        "    def step(self, outer, result, *, outer_step): outer['params'].sub_(result)\n"
        "ALGORITHM = Plain\n"
    )
    assert not load_algorithm(CustomConfig(type="custom", algorithm=str(path), **eager)).is_every_step


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", r"ALGORITHM is no Algorithm; end the file with ALGORITHM = CLASS"),
        ("ALGORITHM = 3", r"ALGORITHM is no Algorithm"),
        ("class Empty: sections = ()\nALGORITHM = Empty", r"ALGORITHM is no Algorithm"),
        (
            "from zeroband.outer.algorithm import Algorithm\nclass Half(Algorithm): pass\nALGORITHM = Half",
            r"ALGORITHM has no step; end the file",
        ),
        (
            "from zeroband.outer.many_steps import PARAMS, ManySteps\n"
            "class Old(ManySteps):\n    def take_step(self, outer, result, *, outer_step): pass\nALGORITHM = Old",
            r"has the form of an earlier version; .*docs/tutorials/write-an-algorithm\.md shows",
        ),
        (
            "from zeroband.outer.ddp import Ddp\n"
            "class Old(Ddp):\n    def sync_gradients(self, step, tokens): pass\nALGORITHM = Old",
            r"has the form of an earlier version; .*docs/tutorials/write-an-algorithm\.md shows",
        ),
        ("import nowhere", r"cannot be imported: ModuleNotFoundError\(\"No module named 'nowhere'\"\)"),
        ("x = (", r"cannot be imported: SyntaxError"),
    ],
)
def test_file_without_an_algorithm_is_refused(written: Callable[[str], Path], source: str, message: str) -> None:
    path = written(source)
    with pytest.raises(ConfigError, match=message) as caught:
        load_algorithm(custom(path))
    assert str(path) in str(caught.value)


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"outer\.algorithm='.*absent\.py' cannot be read: No such file"):
        load_algorithm(custom(tmp_path / "absent.py"))


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "algorithm.txt").write_text("x = 1")
    with pytest.raises(ConfigError, match=r"is no Python file"):
        load_algorithm(custom(tmp_path / "algorithm.txt"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lr", r"'lr' is no KEY=VALUE"),
        ("rate=0.1", r"rate: Extra inputs are not permitted; .*fed_adam\.py has lr, beta1, beta2, tau"),
        ("lr=fast", r"lr: Input should be a valid number"),
        ("beta1=1", r"beta1: Input should be less than 1"),
    ],
)
def test_setting_that_the_algorithm_does_not_have_is_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_algorithm(custom(FED_ADAM, setting))


def test_digest_is_of_the_content_and_not_of_the_place(written: Callable[[str], Path]) -> None:
    """Nodes compare it when they join: with another algorithm they would not hold one state."""
    source = FED_ADAM.read_text()
    assert load_algorithm(custom()).digest == load_algorithm(custom(written(source))).digest
    assert load_algorithm(custom()).digest != load_algorithm(custom(written(source + "\n"))).digest
