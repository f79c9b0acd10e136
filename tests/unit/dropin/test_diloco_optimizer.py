"""One node in a run of its own, with a real store: the loop of a user, and what is left when it ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.unit.dropin.conftest import ADAMW, Join
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import zeroband
from zeroband.dropin.peer_checks import PeerChecks
from zeroband.dropin.session import Session
from zeroband.dropin.settings import address_of
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import ConfigError, Fenced, RunOver
from zeroband.outer.many_steps import ManySteps

pytestmark = pytest.mark.slow

COSINE = partial(CosineAnnealingLR, T_max=10)
AVERAGE = partial(torch.optim.SGD, lr=1.0)


def model_of(width: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(8, 4, generator=generator)).square().mean()


def train(
    model: nn.Module, optimizer: Optimizer, steps: int, after_step: Callable[[], object] = lambda: None
) -> Tensor:
    """The loop of docs/dropin.md; the parameters after it."""
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        after_step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def shared_memory(run_id: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"zeroband-{run_id}@*"))


def test_averages_of_one_node_are_plain_training_bit_for_bit(join: Join) -> None:
    alone = model_of()
    inner = ADAMW(alone.parameters())
    schedule = COSINE(inner)
    wanted = train(alone, inner, 7, schedule.step)
    model = model_of()
    optimizer = join(model, outer_optimizer=AVERAGE, lr_scheduler=COSINE)
    rates: list[float] = []
    got = train(model, optimizer, 7, lambda: rates.append(optimizer.param_groups[0]["lr"]))
    assert torch.equal(got, wanted)
    assert rates[-1] == inner.param_groups[0]["lr"] != rates[0]
    assert (optimizer.inner_step, optimizer.last_round.round, optimizer.last_round.weights) == (7, 3, (16,))


NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
ADAM = partial(torch.optim.Adam, lr=0.01)


@pytest.mark.parametrize(
    ("asked", "torchs"), [({}, NESTEROV), ({"outer_optimizer": ADAM}, ADAM)], ids=["usual", "Adam"]
)
def test_outer_steps_are_those_of_torchs_optimizer_on_what_the_inner_steps_changed(
    join: Join, asked: dict[str, Any], torchs: Callable[..., Optimizer]
) -> None:
    alone, outer = model_of(), model_of()
    inner, stepping = ADAMW(alone.parameters()), torchs(outer.parameters())
    for step in range(6):
        loss_of(alone, step).backward()
        inner.step()
        inner.zero_grad()
        if step % 2 == 1:
            for ours, theirs in zip(outer.parameters(), alone.parameters(), strict=True):
                ours.grad = (ours - theirs).detach()
            stepping.step()
            alone.load_state_dict(outer.state_dict())
    model = model_of()
    got = train(model, join(model, **asked), 6)
    torch.testing.assert_close(got, nn.utils.parameters_to_vector(alone.parameters()).detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("inner", [ADAMW, partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.RMSprop])
def test_ddp_of_one_node_is_plain_training(join: Join, inner: Any) -> None:
    alone, model = model_of(), model_of()
    plain = inner(alone.parameters())
    schedule = COSINE(plain)
    wanted = train(alone, plain, 5, schedule.step)
    optimizer = join(
        model, inner_optimizer=inner, inner_steps=None, lr_scheduler=COSINE, settings={"outer.type": "ddp"}
    )
    got = train(model, optimizer, 5)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
    assert (optimizer.inner_step, optimizer.last_round.round, optimizer.last_round.weights) == (5, 5, (8,))
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


def test_demo_steps_by_signs_with_the_options_of_sgd(join: Join) -> None:
    model = model_of()
    optimizer = join(
        model,
        inner_optimizer=partial(torch.optim.SGD, lr=0.125),
        inner_steps=None,
        settings={"outer.type": "demo", "outer.k": 64},
    )
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    moved = train(model, optimizer, 1) - before
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 0.125), rtol=0, atol=1e-6)
    assert train(model, optimizer, 2).isfinite().all()
    assert optimizer.last_round.round == 3


@pytest.mark.parametrize("outer", ["diloco", "ddp", "demo"])
def test_frozen_parameters_stay_as_they_are_and_do_not_travel(join: Join, outer: str) -> None:
    model = model_of()
    frozen = next(iter(model.parameters())).requires_grad_(False)
    before = frozen.clone()
    sgd = partial(torch.optim.SGD, lr=0.125, weight_decay=0.1)
    steps = {"inner_steps": None} if outer != "diloco" else {}
    optimizer = join(model, inner_optimizer=sgd, settings={"outer.type": outer}, **steps)
    trained = train(model, optimizer, 4)
    assert torch.equal(frozen, before) and trained.isfinite().all()
    assert optimizer.last_round.round == (2 if outer == "diloco" else 4)


FED_ADAM = Path(__file__).resolve().parents[3] / "examples" / "fed_adam.py"


@pytest.mark.parametrize(
    "settings",
    [{"outer.type": "sparseloco", "outer.k": 2}, {"outer.type": "custom", "outer.algorithm": FED_ADAM}],
    ids=lambda settings: settings["outer.type"],
)
def test_other_algorithms_train(join: Join, settings: dict[str, Any]) -> None:
    model = model_of()
    optimizer = join(model, settings=settings)
    digests = [optimizer.last_round.state_digest]
    for _ in range(2):
        train(model, optimizer, 2)
        digests.append(optimizer.last_round.state_digest)
    assert len(set(digests)) == 3
    with pytest.raises(ConfigError, match=r"outer\.type is .* in the running run"):
        join(model_of(), settings={"node.id": "other"})


def test_it_works_as_an_optimizer_of_torch(join: Join) -> None:
    """A gradient scaler that skips a step, a schedule of the user's own, states that go to another optimizer."""
    model = model_of()
    optimizer = join(model)
    scaler, schedule = torch.amp.GradScaler("cpu", init_scale=4.0), COSINE(optimizer)
    for step in range(3):
        scaler.scale(loss_of(model, step)).backward()
        if step == 1:
            next(model.parameters()).grad.fill_(float("inf"))  # pyright: ignore[reportOptionalMemberAccess]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
    assert optimizer.inner_step == 2
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] < 0.05
    other = ADAMW(model_of().named_parameters())
    other.load_state_dict(optimizer.state_dict())
    assert {int(state["step"]) for state in other.state.values()} == {2}
    other.state[other.param_groups[0]["params"][0]]["exp_avg"].fill_(0.5)
    optimizer.load_state_dict(other.state_dict())
    assert (optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"] == 0.5).all()
    with pytest.raises(ConfigError, match="cannot be added to a run"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_closure_gives_the_loss(join: Join) -> None:
    model = model_of()
    optimizer = join(model)

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == loss_of(model_of(), 0).item()


def test_run_with_an_end_ends_and_leaves_nothing(join: Join, run_id: str) -> None:
    model, before = model_of(), set(threading.enumerate())
    with join(model, total_steps=5) as optimizer:
        assert dist.is_initialized() and shared_memory(run_id)
        while not optimizer.is_done:
            train(model, optimizer, 1)
        assert (optimizer.inner_step, optimizer.last_round.weights) == (5, (8,))
        with pytest.raises(RunOver, match="done after inner step 5"):
            optimizer.step()
    assert not dist.is_initialized()
    assert shared_memory(run_id) == []
    started = set(threading.enumerate()) - before
    assert [t.name for t in started if t.name.startswith(("membership", "state"))] == []
    with pytest.raises(ConfigError, match="closed"):
        optimizer.step()


def test_run_that_is_complete_before_a_node_has_used_its_samples_ends_there(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = ManySteps.sync_parameters
    monkeypatch.setattr(ManySteps, "sync_parameters", lambda *words, ends_round: sync(*words, ends_round=True))
    monkeypatch.setattr(Session, "_ends_round", lambda _: False)
    optimizer = join(model := model_of(), total_steps=1)
    train(model, optimizer, 1)
    assert optimizer.is_done


def test_node_that_is_asked_to_leave_hands_over_with_its_next_step_and_says_that_it_leaves(join: Join) -> None:
    """It has no ckpt.path; a peer that has one and leaves with it would otherwise count on it to stay."""
    model = model_of()
    optimizer = join(model, inner_steps=100)
    train(model, optimizer, 2)
    optimizer.leave()
    assert not optimizer.is_done
    announce = RedisStore.announce_leaving
    with patch.object(RedisStore, "announce_leaving", autospec=True, side_effect=announce) as announced:
        train(model, optimizer, 1)
    assert optimizer.is_done
    assert optimizer.last_round.weights == (3 * 8,)
    assert [call.args[1] for call in announced.call_args_list] == [optimizer.last_round.member_id]


def test_node_that_is_asked_to_leave_while_it_gets_in_makes_no_step(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Departure, "is_asked", True)
    optimizer = join(model_of())
    assert optimizer.is_done
    with pytest.raises(RunOver, match="done after inner step 0"):
        optimizer.step()


def test_node_that_is_asked_to_leave_does_not_come_back_when_the_run_goes_on_without_it(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fence(*_: object, **__: object) -> None:
        raise Fenced("the others went on")

    model = model_of()
    optimizer = join(model)
    optimizer.leave()
    monkeypatch.setattr(ManySteps, "sync_parameters", fence)
    train(model, optimizer, 1)
    assert optimizer.is_done
    assert optimizer.last_round.round == 0


def test_update_that_is_not_finite_is_left_out(join: Join) -> None:
    model = model_of()
    optimizer = join(model)
    before = train(model, optimizer, 2).clone()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    train(model, optimizer, 2)
    assert optimizer.last_round.is_left_out
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)
    assert train(model, optimizer, 2).isfinite().all()


def test_node_that_differs_is_told_where(join: Join) -> None:
    join(model_of(), settings={"node.id": "first"})
    for arguments, model, key, theirs in [
        ({}, model_of(width=5), "parameter 0.bias", "(3,)"),
        ({"outer_optimizer": AVERAGE}, model_of(), "outer.optimizer.lr", "0.7"),
        ({"outer_optimizer": torch.optim.Adam}, model_of(), "outer_optimizer", "absent"),
        ({"total_steps": 9}, model_of(), "total_steps", "None"),
    ]:
        with pytest.raises(ConfigError) as refused:
            join(model, settings={"node.id": "second"}, **arguments)
        assert f"{key} is {theirs!r} in the running run" in str(refused.value)


def test_store_that_refuses_for_good_is_said_at_once(join: Join, url_without_scripts: str) -> None:
    with pytest.raises(ConfigError, match="no Redis that a run can use"):
        join(model_of(), store=url_without_scripts)


def test_node_whose_outer_step_comes_to_other_bits_is_told(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    join(model_of(), outer_optimizer=torch.optim.Adam, settings={"node.id": "first"})
    monkeypatch.setattr("zeroband.outer.torch_optimizer.digest_of", lambda *_: "of another processor")
    with pytest.raises(ConfigError, match=r"outer_optimizer \(its bits on this machine\) is '01[0-9a-f]{32}'"):
        join(model_of(), outer_optimizer=torch.optim.Adam, settings={"node.id": "second"})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"settings": {"outer.type": "sparseloco"}, "outer_optimizer": AVERAGE}, "has its own outer step"),
        ({"settings": {"outer.type": "ddp"}, "inner_steps": 2}, "whose rounds are one step"),
        (
            {"settings": {"outer.type": "ddp"}, "inner_optimizer": torch.optim.Adafactor, "inner_steps": None},
            "inner_optimizer Adafactor is not element-wise",
        ),
        ({"settings": {"outer.type": "demo"}, "inner_steps": None}, "inner_optimizer is AdamW, and outer.type='demo'"),
        (
            {"settings": {"outer.merge": "eager", "outer.overlap": "full"}, "outer_optimizer": torch.optim.Adam},
            "needs an outer step by SGD",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(join: Join, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        join(model_of(), **arguments)


def test_ddp_makes_the_inner_optimizer_itself(join: Join) -> None:
    model = model_of()
    with pytest.raises(ConfigError, match=r"inner_optimizer is an instance, and with outer\.type='ddp'"):
        join(model, inner_optimizer=ADAMW(model.parameters()), inner_steps=None, settings={"outer.type": "ddp"})


def test_a_cell_that_is_run_twice_is_told_to_close_the_first_optimizer(
    join: Join,
) -> None:
    join(model_of(), settings={"node.id": "me"})
    said = r"this process is node 'me' of .* already, .*notebook cell twice; close the first optimizer"
    with pytest.raises(ConfigError, match=said):
        join(model_of(), settings={"node.id": "me"})


@pytest.mark.parametrize("store", ["", "  "])
def test_store_without_an_address_is_refused(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZERO_BAND_STORE__URL", raising=False)
    with pytest.raises(ConfigError, match=r"^store=' *' is no address of a Redis"):
        zeroband.DiLoCoOptimizer(params=model_of().parameters(), batch_size=8, store=store)
    monkeypatch.setenv("ZERO_BAND_STORE__URL", store)
    with pytest.raises(ConfigError, match=r"^ZERO_BAND_STORE__URL=' *' is no address of a Redis"):
        zeroband.DiLoCoOptimizer(params=model_of().parameters(), batch_size=8)


def test_node_that_was_given_a_store_and_stays_alone_warns_once(
    join: Join, redis_url: str, caplog: pytest.LogCaptureFixture, run_id: str
) -> None:
    optimizer = join(model := model_of(), settings={"run.token": "a-token-of-many-letters"})
    train(model, optimizer, 2)
    assert "alone" not in caplog.text
    train(model, optimizer, 6)
    (said,) = [record.getMessage() for record in caplog.records if "alone" in record.getMessage()]
    assert said.startswith(f"alone in run {run_id!r} after 2 rounds: no peer came to {redis_url}. ")


def test_node_that_has_a_peer_does_not_call_itself_alone(
    join: Join, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = PeerChecks.round_done

    def ended_with_a_peer(checks: PeerChecks, rounds: Iterable[RoundReport]) -> None:
        ended(checks, [replace(r, members=(r.member_id, "b#1"), weights=(1, 1)) for r in rounds])

    optimizer = join(model := model_of())
    with monkeypatch.context() as patch:
        patch.setattr(PeerChecks, "round_done", ended_with_a_peer)
        train(model, optimizer, 2)
    train(model, optimizer, 6)
    assert "alone" not in caplog.text


def test_several_stores_are_a_list() -> None:
    assert address_of(["redis://a", "redis://b"], {}) == "redis://a redis://b"
    with pytest.raises(ConfigError, match="no address of a Redis"):
        address_of([], {"ZERO_BAND_STORE__URL": "redis://c"})


def test_own_store_is_said_with_the_address_for_others_misses_no_peer_and_ends_with_the_run(
    run_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("ZERO_BAND_STORE__URL", raising=False)
    model, settings = model_of(), {"run.dir": tmp_path, "run.id": run_id, "node.id": "me"}
    caplog.set_level(logging.INFO)
    with zeroband.DiLoCoOptimizer(
        params=model.parameters(), batch_size=8, inner_steps=1, settings=settings
    ) as optimizer:
        train(model, optimizer, 4)
        said = caplog.text + capsys.readouterr().err
        assert f"in run {run_id!r} as me, member 1 of 1, at inner step 0; this process holds the store" in said
        assert f"join with store={optimizer.store_url!r}" in said
        socket = Path(optimizer.store_url.removeprefix("unix://"))
        assert socket.exists()
    assert "alone" not in caplog.text and not socket.exists()
