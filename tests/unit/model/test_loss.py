"""The loss as a sum over targets."""

import pytest
import torch
from torch.nn import functional as F

from zeroband.model import IGNORE_INDEX, gradient_scale, linear_loss, next_token_loss
from zeroband.model import loss as module
from zeroband.model.loss import TokenLoss, sums_by_source


def example() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, generator=generator, dtype=torch.float32).requires_grad_()
    targets = torch.randint(0, 11, (2, 5), generator=generator)
    targets[0, 3:] = IGNORE_INDEX
    return logits, targets


def test_cross_entropy_sums_targets_and_skips_ignored_ones() -> None:
    logits, targets = example()
    loss = next_token_loss(logits, targets)
    log_p = logits.log_softmax(-1)
    expected = -sum(log_p[b, t, targets[b, t]] for b in range(2) for t in range(5) if targets[b, t] != IGNORE_INDEX)
    torch.testing.assert_close(loss.objective, expected)
    torch.testing.assert_close(loss.cross_entropy, loss.objective.detach())
    assert loss.targets.item() == 8


def test_z_loss_gradient_equals_its_formula() -> None:
    logits, targets = example()
    (with_z,) = torch.autograd.grad(next_token_loss(logits, targets, z_loss=0.1).objective, logits)
    (without,) = torch.autograd.grad(next_token_loss(logits, targets).objective, logits)
    # d/dx z (log Z)^2 = 2 z log Z softmax(x), and nothing where the target is ignored
    expected = 0.2 * logits.logsumexp(-1, keepdim=True) * logits.softmax(-1) * (targets != IGNORE_INDEX)[..., None]
    torch.testing.assert_close(with_z - without, expected.detach(), rtol=1e-4, atol=1e-6)


def test_z_loss_is_not_reported_as_cross_entropy() -> None:
    logits, targets = example()
    loss = next_token_loss(logits, targets, z_loss=0.5)
    assert loss.cross_entropy == next_token_loss(logits, targets).cross_entropy < loss.objective
    assert not loss.cross_entropy.requires_grad


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = torch.zeros(1, 4096, 2, dtype=torch.bfloat16)
    loss = next_token_loss(logits, torch.zeros(1, 4096, dtype=torch.int64))
    assert loss.objective.dtype == torch.float32
    assert loss.objective.item() == pytest.approx(4096 * 0.6931472, rel=1e-6)


def test_all_targets_ignored_gives_zero_and_no_nan() -> None:
    logits, targets = example()
    loss = next_token_loss(logits, torch.full_like(targets, IGNORE_INDEX), z_loss=0.1)
    (gradient,) = torch.autograd.grad(loss.objective, logits)
    assert loss.objective.item() == 0
    assert gradient.count_nonzero() == 0


