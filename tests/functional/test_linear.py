"""Terms of a linear layer over a vocabulary: equal to the plain form in value and gradient, whatever the pieces."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.memory import peak_bytes
from torchrl_lang.functional import cql_term, linear
from torchrl_lang.functional.linear import linear_cross_entropy, linear_margin
from torchrl_lang.functional.value_terms import margin_term

N, V, WIDTH = 7, 11, 5


def tensors(heads=2, n=N, vocabulary=V, width=WIDTH, dtype=torch.float64, bias=True, scale=1.0):
    g = torch.Generator().manual_seed(0)
    lead = () if heads is None else (heads,)
    shapes = [(*lead, n, width), (*lead, vocabulary, width), *([(*lead, vocabulary)] if bias else [])]
    leaves = [(scale * torch.randn(shape, generator=g, dtype=torch.float64)).to(dtype) for shape in shapes]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    return leaves, torch.randint(vocabulary, (n,), generator=g), torch.rand(n, generator=g, dtype=torch.float64)


def plain(kind, leaves, target, option):
    """``[n, N]`` by autograd over the whole table."""
    features, weight, *bias = leaves
    stacked = features.ndim == 3
    logits = features @ weight.mT + (bias[0].unsqueeze(-2) if bias else 0)
    table = logits.transpose(0, 1) if stacked else logits.unsqueeze(1)
    each = (cql_term if kind == "softmax" else margin_term)(table, target, option).mT
    return each if stacked else each[0]


def ours(kind, leaves, target, option, **options):
    features, weight, *bias = leaves
    bias = bias[0] if bias else None
    if kind == "softmax":
        return linear_cross_entropy(features, weight, bias, target, temperature=option, **options)
    return linear_margin(features, weight, bias, target, margin=option, **options)


def assert_same_gradients(found, expected, leaves):
    gradients = (torch.autograd.grad(one, leaves, retain_graph=True) for one in (found, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


CASES = [("softmax", 1.0), ("softmax", 0.7), ("margin", 0.0), ("margin", 0.4)]
KINDS = pytest.mark.parametrize(("kind", "option"), CASES)


@KINDS
@pytest.mark.parametrize("chunk_size", [None, 1, 3, 100])
@pytest.mark.parametrize("heads", [None, 1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_plain_form_gradients_too(kind, option, chunk_size, heads, bias):
    leaves, target, w = tensors(heads, bias=bias)
    expected = plain(kind, leaves, target, option)
    for recompute in (False, True):
        term = ours(kind, leaves, target, option, position_weight=w, chunk_size=chunk_size, recompute=recompute)
        torch.testing.assert_close(term.each, expected)
        torch.testing.assert_close(term.total, (expected * w).sum())
        assert_same_gradients(3 * term.total, 3 * (expected * w).sum(), leaves)


@KINDS
@pytest.mark.parametrize("recompute", [False, True])
def test_single_positions_and_the_targets_own_value_join_in(kind, option, recompute):
    leaves, target, w = tensors()
    expected = plain(kind, leaves, target, option)
    features, weight, bias = leaves
    value = (features * weight[:, target]).sum(-1) + bias[:, target]
    outer, other = torch.randn(2, 2, N, dtype=torch.float64)
    for each, factor in ((0.0, 0.0), (0.0, 1.5), (1.0, 0.0), (1.0, 1.5)):
        term = ours(kind, leaves, target, option, position_weight=w, chunk_size=3, recompute=recompute)
        torch.testing.assert_close(term.taken, value)
        loss = (outer * term.taken).sum() + (factor * term.total if factor else 0)
        loss = loss + (each * (term.each * other).sum() if each else 0)
        reference = (outer * value).sum() + factor * (expected * w).sum() + each * (expected * other).sum()
        assert_same_gradients(loss, reference, leaves)
        if not each + factor:  # what was kept for the sum is still there
            assert_same_gradients(term.total, (expected * w).sum(), leaves)


def test_a_second_backward_pass_gives_the_same_gradients_and_a_second_order_is_refused():
    """The kept gradients are scaled in place and may live on as somebody's ``grad``."""
    leaves, target, w = tensors()
    total = ours("softmax", leaves, target, 1.0, position_weight=w).total
    (2 * total).backward(retain_graph=True)
    first = [leaf.grad.clone() for leaf in leaves]
    (2 * total).backward()
    for leaf, once in zip(leaves, first, strict=True):
        torch.testing.assert_close(leaf.grad, 2 * once)
    total = ours("softmax", leaves, target, 1.0).total
    with pytest.raises(RuntimeError, match="no second-order gradients"):
        torch.autograd.grad(total + leaves[0].square().sum(), leaves[0], create_graph=True)


@KINDS
def test_bf16_autocast_is_close_to_autocast_of_the_plain_form(kind, option):
    leaves, target, w = tensors(dtype=torch.float32, scale=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        term = ours(kind, leaves, target, option, position_weight=w.float())
    expected = plain(kind, leaves, target, option)
    assert term.total.dtype == torch.float32
    torch.testing.assert_close(term.each, expected, rtol=0.05, atol=0.05)
    got = torch.autograd.grad(term.total, leaves)
    for a, b in zip(got, torch.autograd.grad((expected * w.float()).sum(), leaves), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.03 * b.norm()


class _Products(TorchDispatchMode):
    """Notes the greatest tensor that any operation makes, and how often two matrices are multiplied."""

    def __init__(self):
        super().__init__()
        self.greatest, self.products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.greatest = max(self.greatest, tensor.numel())
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return out


def test_the_table_is_never_built_and_no_product_is_computed_twice():
    """Three products a piece and head, four where the tables are made again; nothing larger than a piece."""
    leaves, target, w = tensors(n=400, vocabulary=300, width=4, dtype=torch.float32)
    for recompute, products in ((False, 3), (True, 4)):
        with _Products() as seen:
            term = ours("softmax", leaves, target, 1.0, position_weight=w.float(), chunk_size=100, recompute=recompute)
            (term.each.sum() if recompute else term.total).backward()
        assert (seen.products, seen.greatest) == (products * 4 * 2, 100 * 300)


def test_products_of_large_layers_are_the_same_one_piece_at_a_time(monkeypatch):
    leaves, target, _ = tensors(None, n=400, vocabulary=3000, width=4, dtype=torch.float32)
    expected = ours("softmax", leaves, target, 1.0).total
    monkeypatch.setattr(linear, "_FAST_WEIGHTS", 0)
    found = ours("softmax", leaves, target, 1.0, chunk_size=100).total
    torch.testing.assert_close(found, expected)
    assert_same_gradients(found, expected, leaves)
    assert peak_bytes(lambda: ours("softmax", leaves, target, 1.0, chunk_size=100)) < 1.5 * 100 * 3000 * 4


def test_what_does_not_fit_is_named():
    (features, weight, bias), target, w = tensors(None)
    whole = {"features": features, "weight": weight, "bias": bias, "target": target, "position_weight": w}
    for name in ("weight", "bias", "target", "position_weight"):
        with pytest.raises(ValueError, match=f"{name} must have shape"):
            linear_cross_entropy(**(whole | {name: whole[name][1:, None]}))
