"""Products by oneDNN: those of torch in value and gradient; torch's own where they do not apply."""

import pytest
import torch
from torch.nn import functional as F

from torchrl_lang.functional.fast_linear import fast_linear

APPLIES = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()


def leaves(shape=(5, 7), dtype=torch.float32, out=4):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g, dtype=dtype).requires_grad_() for s in (shape, (out, shape[-1]), (out,))]


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (7,), (0, 7), (2, 0, 7)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_torch(shape, bias):
    given = leaves(shape)[: 3 if bias else 2]
    found, expected = fast_linear(*given), F.linear(*given)
    torch.testing.assert_close(found, expected)
    into = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(*(torch.autograd.grad(y, given, into) for y in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_strided_and_expanded_tensors():
    x, weight = torch.arange(24.0).view(2, 3, 4)[:, ::2].transpose(0, 1), torch.arange(20.0).view(4, 5).mT
    torch.testing.assert_close(fast_linear(x, weight), x @ weight.mT)
    row = torch.ones(1, 4).expand(3, 4)
    torch.testing.assert_close(fast_linear(row, weight), torch.tensor([30.0, 34.0, 38.0, 42.0, 46.0]).expand(3, 5))


def test_only_what_needs_a_gradient_gets_one():
    x, weight, bias = leaves()
    for needing in (x, weight, bias):
        given = [t if t is needing else t.detach() for t in (x, weight, bias)]
        (ours,), (theirs,) = (torch.autograd.grad(f(*given).square().sum(), needing) for f in (fast_linear, F.linear))
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_gradients():
    x, weight, _ = leaves()
    second = []
    for f in (fast_linear, F.linear):
        (first,) = torch.autograd.grad(f(x, weight).pow(3).sum(), x, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), (x, weight)))
    torch.testing.assert_close(*second, rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(not APPLIES, reason="torch has no MKL or no oneDNN here")
def test_where_it_applies():
    x, weight, bias = leaves()
    name = "_LinearBackward"
    assert type(fast_linear(x, weight, bias).grad_fn).__name__ == name
    with torch.autocast("cpu"):
        assert fast_linear(x, weight, bias).dtype == torch.bfloat16
    assert type(fast_linear(*leaves(dtype=torch.float64)).grad_fn).__name__ != name


def test_transforms_of_functions():
    x, weight, bias = (t.detach() for t in leaves())
    torch.testing.assert_close(torch.vmap(fast_linear, (0, None, None))(x, weight, bias), F.linear(x, weight, bias))
    found = torch.func.grad(lambda w: fast_linear(x, w, bias).sum())(weight)
    torch.testing.assert_close(found, x.sum(0).expand(4, 7))
