"""Frozen lower layers: exactly the top trains, and nothing is kept for those below."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.modules.toys import CONTROL, rows
from torchrl_lang.modules import Trunk, UtteranceActor, causal_lm, language_actor
from torchrl_lang.modules.frozen.lower_layers import train_top_layers, transformer_blocks


def lm_of(kind, layers=3, **config):
    return causal_lm(kind, vocab_size=13, layers=layers, width=16, heads=2, max_length=20, **config)


def trains(module):
    return {p for p in module.parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("kind", "layers", "config"),
    [("gpt2", 1, {}), ("gpt2", 2, {"tie_word_embeddings": False}), ("llama", 3, {}), ("qwen2", 1, {})],
)
def test_exactly_the_top_trains(kind, layers, config):
    lm = lm_of(kind, **config)
    blocks = list(lm.base_model.h if kind == "gpt2" else lm.base_model.layers)
    top = nn.ModuleList([*blocks[3 - layers :], lm.base_model.ln_f if kind == "gpt2" else lm.base_model.norm])
    expected = set(top.parameters())
    if not lm.config.tie_word_embeddings:
        expected.add(lm.get_output_embeddings().weight)
    count = train_top_layers(UtteranceActor(language_actor(lm), CONTROL, 4, vocab_size=12), layers)
    assert trains(lm) == expected
    assert count == sum(p.numel() for p in expected)


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="Cannot train 4 of the model's 3 layers"):
        train_top_layers(lm_of("gpt2"), 4)
    with pytest.raises(ValueError, match="neither a Trunk nor"):
        train_top_layers(nn.Linear(2, 2), 1)
    lm = lm_of("gpt2", layers=2)
    lm.transformer.more = nn.ModuleList([nn.Identity(), nn.Identity()])
    with pytest.raises(ValueError, match="has 2 lists of 2 modules"):
        transformer_blocks(lm)


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


def test_a_frozen_trunk_keeps_nothing():
    kept = []
    for layers in (1, 4):
        actor = language_actor(Trunk(lm_of("llama", layers)), head=torch.nn.Linear(16, 13))
        actor[0].requires_grad_(False)
        kept.append(bytes_kept(actor))
    assert kept[0] == kept[1] > 0  # the head's own: nothing that grows with the number of blocks


def test_checkpointing_keeps_one_state_a_block():
    plain, checkpointed = (language_actor(lm_of("llama", 4)).train() for _ in range(2))
    checkpointed[0].module.gradient_checkpointing()
    assert bytes_kept(checkpointed) < 0.4 * bytes_kept(plain)
