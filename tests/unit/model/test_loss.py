"""The loss as a sum over targets."""

import pytest
import torch
from torch.nn import functional as F

from zeroband.model import IGNORE_INDEX, gradient_scale, next_token_loss


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


def test_gradient_scale_refuses_a_step_without_targets() -> None:
    with pytest.raises(ValueError, match="targets_in_step=0"):
        gradient_scale(0, world_size=2)
