"""The sampled cross-entropy: exact where it must be, an unbiased partition function, a logarithm that is too small."""

from __future__ import annotations

import itertools

import pytest
import torch

from torchrl_lang.functional import linear_cross_entropy, sampled_cross_entropy, systematic_sample

V, N, WIDTH = 4, 5, 3


def tensors(bias=True):
    g = torch.Generator().manual_seed(0)
    features, weight, offset = (
        torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True)
        for shape in ((2, N, WIDTH), (2, V, WIDTH), (2, V))
    )
    return features, weight, offset if bias else None, torch.randint(V, (N,), generator=g)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("bias", [True, False])
def test_every_token_once_is_the_exact_term(temperature, bias):
    """The V - 1 that are not the target then have the weight 1."""
    features, weight, offset, target = tensors(bias)
    leaves = [leaf for leaf in (features, weight, offset) if leaf is not None]
    found = sampled_cross_entropy(features, weight, offset, target, torch.arange(V), temperature=temperature)
    exact = linear_cross_entropy(features, weight, offset, target, temperature=temperature)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(torch.autograd.grad(found.total, leaves), torch.autograd.grad(exact.total, leaves), strict=True):
        torch.testing.assert_close(a, b)


def test_over_all_draws_the_partition_function_is_unbiased_and_its_logarithm_too_small():
    features, weight, offset, target = tensors()
    exact = linear_cross_entropy(features, weight, offset, target).each
    draws = [torch.tensor(draw) for draw in itertools.product(range(V), repeat=3)]
    each = torch.stack([sampled_cross_entropy(features, weight, offset, target, draw).each for draw in draws])
    usable = torch.stack([(draw != target[:, None]).any(-1) for draw in draws])[:, None]  # [draws, 1, N]
    mean = (each.exp() * usable).sum(0) / usable.sum(0)
    torch.testing.assert_close(mean, exact.exp())
    assert (each.mean(0) < exact).all()


def test_only_the_target_drawn_is_no_term():
    features, weight, offset, target = tensors()
    term = sampled_cross_entropy(features, weight, offset, target[:1].expand(N), target[:1].repeat(3))
    torch.testing.assert_close(term.each, torch.zeros_like(term.each))
    assert all(g.isfinite().all() for g in torch.autograd.grad(term.total, [features, weight, offset]))


# -- negatives by a proposal -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 3, 10])
def test_tokens_are_drawn_as_often_as_the_weights_say(m):
    g = torch.Generator().manual_seed(1)
    q = torch.rand(23, generator=g) ** 4 + 1e-3
    count, steps = torch.zeros(23), 4000
    weights = torch.full((23,), torch.nan)
    for step in range(steps):
        tokens, log_weight = systematic_sample(q, m, (step + 0.5) / steps)
        assert tokens.shape == (m,)
        assert tokens.unique().shape == (m,)
        count[tokens] += 1
        weights[tokens] = log_weight.exp()
    torch.testing.assert_close(count / steps, 1 / weights, rtol=0, atol=2 / steps)
    expected = (q / q.sum() * m).clamp_max(1)  # but where a certain one leaves more to the others
    assert (1 / weights >= expected - 1e-6).all()


def test_the_likeliest_are_certain():
    q = torch.tensor([0.01, 0.5, 0.01, 0.3, 0.01, 0.01, 0.16])
    for start in (0.0, 0.3, 0.999):
        tokens, log_weight = systematic_sample(q, 4, start)
        assert {1, 3, 6} <= set(tokens.tolist())
        torch.testing.assert_close(log_weight.exp()[torch.isin(tokens, torch.tensor([1, 3, 6]))], torch.ones(3))
        torch.testing.assert_close(log_weight.exp().sum(), torch.tensor(7.0))  # 3 and one for the other four


@pytest.mark.parametrize("m", [V, V + 3])
def test_a_sample_of_all_tokens_is_the_exact_term(m):
    features, weight, offset, target = tensors()
    tokens, log_weight = systematic_sample(torch.tensor([0.7, 0.1, 0.1, 0.1]), m, 0.4)
    assert tokens.tolist() == list(range(V))
    found = sampled_cross_entropy(features, weight, offset, target, tokens, log_weight=log_weight, temperature=0.6)
    exact = linear_cross_entropy(features, weight, offset, target, temperature=0.6)
    leaves = [features, weight, offset]
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(torch.autograd.grad(found.total, leaves), torch.autograd.grad(exact.total, leaves), strict=True):
        torch.testing.assert_close(a, b)


def test_over_all_starts_the_partition_function_is_unbiased_and_its_logarithm_too_small():
    features, weight, offset, target = tensors()
    exact, steps = linear_cross_entropy(features, weight, offset, target).each, 5000
    q, each = torch.tensor([0.5, 0.2, 0.2, 0.1]), []
    for step in range(steps):
        tokens, log_weight = systematic_sample(q, 2, (step + 0.5) / steps)
        each.append(sampled_cross_entropy(features, weight, offset, target, tokens, log_weight=log_weight).each)
    each = torch.stack(each)
    torch.testing.assert_close(each.exp().mean(0), exact.exp(), rtol=2e-3, atol=0)
    assert (each.mean(0) < exact).all()


def test_on_a_peaked_distribution_a_near_proposal_needs_far_fewer_samples_than_uniform_draws():
    """Of 3,000 tokens a few dozen hold the mass, and the proposal knows them roughly."""
    g = torch.Generator().manual_seed(0)
    vocabulary, n = 3000, 6
    logits = 3 * torch.randn(vocabulary, generator=g) + 0.5 * torch.randn(n, vocabulary, generator=g)
    features, weight = torch.eye(n)[None], logits.T[None]
    target = torch.randint(vocabulary, (n,), generator=g)
    exact = linear_cross_entropy(features, weight, None, target).each
    q = (logits.mean(0) + 0.7 * torch.randn(vocabulary, generator=g)).softmax(-1) / 2 + 0.5 / vocabulary

    def too_small_by(m, proposal, repeats=200):
        found = []
        for repeat in range(repeats):
            if proposal is None:
                negatives, log_weight = torch.randint(vocabulary, (m,), generator=g), None
            else:
                negatives, log_weight = systematic_sample(proposal, m, (repeat + 0.5) / repeats)
            found.append(sampled_cross_entropy(features, weight, None, target, negatives, log_weight=log_weight).each)
        return float((exact - torch.stack(found)).mean())

    bias = {m: too_small_by(m, q) for m in (8, 32, 128)}
    assert 0.15 > bias[8] > 4 * bias[32] > 16 * bias[128] > 0
    assert too_small_by(8, None) > too_small_by(128, None) > too_small_by(512, None) > 2 * bias[8]


@pytest.mark.parametrize("start", [0.0, 0.4, 0.9])
def test_a_small_rest_is_not_lost(start):
    tokens, log_weight = systematic_sample(torch.tensor([1, 1e-17, 1e-17, 1e-17], dtype=torch.float64), 2, start)
    assert tokens[0] == 0
    assert tokens[1] > 0
    torch.testing.assert_close(log_weight.exp(), torch.tensor([1.0, 3.0], dtype=torch.float64))


def test_tokens_of_a_peaked_distribution_are_distinct():
    q = (11 * torch.randn(272, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).softmax(-1)
    for m in (2, 30, 271):
        tokens, _ = systematic_sample(q, m, 0.37)
        assert tokens.unique().shape == (m,)
