from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_lang.training import total_loss, train_steps, warmup_cosine
from torchrl_lang.training.metrics import mean_figures


class Line(torch.nn.Module):
    """Two losses of one weight: (w - x)^2 / 2 and 3w; and a metric that must not be minimised."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, batch: TensorDict) -> TensorDict:
        fit = 0.5 * (self.w - batch["x"]).square().mean()
        product = torch.zeros(2, 2) @ torch.ones(2, 2)  # what autocast casts
        half = torch.tensor(float(product.dtype == torch.bfloat16))
        metric = 100 * self.w.detach()
        return TensorDict(loss_fit=fit, loss_slope=3 * self.w, metric=metric, half=half, errors=batch["x"] - 1)


def batch(*values: float) -> TensorDict:
    return TensorDict(x=torch.tensor(values), batch_size=[len(values)])


def sgd(module: torch.nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=lr)


def test_one_step_by_hand():
    module = Line()
    ((step, figures),) = train_steps(module, lambda: batch(0.0, 4.0), sgd(module), steps=1)
    assert step == 1
    # d/dw = (w - 2) + 3 = 2, so w goes from 1 to 0.8; the losses were (1 + 9) / 4 and 3.
    assert module.w.item() == pytest.approx(0.8)
    assert figures["loss_fit"] == 2.5
    assert figures["loss"] == 5.5
    assert (figures["metric"], figures["half"]) == (100, 0)
    assert "errors" not in figures
    assert not any(value.requires_grad for value in figures.values())
    assert mean_figures([figures]) == figures  # the mean of a single step


def test_accumulated_batches_are_one_batch():
    one, two = Line(), Line()
    parts = iter([batch(0.0, 1.0), batch(5.0, -2.0), batch(3.0, 3.0), batch(1.0, 0.0)])
    whole = [batch(0.0, 1.0, 5.0, -2.0), batch(3.0, 3.0, 1.0, 0.0)]
    first = list(train_steps(one, whole, sgd(one), steps=2))
    second = list(train_steps(two, parts, sgd(two), steps=2, accumulate=2))
    torch.testing.assert_close(one.w, two.w)
    for (_, a), (_, b) in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)


def test_scheduler_clipping_target_and_autocast():
    class Counter:
        steps = 0

        def step(self) -> None:
            self.steps += 1

    module, target = Line(), Counter()
    optimizer = sgd(module, lr=1.0)
    schedule = warmup_cosine(optimizer, 4, warmup=2)
    options = {"scheduler": schedule, "max_grad_norm": 0.5, "target_updater": target, "autocast": torch.bfloat16}
    run = train_steps(module, [batch(0.0)], optimizer, steps=4, **options)
    rates, norms, half = zip(*[[float(f[key]) for key in ("lr", "grad_norm", "half")] for _, f in run], strict=True)
    assert half == (1, 1, 1, 1)
    assert rates == pytest.approx((0.5, 1.0, 1.0, 0.1))
    assert norms[0] == 4.0  # before clipping
    assert module.w.item() == pytest.approx(1 - 0.5 * sum(rates), abs=1e-5)
    assert target.steps == 4


def test_some_gradients_are_clipped_apart():
    policy, head = Line(), Line()

    def loss(rows: TensorDict) -> TensorDict:
        return TensorDict(loss_policy=3 * policy.w, loss_value=40 * head.w + 9 * other.w)

    other = Line()  # which the optimizer does not have
    optimizer = sgd(torch.nn.ModuleList([policy, head]), lr=1.0)
    ((_, figures),) = train_steps(loss, [batch(0.0)], optimizer, steps=1, max_grad_norm=2.0, clip_apart=[head, other])
    assert (figures["grad_norm"], figures["grad_norm_apart"]) == (3, 40)
    assert (policy.w.item(), head.w.item()) == (pytest.approx(-1, abs=1e-5), pytest.approx(-1, abs=1e-5))


def test_start_counts_on():
    module = Line()
    drawn = []

    def draw() -> TensorDict:
        drawn.append(batch(1.0))
        return drawn[-1]

    for step, _ in train_steps(module, draw, sgd(module), steps=5, start=3):
        assert len(drawn) == step - 3  # none is drawn ahead of its step
    assert step == 5
    assert list(train_steps(module, [batch(1.0)], sgd(module), steps=5, start=5)) == []


def test_errors():
    module = Line()
    with pytest.raises(ValueError, match="ran out"):
        list(train_steps(module, iter([batch(1.0)]), sgd(module), steps=2))
    for wrong in ({"accumulate": 0}, {"autocast": torch.float16}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            list(train_steps(module, [batch(1.0)], sgd(module), steps=2, **wrong))
    with pytest.raises(KeyError, match=r"'loss_\.\.\.'"):
        total_loss(TensorDict(value=torch.tensor(1.0)))
    with pytest.raises(ValueError, match="reduction='mean'"):
        total_loss(TensorDict(loss_value=torch.ones(3)))
