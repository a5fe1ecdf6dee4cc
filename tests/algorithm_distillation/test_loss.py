"""The loss: against plain loops, with hand-worked numbers, and what a TorchRL loss does."""

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Distribution

from tests.algorithm_distillation import reference
from tests.algorithm_distillation.models import model, windows
from torchrl_lang.algorithm_distillation import ADLoss

WEIGHTS = {"reward_weight": 0.5, "observation_weight": 2.0, "log_prob_weight": 0.25}


def plain_terms(made, rows, smoothing=0.0):
    """The terms of each step, [B, L], and which count for the next observation; in plain loops."""
    out = made(rows.clone())
    shape = tuple(rows.shape)
    action, reward, log_prob, observation = (np.zeros(shape) for _ in range(4))
    follows = np.zeros(shape, dtype=bool)
    for b in range(shape[0]):
        for t in range(shape[1]):
            step, given = out[b, t], rows[b, t]
            parameters = step["action_parameters"].detach().double().numpy()
            if made.action_head.is_discrete:
                logs = reference.log_softmax(parameters)
                action[b, t] = -(1 - smoothing) * logs[int(given["action"])] - smoothing * logs.mean()
            else:
                for mean, log_std, value in zip(*np.split(parameters, 2), given["action"].tolist(), strict=True):
                    log_std = min(max(log_std, -5), 2)
                    z = (value - mean) / math.exp(log_std)
                    action[b, t] += 0.5 * z * z + log_std + 0.5 * math.log(2 * math.pi)
            reward[b, t] = float(step["predicted_reward"].detach() - given["reward"]) ** 2
            log_prob[b, t] = float(step["predicted_log_prob"].detach() - given["action_log_prob"]) ** 2
            if t + 1 < shape[1] and not bool(given["done"]):
                follows[b, t] = True
                observation[b, t] = plain_observation(made, step, rows[b, t + 1]["observation"])
    return {"action": action, "reward": reward, "log_prob": log_prob, "observation": observation}, follows


def plain_observation(made, step, following):
    predicted = step["predicted_observation"].detach().double().numpy()
    if following.is_floating_point():
        return float(((predicted - following.numpy()) ** 2).sum())
    total, first = 0.0, 0
    for size, target in zip(made.observation.sizes, following.tolist(), strict=True):
        total -= reference.log_softmax(predicted[first : first + size])[target]
        first += size
    return total


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_term_equals_plain_loops(made, reduction):
    rows = windows(made)
    terms, follows = plain_terms(made, rows)
    found = ADLoss(made, reduction=reduction, **WEIGHTS)(rows)
    for name, values in terms.items():
        counted = follows if name == "observation" else np.ones_like(follows)
        total = {"none": values, "sum": values.sum(), "mean": values.sum() / counted.sum()}[reduction]
        weight = WEIGHTS.get(f"{name}_weight", 1)
        np.testing.assert_allclose(found[f"loss_{name}"].detach(), weight * total, rtol=1e-3, atol=1e-3, err_msg=name)
    assert float(found["action_nll"]) == pytest.approx(terms["action"].mean(), rel=1e-3)


def test_numbers_worked_out_by_hand():
    """Zero weights: uniform actions, and zero as every other prediction."""
    made = model(context=5)
    for parameter in made.parameters():
        torch.nn.init.zeros_(parameter)
    rows = TensorDict(
        observation=torch.tensor([[[0, 0], [1, 2], [2, 3]]]),
        action=torch.tensor([[0, 4, 0]]),
        reward=torch.tensor([[[0.0], [2.0], [1.0]]]),
        done=torch.tensor([[[False], [True], [False]]]),
        episode_step=torch.tensor([[0, 1, 0]]),
        action_log_prob=torch.tensor([[-1.0, -2.0, 0.0]]),
        batch_size=[1, 3],
    )
    found = ADLoss(made, **WEIGHTS)(rows).detach()
    assert float(found["loss_action"]) == pytest.approx(math.log(5))
    assert float(found["loss_reward"]) == pytest.approx(0.5 * (0 + 4 + 1) / 3)
    assert float(found["loss_log_prob"]) == pytest.approx(0.25 * (1 + 4 + 0) / 3)
    # Only the first step has a next observation: the second ends its episode, the third its window.
    assert float(found["loss_observation"]) == pytest.approx(2 * (math.log(3) + math.log(4)))
    assert float(found["action_accuracy"]) == pytest.approx(2 / 3)


