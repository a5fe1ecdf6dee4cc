"""What a trunk keeps for its backward pass: nothing of what is frozen, little under checkpointing."""

from __future__ import annotations

import peft
import pytest
import torch

from tests.modules.toys import CONTROL, rows
from torchrl_lang.modules import Trunk, causal_lm, language_actor

LAYERS = 4


def lm_of(kind="llama", layers=LAYERS):
    return causal_lm(kind, vocab_size=13, layers=layers, width=16, heads=2, max_length=20, pad=CONTROL.pad)


def bytes_kept(actor):
    """Bytes that autograd keeps of one pass over some rows; weights, which are there anyway, do not count."""
    batch, kept = rows(n=4, longest=20), {}
    weights = {p.untyped_storage().data_ptr() for p in actor.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = actor.get_dist(batch).logits
    del out
    return sum(kept.values())


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_frozen_trunk_keeps_nothing(kind):
    kept = []
    for layers in (1, LAYERS):
        actor = language_actor(Trunk(lm_of(kind, layers)), head=torch.nn.Linear(16, 13))
        actor[0].requires_grad_(False)
        kept.append(bytes_kept(actor))
    assert kept[0] == kept[1] > 0  # the head's own: nothing that grows with the number of blocks


def test_adapters_keep_less_than_full_training_and_nothing_below_the_first():
    def adapted(layers):
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=layers)
        return language_actor(peft.get_peft_model(lm_of(), config))

    whole, every, last = (
        bytes_kept(actor) for actor in (language_actor(lm_of()), adapted(list(range(LAYERS))), adapted([LAYERS - 1]))
    )
    assert last < 0.5 * every
    assert every < 0.8 * whole


def test_checkpointing_keeps_one_state_a_block():
    plain, checkpointed = language_actor(lm_of()).train(), language_actor(lm_of()).train()
    checkpointed[0].module.gradient_checkpointing()
    assert bytes_kept(checkpointed) < 0.4 * bytes_kept(plain)
