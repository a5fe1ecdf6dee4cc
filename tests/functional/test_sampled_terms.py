"""The sampled cross-entropy: exact where it must be, an unbiased partition function, a logarithm that is too small."""

from __future__ import annotations

import itertools

import pytest
import torch

from torchrl_lang.functional import linear_cross_entropy, sampled_cross_entropy

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
