"""Every loss with rows that it reads; how often a loss runs its language models."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Model

from tests.objectives.models import LOSSES, make_rows, rows_for


@pytest.fixture(params=sorted(LOSSES))
def make_loss(request):
    return LOSSES[request.param]


@pytest.fixture
def rows(request):
    callspec = getattr(request.node, "callspec", None)
    return rows_for(callspec.params.get("make_loss", "") if callspec else "")


@pytest.fixture
def passes(monkeypatch):
    """Of a call of a loss: whether gradients were on in each pass of a language model, those without first."""
    seen, forward = [], GPT2Model.forward
    count = lambda *args, **options: seen.append(torch.is_grad_enabled()) or forward(*args, **options)  # noqa: E731
    monkeypatch.setattr(GPT2Model, "forward", count)

    def of(loss, rows=None):
        seen.clear()
        loss(make_rows() if rows is None else rows)
        return sorted(seen)

    return of
