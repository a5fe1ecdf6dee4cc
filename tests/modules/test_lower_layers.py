"""Frozen lower layers: exactly the top trains, and nothing is kept for those below."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn

from tests.modules.toys import CONTROL, KINDS, rows, tiny_lm
from torchrl_lang.modules import Trunk, UtteranceActor, causal_lm, language_actor
from torchrl_lang.modules.frozen.lower_layers import train_top_layers, transformer_blocks


def lm_of(kind, layers=3, **config):
    return causal_lm(kind, vocab_size=13, layers=layers, width=16, heads=2, max_length=20, **config)


def trains(module):
    return {p for p in module.parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 3])
def test_exactly_the_top_trains(kind, layers):
    lm = lm_of(kind)
    blocks = list(lm.base_model.h if kind == "gpt2" else lm.base_model.layers)
    top = nn.ModuleList([*blocks[3 - layers :], lm.base_model.ln_f if kind == "gpt2" else lm.base_model.norm])
    expected = set(top.parameters())
    if not lm.config.tie_word_embeddings:
        expected.add(lm.get_output_embeddings().weight)
    count = train_top_layers(language_actor(lm), layers)
    assert trains(lm) == expected
    assert count == sum(p.numel() for p in expected)


def test_a_tied_head_is_frozen_and_an_untied_one_is_not():
    tied, untied = lm_of("gpt2"), lm_of("gpt2", tie_word_embeddings=False)
    for lm in (tied, untied):
        train_top_layers(lm, 2)
    assert not tied.lm_head.weight.requires_grad
    assert untied.lm_head.weight.requires_grad
    assert not untied.transformer.wte.weight.requires_grad


def test_a_step_of_an_optimizer_moves_the_top_alone():
    lm = lm_of("qwen2")
    actor = language_actor(lm)
    train_top_layers(actor, 1)
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    optimizer = torch.optim.AdamW(actor.parameters(), lr=0.1)
    actor.get_dist(rows()).logits.square().sum().backward()
    optimizer.step()
    moved = {name for name, p in lm.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if name.startswith(("model.layers.2.", "model.norm", "lm_head"))}


def test_every_way_to_hold_a_model_is_understood():
    counts = []
    for hold in (
        lambda lm: lm,
        lambda lm: language_actor(lm),
        lambda lm: UtteranceActor(language_actor(lm), CONTROL, 4),
    ):
        counts.append(train_top_layers(hold(tiny_lm("llama")), 1))
    assert counts[0] == counts[1] == counts[2] > 0
    lm = tiny_lm("gpt2")
    assert transformer_blocks(UtteranceActor(language_actor(lm), CONTROL, 4)) is lm.transformer.h
    assert transformer_blocks(lm.base_model) is lm.transformer.h


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="Cannot train 4 of the model's 3 layers"):
        train_top_layers(lm_of("gpt2"), 4)
    with pytest.raises(ValueError, match="neither a Trunk nor"):
        train_top_layers(nn.Linear(2, 2), 1)
    lm = lm_of("gpt2", layers=2)
    lm.transformer.more = nn.ModuleList([nn.Identity(), nn.Identity()])
    with pytest.raises(ValueError, match="found 2 such lists"):
        transformer_blocks(lm)


LAYERS = 4


def llama_of(kind="llama", layers=LAYERS):
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
        actor = language_actor(Trunk(llama_of(kind, layers)), head=torch.nn.Linear(16, 13))
        actor[0].requires_grad_(False)
        kept.append(bytes_kept(actor))
    assert kept[0] == kept[1] > 0  # the head's own: nothing that grows with the number of blocks


def test_adapters_keep_less_than_full_training_and_nothing_below_the_first():
    def adapted(layers):
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=layers)
        return language_actor(peft.get_peft_model(llama_of(), config))

    whole, every, last = (
        bytes_kept(actor) for actor in (language_actor(llama_of()), adapted(list(range(LAYERS))), adapted([LAYERS - 1]))
    )
    assert last < 0.5 * every
    assert every < 0.8 * whole


def test_checkpointing_keeps_one_state_a_block():
    plain, checkpointed = language_actor(llama_of()).train(), language_actor(llama_of()).train()
    checkpointed[0].module.gradient_checkpointing()
    assert bytes_kept(checkpointed) < 0.4 * bytes_kept(plain)
