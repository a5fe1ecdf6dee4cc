"""Products by oneDNN: those of torch in value and gradient; torch's own where they do not apply."""

import re

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from torchrl_lang.functional import fast_linear as module
from torchrl_lang.functional.fast_linear import fast_linear
from torchrl_lang.modules.fast_linear import FastLinear

APPLIES = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()


@pytest.fixture(autouse=True)
def every_product_is_large(monkeypatch):
    monkeypatch.setattr(module, "_MANY_PRODUCTS", 1)


def leaves(shape=(5, 7), dtype=torch.float32, out=4):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g, dtype=dtype).requires_grad_() for s in (shape, (out, shape[-1]), (out,))]


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (7,), (0, 7), (2, 0, 7)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out", [4, 9])
def test_values_and_gradients_are_those_of_torch(shape, bias, out):
    given = leaves(shape, out=out)[: 3 if bias else 2]
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
    for bias in (torch.arange(10.0)[::2], torch.tensor([2.0]).expand(5), torch.tensor(2.0)):
        torch.testing.assert_close(fast_linear(x, weight, bias), x @ weight.mT + bias)
    windows, row = torch.arange(6.0).unfold(0, 3, 1), torch.ones(1, 3, requires_grad=True)
    fast_linear(windows, row).sum().backward()
    assert row.grad.tolist() == [[0 + 1 + 2 + 3, 1 + 2 + 3 + 4, 2 + 3 + 4 + 5]]
    stored = torch.ones(4, 5, requires_grad=True)  # a gradient in the same order is not copied
    (gradient,) = torch.autograd.grad(fast_linear(x, stored.mT).sum(), stored)
    torch.testing.assert_close(gradient, x.sum((0, 1))[:, None].expand(4, 5))
    assert gradient.is_contiguous()


@pytest.mark.parametrize(
    ("weight", "bias"),
    [
        (torch.ones(4, 3), torch.ones(4, dtype=torch.float64)),
        (torch.ones(4, 3), torch.ones(4, device="meta")),
        (torch.ones(4, 3), torch.ones(5)),
        (torch.ones(4, 5), None),
        (torch.ones(2, 4, 3), None),
    ],
    ids=["bias of another dtype", "bias elsewhere", "longer bias", "wider weight", "stacked weights"],
)
def test_errors_are_those_of_torch(weight, bias):
    x = torch.ones(2, 3)
    with pytest.raises(RuntimeError) as theirs:
        F.linear(x, weight, bias)
    with pytest.raises(RuntimeError, match=re.escape(str(theirs.value))):
        fast_linear(x, weight, bias)


def test_tensors_are_written_to_in_place_where_torch_allows_it():
    x, weight, _ = leaves((2, 3, 7))
    y = fast_linear(x, weight)
    y[:, 0] = 0
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0][:, 1:], weight.sum(0).expand(2, 2, 7))
    assert y._base is None  # FSDP warns of views
    with torch.no_grad():
        y = fast_linear(torch.ones(2, 3, 7), weight.detach())
    factor = torch.tensor(2.0, requires_grad=True)
    expected = y.sum()
    torch.testing.assert_close(torch.autograd.grad(y.mul_(factor).sum(), factor)[0], expected)
    for i, needing in enumerate((x, weight)):
        given = [x.detach(), weight.detach()]
        given[i] = needing.clone()
        y = fast_linear(*given)
        with torch.no_grad():
            given[i].zero_()  # its gradient is made of the other
        assert torch.autograd.grad(y.sum(), needing)[0].all()
    changed = weight.clone()
    y = fast_linear(x, changed)
    with torch.no_grad():
        changed.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


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


@pytest.mark.skipif(not APPLIES, reason="torch has no MKL or no oneDNN here")
@pytest.mark.parametrize(
    ("rows", "features", "out", "large"),
    [(512, 64, 64, True), (511, 64, 64, False), (1, 257, 256, True), (1, 256, 256, False), (0, 257, 256, False)],
)
def test_small_products_are_those_of_torch(monkeypatch, rows, features, out, large):
    """Two million multiplications, or weights that do not stay in a cache: below, a call costs more than it saves."""
    monkeypatch.undo()
    x, weight = torch.ones(rows, features, requires_grad=True), torch.ones(out, features)
    found = fast_linear(x, weight)
    assert found.unique().tolist() == ([features] if rows else [])
    assert (type(found.grad_fn).__name__ == "_LinearBackward") == large


def test_transforms_of_functions():
    x, weight, bias = (t.detach() for t in leaves())
    torch.testing.assert_close(torch.vmap(fast_linear, (0, None, None))(x, weight, bias), F.linear(x, weight, bias))
    found = torch.func.grad(lambda w: fast_linear(x, w, bias).sum())(weight)
    torch.testing.assert_close(found, x.sum(0).expand(4, 7))
    with forward_ad.dual_level():
        y = fast_linear(forward_ad.make_dual(x, torch.ones(5, 7)), weight)
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, weight.sum(1).expand(5, 4))


def test_many_gradients_at_once():
    given = leaves((2, 7))
    into = torch.eye(8).view(8, 2, 4)
    ours, theirs = (torch.autograd.grad(f(*given), given, into, is_grads_batched=True) for f in (fast_linear, F.linear))
    torch.testing.assert_close(ours, theirs)


class Named(Tensor):
    """Notes the functions that are called."""

    called: list = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.called.append(function)
        return super().__torch_function__(function, types, args, kwargs)


def test_what_follows_operations_sees_those_of_torch():
    given = leaves()
    with FlopCounterMode(display=False) as counter:
        fast_linear(*given)
    assert counter.get_total_flops() == 2 * 5 * 7 * 4
    for i in range(3):
        Named.called.clear()
        fast_linear(*(t.as_subclass(Named) if i == j else t for j, t in enumerate(given)))
        assert F.linear in Named.called
    x, weight, bias = (t.detach() for t in given)
    traced = torch.jit.trace(lambda x: fast_linear(x, weight, bias), x)
    torch.testing.assert_close(traced(x + 1), F.linear(x + 1, weight, bias))
    graph = torch.fx.symbolic_trace(nn.Sequential(FastLinear(7, 4)))
    torch.testing.assert_close(graph(x), F.linear(x, *graph.parameters()))
