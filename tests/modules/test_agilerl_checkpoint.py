"""Agents of AgileRL: here they compute what a plain reading of their weights does, and what is no agent is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.agilerl_agents import VOCAB, WIDTH, make_agent, outputs, states
from torchrl_lang._files import FileError
from torchrl_lang.modules import Trunk, load_language_model, read_agilerl, save_language_model
from torchrl_lang.modules.agilerl.checkpoint import RENAMED, renamed
from torchrl_lang.modules.agilerl.export import OPTIONS, export
from torchrl_lang.modules.agilerl.model import ACTIVATIONS
from torchrl_lang.modules.decoding.cache import RowCache
from torchrl_lang.modules.frozen.lower_layers import transformer_blocks

TOKENS = torch.randint(VOCAB, (9,), generator=torch.Generator().manual_seed(1))


def converted(agent, tmp_path):
    return read_agilerl(export(agent, tmp_path / "agent"))


KINDS = [{}, {"double_q": False}, {"bias": False}, {"embeddings": VOCAB + 3}]
KINDS += [{"activation": each} for each in ACTIVATIONS[::3]]


@pytest.mark.parametrize("more", KINDS, ids=str)
def test_every_output_at_every_position_is_the_agents(more, tmp_path):
    agent = make_agent(**more)
    ours = converted(agent, tmp_path)
    logits = ours.policy(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits, outputs(agent, "pi", states(agent, "actor", TOKENS)), rtol=1e-5, atol=1e-5)
    online, target = states(agent, "model", TOKENS), states(agent, "actor_target", TOKENS)
    torch.testing.assert_close(Trunk(ours.values)(TOKENS[None])[0], online, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(Trunk(ours.target)(TOKENS[None])[0], target, rtol=1e-5, atol=1e-5)
    names = ("q", "q2") if agent.double_q else ("q",)
    for head, networks, hidden in (
        (ours.value, ("v",), online),
        (ours.qvalue, names, online),
        (ours.target_qvalue, [f"target_{name}" for name in names], target),
    ):
        expected = torch.stack([outputs(agent, network, hidden) for network in networks], 1)
        torch.testing.assert_close(head(hidden), expected[:, 0] if head is ours.value else expected)


def test_its_options_have_our_names(tmp_path):
    ours = converted(make_agent(), tmp_path)
    assert ours.options == {
        "gamma": 0.9, "expectile": 0.8, "advantage_temperature": 0.7, "advantage_weighting": "sign",
        "weight_clip": 3.0, "transition_weight": 0.2, "value_min": -3.0, "value_max": 2.0, "detach_value": False,
        "detach_qvalue": True, "detach_actor": False, "margin": 0.1, "cql_temperature": 0.8,
    }  # fmt: skip
    assert ours.training == {"tau": 0.02, "lr": 1e-4, "weight_decay": 0.01, "batch_size": 4}
    assert renamed({"exp_weights": True}) == {"advantage_weighting": "exp"}
    assert renamed({"tau": 0.7, "alpha": 0.005, "lr": 1e-4}) == {"expectile": 0.7}
    # What remains is the number of heads, and what is never read.
    used = {*RENAMED, "exp_weights", "alpha", "lr", "weight_decay", "batch_size"}
    assert set(OPTIONS) - used == {"double_q", "per_token"}


def test_a_second_head_that_a_checkpoint_lost_is_replaced_by_its_target(tmp_path):
    agent = make_agent()
    for key in [key for key in agent.weights if key.startswith("q.")]:
        agent.weights[key.replace("q.", "q2.", 1)] = agent.weights[key].clone()
    with pytest.warns(UserWarning, match="the first Q head twice"):
        ours = converted(agent, tmp_path)
    assert torch.equal(ours.qvalue.out_weight[1], ours.target_qvalue.out_weight[1])
    assert not torch.equal(ours.qvalue.out_weight[0], ours.target_qvalue.out_weight[0])


def test_it_decodes_with_a_cache_and_checkpoints_its_gradients(tmp_path):
    ours = converted(make_agent(), tmp_path)
    for lm in (ours.policy, ours.values):
        trunk, cache = Trunk(lm), RowCache(len(TOKENS))
        assert trunk.cache_obstacle is None
        cache.extend(trunk, TOKENS[None, :5])
        rest = cache.extend(trunk, TOKENS[None, 5:], torch.arange(5, len(TOKENS))[None])
        whole = trunk(TOKENS[None])
        torch.testing.assert_close(rest, whole[:, 5:])
        assert transformer_blocks(lm) is lm.transformer.gpt.h
        gradients = []
        for enabled in (False, True):
            lm.zero_grad()
            trunk.train().gradient_checkpointing(enabled)(TOKENS[None]).square().sum().backward()
            gradients.append(lm.get_input_embeddings().weight.grad.clone())
        torch.testing.assert_close(*gradients)
    assert Trunk(ours.policy).width == 2 * WIDTH


def test_it_is_saved_with_values_on_a_model_of_their_own(tmp_path):
    ours = converted(make_agent(), tmp_path)
    heads = {"target_qvalue": ours.target_qvalue}
    save_language_model(tmp_path / "model", ours.policy, heads, value_lm=ours.target)
    saved = load_language_model(tmp_path / "model")
    assert torch.equal(saved.lm(TOKENS[None]).logits, ours.policy(TOKENS[None]).logits)
    states = Trunk(saved.value_lm)(TOKENS[None])
    assert torch.equal(states, Trunk(ours.target)(TOKENS[None]))
    assert torch.equal(saved.heads["target_qvalue"](states), ours.target_qvalue(states))
    (tmp_path / "model" / "value_lm" / "model.safetensors").unlink()
    with pytest.raises(FileError, match=r"value_lm/model.safetensors is missing"):
        load_language_model(tmp_path / "model")


def test_agilerls_own_file_is_refused_and_the_way_named(tmp_path):
    path = tmp_path / "checkpoint.pt"
    torch.save({"model_state_dict": {}, "dataset": None}, path)
    with pytest.raises(FileError, match=r"is a file; AgileRL's checkpoints are pickles.*agilerl/export.py"):
        read_agilerl(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda described, _: described.update(format="other"), "AgileRL ILQL"),
        (lambda described, _: described["options"].pop("tau"), "tau"),
        (lambda described, _: described["net_config"].update(activation="PReLU"), "PReLU"),
        (lambda described, _: described["net_config"].update(n_head=3), "holds no agent as ILQL builds it"),
        (lambda _, weights: weights.pop("pi.model.mlp_linear_layer_2.weight"), "mlp_linear_layer_2.weight"),
        (lambda _, weights: [weights.pop(key) for key in [*weights] if key.startswith("q2.")], "no network 'q2'"),
        (lambda _, weights: weights["v.model.mlp_linear_layer_1.bias"].fill_(torch.nan), "not finite"),
        (lambda _, weights: weights.update({"model.transformer.wte.weight": torch.ones(3, 8)}), "3 embeddings for 11"),
    ],
)
def test_what_is_damaged_is_refused(change, message, tmp_path):
    folder = export(make_agent(), tmp_path)
    described, weights = json.loads((folder / "agent.json").read_text()), load_file(folder / "agent.safetensors")
    change(described, weights)
    (folder / "agent.json").write_text(json.dumps(described))
    save_file(weights, folder / "agent.safetensors")
    with pytest.raises(FileError, match=message):
        read_agilerl(folder)