def test_a_step_does_not_wait_for_the_device(made, monkeypatch):
    """A fake tensor has no values, and to read one raises. TorchRL turns the checks of distributions off for all."""
    monkeypatch.setattr(Distribution, "_validate_args", True)
    loss = ADLoss(made, **WEIGHTS)
    loss(windows(made))  # the first call checks the entries
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        rows = windows(made).apply(fake.from_tensor)
        out = loss(rows)
    assert out["loss_action"].shape == ()


def test_terms_are_float32_under_autocast(made):
    """Of the model's predictions in half precision; in bfloat16 each term would be rounded to 8 bits."""
    rows = windows(made)
    with torch.autocast("cpu", torch.bfloat16):
        predicted = made(rows.clone()).detach()
        out = ADLoss(made, reduction="none", **WEIGHTS)(rows).detach()
    assert predicted["action_parameters"].dtype == torch.bfloat16
    assert {value.dtype for value in out.values()} == {torch.float32}
    nll = -made.action_head.distribution(predicted["action_parameters"].float()).log_prob(rows["action"])
    assert torch.allclose(out["loss_action"], nll, rtol=1e-5, atol=1e-5)
    wrong = predicted["predicted_reward"].float() - rows["reward"]
    assert torch.allclose(out["loss_reward"], 0.5 * wrong.squeeze(-1) ** 2, rtol=1e-5)


def test_rewards_and_ends_of_one_step_need_no_dimension_and_a_weight_of_zero_is_not_computed():
    """As the model reads them; windows of one step must not be broadcast."""
    made = model()
    rows = windows(made, length=1)
    plain = rows.clone().set("reward", rows["reward"][..., 0]).set("done", rows["done"][..., 0])
    loss = ADLoss(made, reduction="none", **WEIGHTS)
    for key, value in loss(rows).items():
        assert torch.equal(loss(plain)[key], value), key
    out = ADLoss(made)(rows.exclude("done", "action_log_prob"))
    assert sorted(out.keys()) == ["action_accuracy", "action_nll", "loss_action"]
    assert not out["action_nll"].requires_grad
    out["loss_action"].backward()
    assert all(parameter.grad is None for parameter in made.outcome_head.parameters())


@pytest.mark.parametrize("weights", [{}, WEIGHTS])
def test_keys(made, weights):
    """Other names and tensors in place of windows: ``test_torchrl_contract``."""
    loss, rows = ADLoss(made, **weights), windows(made)
    kept = rows.clone()
    assert list(loss(rows).keys()) == loss.out_keys
    assert (rows == kept).all(), "the input was changed"
    assert rows.keys() == kept.keys()
    loss.set_keys(action=("agent", "move"))
    with pytest.raises(KeyError, match=r"needs \('agent', 'move'\), found only"):
        loss(rows)


def test_label_smoothing_and_a_mask_of_steps_that_count_equal_plain_loops():
    made = model()
    rows = windows(made)
    mask = torch.rand(rows.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    loss = ADLoss(made, label_smoothing=0.3, **WEIGHTS)
    loss.loss_mask_key = "valid"
    found = loss(rows.clone().set("valid", mask[..., None])).detach()
    terms, follows = plain_terms(made, rows, 0.3)
    for name, values in terms.items():
        counted = mask.numpy() & (follows if name == "observation" else True)
        expected = WEIGHTS.get(f"{name}_weight", 1) * values[counted].mean()
        assert float(found[f"loss_{name}"]) == pytest.approx(expected, rel=1e-3), name
    plain = plain_terms(made, rows)[0]["action"]
    assert float(found["action_nll"]) == pytest.approx(plain[mask.numpy()].mean(), rel=1e-4), "is not smoothed"
    with pytest.raises(ValueError, match=r"label_smoothing must lie in \[0, 1\], got 1.5"):
        ADLoss(made, label_smoothing=1.5)
