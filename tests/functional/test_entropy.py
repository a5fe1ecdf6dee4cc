from __future__ import annotations

import pytest
import torch
from torch.distributions import Categorical

from torchrl_lang.functional import categorical_entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_that_of_torch(dtype):
    logits = 3 * torch.randn(2, 5, 7, dtype=dtype, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(categorical_entropy(logits.log_softmax(-1)), Categorical(logits=logits).entropy())


def test_tokens_that_cannot_be_said_add_nothing_and_have_finite_gradients():
    logits = torch.tensor([0.3, -0.2, 1.0, 0.0], requires_grad=True)
    barred = torch.tensor([False, False, False, True])
    entropy = categorical_entropy(logits.masked_fill(barred, -torch.inf).log_softmax(-1))
    torch.testing.assert_close(entropy, Categorical(logits=logits[:3]).entropy())
    (found,) = torch.autograd.grad(entropy, logits)
    (expected,) = torch.autograd.grad(Categorical(logits=logits[:3]).entropy(), logits)
    assert found[3] == 0
    torch.testing.assert_close(found, expected)
