"""A vocabulary of 49,152 tokens, that of small pretrained models: nothing has values for all tokens of all places."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.objectives.models import by_hand
from torchrl_lang import modules
from torchrl_lang.modules.frozen.frozen_copy import frozen_copy
from torchrl_lang.objectives import BCLoss, ILQLLoss, PPOLoss
from torchrl_lang.schema import ControlTokens
from torchrl_lang.transforms import ConstantKLController, KLConstrainedTransform, RowReference

V, N, T = 49_152, 23, 64


class Largest(TorchDispatchMode):
    """The most numbers that a tensor has which any operation makes."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.most = max([self.most, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


def trained(make_loss):
    def step(policy, q, v, rows):
        losses = make_loss(policy, q, v)(rows)
        sum(losses[key] for key in losses.keys() if key.startswith("loss_")).backward()

    return step


def scored(policy, q, v, rows):
    KLConstrainedTransform(RowReference(frozen_copy(policy)), ConstantKLController(0.1), estimator="k1")(rows)


def ppo(policy, q, v):
    return PPOLoss(policy, v, kl_weight=0.1, kl_estimator="exact", reference=frozen_copy(policy), entropy_weight=0.1)


STEPS = {
    "bc": trained(lambda policy, q, v: BCLoss(policy, transition_weight=1.0)),
    "ilql": trained(lambda policy, q, v: ILQLLoss(policy, q, v, target="lambda")),
    "ppo": trained(ppo),
    "reference": scored,
    "acting": lambda policy, q, v, rows: policy(rows.select("tokens", "attention_mask")),
    "acting by values": lambda policy, q, v, rows: modules.UtteranceActor(
        policy.decoder.actor, policy.decoder.control, 4, guidance=modules.ValueGuidance(q, v, beta=1.0)
    )(rows.select("tokens", "attention_mask")),
}


@pytest.mark.filterwarnings("ignore:No target network updater")
@pytest.mark.parametrize("name", STEPS)
def test_no_tensor_has_values_for_the_vocabulary_at_all_places(name):
    torch.manual_seed(0)
    lm = modules.causal_lm("llama", vocab_size=V, layers=1, width=8, heads=2, max_length=T + 4)
    policy = modules.UtteranceActor(modules.language_actor(lm), ControlTokens(pad=0, end_of_action=1), 4)
    q, v = modules.qvalue_module(modules.default_qvalue_head(lm)), modules.value_module(modules.ValueHead(8))
    place, entries = torch.arange(T), ("token_log_prob", "state_value", "value_target")
    tokens = torch.randint(2, V, (N, T)).masked_fill(place % 4 == 3, 1)
    rows = by_hand(tokens, (place % 4 != 0).expand(N, T).clone(), **{key: torch.zeros(N, T) for key in entries})
    rows["advantage"] = torch.randn(N, T)
    kept, limit = {}, N * T * V / 4

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.numel()
        return x

    with ExitStack() as stack:
        largest = stack.enter_context(Largest())
        stack.enter_context(saved_tensors_hooks(keep, lambda x: x))
        STEPS[name](policy, q, v, rows)
    assert largest.most < limit
    assert sum(kept.values()) < limit
