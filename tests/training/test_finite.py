"""NaN and infinity are noticed: which term, at which step, before a parameter has changed."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_lang.training import FiniteCheck, NonFiniteError, train_steps
from torchrl_lang.training.metrics import check_parameters


class Two(torch.nn.Module):
    """The losses w x and w y; each batch brings x and y."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, batch: TensorDict) -> TensorDict:
        return TensorDict(loss_actor=self.w * batch["x"], loss_qvalue=self.w * batch["y"])


def run(module: Two, batches: list[tuple[float, float]], **options) -> list[int]:
    rows = [TensorDict(x=torch.tensor(x), y=torch.tensor(y)) for x, y in batches]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return [step for step, _ in train_steps(module, rows, optimizer, steps=len(rows), max_grad_norm=1.0, **options)]


BAD = [
    ((1.0, float("nan")), "loss_qvalue is nan at step 3"),
    ((float("inf"), float("-inf")), "loss_actor is inf, loss_qvalue is -inf at step 3"),
    ((2e38, 2e38), "loss is inf, grad_norm is inf at step 3"),  # either term is finite, their sum is not
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_the_term_and_the_step_are_named_and_the_weights_are_those_before(bad, message):
    module, untouched = Two(), Two()
    with pytest.raises(NonFiniteError, match=message):
        run(module, [(1.0, 1.0), (1.0, 1.0), bad, (1.0, 1.0)])
    run(untouched, [(1.0, 1.0), (1.0, 1.0)])
    assert torch.equal(module.w, untouched.w)


class Elsewhere(FiniteCheck):
    """Sees figures as those of a device that is not waited for."""

    def add(self, step, figures):
        self._waiting.append((step, dict(figures)))
        if len(self._waiting) >= self.every:
            self.check()


def test_where_nothing_is_waited_for_the_first_step_is_named_all_the_same():
    finite = Elsewhere(every=4)
    for step in (1, 2):
        finite.add(step, {"loss_actor": torch.tensor(0.0), "loss": torch.tensor(0.0)})
    finite.check()
    for step in (3, 4, 5):
        value = torch.tensor(float("nan") if step >= 4 else 1.0)
        finite.add(step, {"loss_actor": value, "loss": value, "grad_norm": value})
    with pytest.raises(NonFiniteError, match="loss_actor is nan at step 4"):
        finite.add(6, {"loss_actor": torch.tensor(0.0), "loss": torch.tensor(0.0)})
    with pytest.raises(NonFiniteError, match="at step 3"):  # the last step is not yielded unseen
        run(Two(), [(1.0, 1.0), (1.0, 1.0), (1.0, float("nan"))], finite=Elsewhere(every=100))


def test_gradients_accumulated_batches_and_parameters():
    root = Two()  # the square root of w x at x = 0 is 0, but its gradient is no number
    root.forward = lambda batch: TensorDict(loss_root=(root.w * batch["x"]).sqrt())
    with pytest.raises(NonFiniteError, match="grad_norm is nan at step 2"):
        run(root, [(1.0, 0.0), (0.0, 0.0)])
    with pytest.raises(NonFiniteError, match="loss_qvalue is nan at step 2"):
        run(Two(), [(1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (1.0, float("nan"))], accumulate=2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    check_parameters(model, "after step 7")
    model[1].weight.data[0, 1] = float("inf")
    with pytest.raises(NonFiniteError, match=r"the parameter 1.weight is inf after step 7"):
        check_parameters(model, "after step 7")
    check_parameters(model.requires_grad_(False), "after step 7")  # no step changes these


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_figures_of_a_gpu_are_not_fetched_at_each_step():
    """Fetching would wait for the GPU: `.tolist()`, `bool()` and `.item()` of its tensors are counted."""
    module = Two().cuda()
    batch = TensorDict(x=torch.tensor(1.0), y=torch.tensor(1.0)).cuda()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    steps = train_steps(module, lambda: batch, optimizer, steps=40, max_grad_norm=1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        list(zip(range(20), steps, strict=False))
    finally:
        torch.cuda.set_sync_debug_mode("default")
