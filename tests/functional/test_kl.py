"""Divergences: by hand, against torch.distributions, in the mean over samples; their gradients and their memory."""

import math
from functools import partial

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from benchmarks.memory import peak_bytes
from torchrl_lang.functional import categorical_kl, kl_estimate
from torchrl_lang.functional.kl import categorical_entropy, projected_kl

INF = math.inf
LOG2 = math.log(2)
ESTIMATORS = ("k1", "k2", "k3")
DIRECTIONS = ("reverse", "forward")
EVERY = [(estimator, direction) for estimator in ESTIMATORS for direction in DIRECTIONS]


def plain_kl(logits, ref_logits):
    """By the definition, with ``0 log 0 = 0``."""
    log_p, log_q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    gap = torch.where(log_p == -INF, 0, log_p) - torch.where(log_p == -INF, 0, log_q)
    return (log_p.exp() * gap).sum(-1)


def random_logits(*shape, seed=0, scale=2.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# Estimates: numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "direction", "values"),
    [  # pi = 1/2 throughout; ref = 1/2, 1/4, 1, 0, that is rho = 1, 1/2, 2, 0
        ("k1", "reverse", [0, LOG2, -LOG2, INF]),
        ("k2", "reverse", [0, LOG2**2 / 2, LOG2**2 / 2, INF]),
        ("k3", "reverse", [0, LOG2 - 0.5, 1 - LOG2, INF]),
        ("k1", "forward", [0, -LOG2 / 2, 2 * LOG2, 0]),
        ("k2", "forward", [0, LOG2**2 / 2, LOG2**2 / 2, INF]),
        ("k3", "forward", [0, 0.5 - LOG2 / 2, 2 * LOG2 - 1, 1]),
    ],
)
def test_estimates_table(estimator, direction, values):
    log_prob = torch.full((4,), 0.5, dtype=torch.float64).log()
    ref_log_prob = torch.tensor([0.5, 0.25, 1.0, 0.0], dtype=torch.float64).log()
    expected = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(kl_estimate(log_prob, ref_log_prob, estimator, direction), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize(("estimator", "direction"), EVERY)
def test_impossible_under_both_is_zero_with_zero_gradient(estimator, direction):
    log_probs = [torch.tensor([-INF, other], requires_grad=True) for other in (-1.0, -2.0)]
    values = kl_estimate(*log_probs, estimator, direction)
    values.sum().backward()
    assert values[0] == log_probs[0].grad[0] == log_probs[1].grad[0] == 0
    assert log_probs[0].grad.isfinite().all()


@pytest.mark.parametrize("gap", [90.0, 200.0, 5000.0, INF])
def test_far_apart_takes_the_limit_and_never_nan(gap):
    near, far = torch.zeros(1), torch.full((1,), -gap)  # rho = exp(-gap)
    value = {pair: kl_estimate(near, far, *pair).item() for pair in EVERY}
    assert value["k1", "reverse"] == gap
    assert value["k2", "reverse"] == value["k2", "forward"] == gap**2 / 2
    assert value["k3", "reverse"] == pytest.approx(gap - 1)
    assert value["k1", "forward"] == pytest.approx(0, abs=1e-30)
    assert value["k3", "forward"] == pytest.approx(1)
    value = {pair: kl_estimate(far, near, *pair).item() for pair in EVERY}  # rho = exp(gap), beyond float32
    assert value["k1", "reverse"] == -gap
    assert value["k3", "reverse"] == value["k1", "forward"] == value["k3", "forward"] == INF


@pytest.mark.parametrize(("estimator", "direction"), EVERY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(estimator, direction, dtype):
    log_prob, ref_log_prob = (random_logits(3, 4, seed=seed, dtype=dtype) for seed in (0, 1))
    value = kl_estimate(log_prob, ref_log_prob, estimator, direction)
    assert value.dtype == torch.float32
    assert value.equal(kl_estimate(log_prob.float(), ref_log_prob.float(), estimator, direction))


# Estimates: what they are estimates of --------------------------------------------------------------------------------


@pytest.fixture(params=[0, 1, 2])
def pair(request):
    logits = random_logits(5, seed=10 + request.param, scale=1.0).requires_grad_()
    return logits, random_logits(5, seed=20 + request.param, scale=1.0)


def divergences(logits, ref_logits):
    """Gradients of what the docstring names, by autograd of the exact expressions."""
    ref = ref_logits.softmax(-1)
    x = ref_logits.log_softmax(-1) - logits.log_softmax(-1)
    exact = {
        "reverse": plain_kl(logits, ref_logits),
        "forward": plain_kl(ref_logits, logits),
        "square": (ref * x.square()).sum() / 2,
    }
    return {name: torch.autograd.grad(value, logits, retain_graph=True)[0] for name, value in exact.items()}


def test_gradients_in_a_loss_and_in_a_reward(pair):
    """In the mean over on-policy samples: all actions, weighted with constant ``pi``."""
    of = divergences(*pair)
    expected = {  # of the estimate itself; with the estimate as a constant weight of grad log pi
        ("k1", "reverse"): (torch.zeros(5, dtype=torch.float64), of["reverse"]),
        ("k2", "reverse"): (of["reverse"], None),
        ("k2", "forward"): (of["reverse"], None),
        ("k3", "reverse"): (of["forward"], of["reverse"] - of["forward"]),
        ("k1", "forward"): (of["forward"] + of["square"], -of["square"]),
        ("k3", "forward"): (of["square"], of["forward"] - of["square"]),
    }
    log_prob, ref_log_prob = (logits.log_softmax(-1) for logits in pair)
    chance = log_prob.detach().exp()
    for key in EVERY:
        value = kl_estimate(log_prob, ref_log_prob, *key)
        means = (chance * value).sum(), (chance * value.detach() * log_prob).sum()
        for mean, gradient in zip(means, expected[key], strict=True):
            if gradient is not None:
                found = torch.autograd.grad(mean, pair[0], retain_graph=True)[0]
                torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(of["reverse"], of["forward"], rtol=1e-2)  # so the claims differ


# Exact divergences ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7,), (3, 12), (2, 3, 25), (4, 1)])
@pytest.mark.parametrize("chunk_size", [1, 3, 4, 12, 1024])
def test_both_agree_with_torch_distributions(shape, chunk_size):
    logits, ref_logits = random_logits(*shape), random_logits(*shape, seed=1)
    expected = kl_divergence(Categorical(logits=logits), Categorical(logits=ref_logits))
    torch.testing.assert_close(categorical_kl(logits, ref_logits, chunk_size=chunk_size), expected)
    (s, h, c), (rs, rh, rc) = (
        (random_logits(*shape[:-1], width, seed=width + 1), random_logits(shape[-1], width), random_logits(shape[-1]))
        for width in (4, 6)
    )
    options = {"bias": c, "ref_bias": rc, "temperature": 0.5, "ref_temperature": 3.0, "chunk_size": chunk_size}
    a, b = Categorical(logits=(s @ h.T + c) / 0.5), Categorical(logits=(rs @ rh.T + rc) / 3)
    torch.testing.assert_close(projected_kl(s, h, rs, rh, **options), kl_divergence(a, b))


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 64])
def test_forbidden_tokens(chunk_size):
    logits, ref_logits = random_logits(6, 10), random_logits(6, 10, seed=1)
    logits[0, :4] = -INF  # whole slices of the policy, at either end
    logits[1, 6:] = -INF
    logits[2, :4] = ref_logits[2, :4] = -INF  # of both
    ref_logits[3, 2] = -INF  # of the reference alone
    ref_logits[4, :8] = -INF
    logits[5] = -INF
    found = categorical_kl(logits, ref_logits, chunk_size=chunk_size)
    torch.testing.assert_close(found[:3], plain_kl(logits, ref_logits)[:3])
    assert found[3:5].eq(INF).all()
    assert found[5].isnan()