def whole_and_gradients(
    parts: int, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, **options: float
) -> tuple[TokenLoss, list[torch.Tensor]]:
    """The loss of linear_loss, computed in so many parts, and both gradients."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 21, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, 50, (2, 21), generator=generator)
    targets[1, 15:] = IGNORE_INDEX
    monkeypatch.setattr(module, "LOGITS_BYTES", -(-42 * 50 * 4 // parts))
    loss = linear_loss(x, weight, targets, **options)
    (loss.objective * 0.25).backward()
    assert x.grad is not None and weight.grad is not None
    return loss, [x.grad, weight.grad]


def in_parts(parts: int, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, z_loss: float) -> list[torch.Tensor]:
    """Loss, cross entropy, targets and both gradients, computed in so many parts."""
    loss, gradients = whole_and_gradients(parts, monkeypatch, dtype, z_loss=z_loss)
    return [loss.objective.detach(), loss.cross_entropy, loss.targets, *gradients]


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("parts", [2, 5, 42])
def test_loss_in_parts_is_the_loss_and_its_gradients(
    monkeypatch: pytest.MonkeyPatch, parts: int, z_loss: float
) -> None:
    whole, cut = (in_parts(n, monkeypatch, torch.float32, z_loss) for n in (1, parts))
    for expected, found in zip(whole, cut, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_gradient_of_the_head_in_parts_is_within_two_roundings_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    *_, exact = in_parts(1, monkeypatch, torch.float32, 0.0)
    *_, whole = in_parts(1, monkeypatch, torch.bfloat16, 0.0)
    *_, cut = in_parts(6, monkeypatch, torch.bfloat16, 0.0)
    size = exact.abs().max()
    assert (cut - whole).abs().max() < 6 * 2**-8 * size
    assert (cut - exact).norm() < 2 * (whole - exact).norm()


def test_loss_in_parts_without_gradients_only_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_BYTES", 64)
    x, weight = torch.randn(1, 9, 4, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    targets = torch.arange(9)[None] % 8
    with torch.no_grad():
        found = linear_loss(x, weight, targets)
    assert not found.objective.requires_grad
    torch.testing.assert_close(found.objective, next_token_loss(x @ weight.T, targets).objective.detach())


def test_gradient_scale_makes_rank_average_the_mean_over_targets() -> None:
    logits, targets = example()
    mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
    (expected,) = torch.autograd.grad(mean, logits)
    scale = gradient_scale(8, world_size=2)  # the ranks hold 3 and 5 of the 8 targets
    by_rank = [
        torch.autograd.grad(
            next_token_loss(logits[rank : rank + 1], targets[rank : rank + 1]).objective * scale, logits
        )
        for rank in range(2)
    ]
    torch.testing.assert_close((by_rank[0][0] + by_rank[1][0]) / 2, expected)


def test_step_without_targets_has_no_gradient() -> None:
    logits, targets = example()
    loss = next_token_loss(logits, torch.full_like(targets, IGNORE_INDEX), z_loss=0.1)
    (gradient,) = torch.autograd.grad(loss.objective * gradient_scale(0, world_size=2), logits)
    assert (loss.cross_entropy.item(), int(loss.targets), gradient.count_nonzero().item()) == (0.0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 5, 42])
def test_asking_for_each_target_changes_no_bit(monkeypatch: pytest.MonkeyPatch, parts: int, dtype: torch.dtype) -> None:
    plain, gradients = whole_and_gradients(parts, monkeypatch, dtype, z_loss=0.1)
    asked, of_asked = whole_and_gradients(parts, monkeypatch, dtype, z_loss=0.1, by_target=True)
    assert plain.per_target is None and asked.per_target is not None
    assert not asked.per_target.requires_grad and asked.per_target.dtype == torch.float32
    for ours, theirs in zip([*asked[:3], *of_asked], [*plain[:3], *gradients], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("parts", [1, 5])
def test_each_target_has_its_cross_entropy_and_an_ignored_one_none(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(3, 7, 8, generator=generator), torch.randn(19, 8, generator=generator)
    targets = torch.randint(0, 19, (3, 7), generator=generator)
    targets[1, 2:] = IGNORE_INDEX
    monkeypatch.setattr(module, "LOGITS_BYTES", -(-21 * 19 * 4 // parts))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            loss = linear_loss(x.requires_grad_(grad), weight, targets, z_loss=0.1, by_target=True)
        log_p = (x.double() @ weight.double().T).log_softmax(-1)
        expected = -log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0].masked_fill(targets == IGNORE_INDEX, 0)
        assert loss.per_target is not None
        torch.testing.assert_close(loss.per_target.double(), expected.detach().flatten(), rtol=1e-5, atol=1e-6)
        sums = sums_by_source(loss.per_target, torch.tensor([2, 0, 2]), 4).double()
        rows = expected.detach().sum(1)
        wanted = torch.stack([rows[1], rows.new_zeros(()), rows[0] + rows[2], rows.new_zeros(())])
        torch.testing.assert_close(sums, wanted, rtol=1e-5, atol=1e-6)
        assert sums.sum().item() == pytest.approx(loss.cross_entropy.item(), rel=1e-5)


def test_loss_that_is_no_number_stays_with_its_source() -> None:
    per_target = torch.tensor([1.0, 2.0, float("nan"), 4.0, float("inf"), 5.0, 6.0, 7.0])
    sums = sums_by_source(per_target, torch.tensor([0, 1, 2, 0]), 4)
    assert sums[0] == 16.0 and sums[1].isnan() and sums[2].isinf() and sums[3] == 0.0