@pytest.mark.parametrize("chunk_size", [3, 4, 64])
def test_gradients_are_those_of_the_plain_form(chunk_size):
    shapes, weights = ((5, 4), (10, 4), (5, 4), (10, 4), (10,)), random_logits(5, seed=5)
    *layers, bias = leaves = [random_logits(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
    forbidden = torch.arange(10) < 4
    logits = ((layers[0] @ layers[1].T + bias) / 0.5).masked_fill(forbidden, -INF)
    ref_logits = (layers[2] @ layers[3].T).masked_fill(forbidden, -INF)
    expected = torch.autograd.grad(weights @ plain_kl(logits[:, 4:], ref_logits[:, 4:]), leaves, retain_graph=True)
    options = {"bias": bias, "temperature": 0.5, "forbidden": forbidden, "chunk_size": chunk_size}
    for found in (projected_kl(*layers, **options), categorical_kl(logits, ref_logits, chunk_size=chunk_size)):
        torch.testing.assert_close(torch.autograd.grad(weights @ found, leaves), expected)


# Entropy --------------------------------------------------------------------------------------------------------------


def test_entropy_is_that_of_torch_and_tokens_that_cannot_be_said_add_nothing():
    logits = random_logits(4).requires_grad_()
    barred = torch.tensor([False, False, False, True])
    entropy = categorical_entropy(logits.masked_fill(barred, -INF).log_softmax(-1))
    expected = Categorical(logits=logits[:3]).entropy()
    torch.testing.assert_close(entropy, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one, logits)[0] for one in (entropy, expected)))


# Memory ---------------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_vocabulary():
    """Of both functions, with everything asked for that costs memory."""
    peaks = []
    for vocabulary in (4_096, 32_768):
        logits, ref_logits = (random_logits(64, vocabulary, seed=seed, dtype=torch.float32) for seed in (0, 1))
        shapes = (64, 8), (vocabulary, 8), (vocabulary,)
        hidden, head, bias = (random_logits(*shape, dtype=torch.float32) for shape in shapes)
        options = {"bias": bias, "ref_bias": bias, "temperature": 0.7, "ref_temperature": 0.8, "forbidden": bias > 3}
        with torch.no_grad():
            exact = peak_bytes(partial(categorical_kl, logits, ref_logits, chunk_size=512))
            projected = peak_bytes(partial(projected_kl, hidden, head, hidden, head, chunk_size=512, **options))
        peaks.append((exact / 64, projected / 64))
    for fewer, more in zip(*peaks, strict=True):
        assert more < 1.1 * fewer < 1.1 * 32 * 512
