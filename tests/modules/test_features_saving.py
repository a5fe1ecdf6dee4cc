"""Projectors of features on disk: with a policy, and beside a language model; damaged ones are named."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.modules.featured_rows import F, feature_rows
from tests.modules.toys import CONTROL, TOKENIZER, WIDTH, heads, reseal, tiny_lm
from torchrl_lang._files import FileError
from torchrl_lang.modules import (
    FeatureEmbedding,
    Trunk,
    UtteranceActor,
    ValueGuidance,
    language_actor,
    load_agent,
    load_language_model,
    save_agent,
    save_language_model,
    with_features,
)


def batch():
    rows = feature_rows(n=7)
    return rows.set("features", rows["features"].float())


@pytest.mark.parametrize("hidden", [0, 7])
@pytest.mark.parametrize("positions", [True, False])
def test_a_saved_agent_reads_features_as_before(tmp_path, hidden, positions):
    embedding = FeatureEmbedding(F, WIDTH, hidden=hidden, positions=positions)
    actor = with_features(language_actor(tiny_lm()), embedding)
    guidance = ValueGuidance(*heads(), beta=1.0)
    policy = UtteranceActor(actor, CONTROL, 4, method="greedy", guidance=guidance)
    agent = load_agent(save_agent(tmp_path / "agent", policy, TOKENIZER))
    assert agent.policy.in_keys == policy.in_keys
    loaded = agent.policy.decoder.actor[0].module.features
    assert loaded.config() == embedding.config()
    for name, value in embedding.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    found, expected = agent.policy(batch()), policy(batch())
    assert torch.equal(found["action"], expected["action"])
    torch.testing.assert_close(found["action_log_prob"], expected["action_log_prob"])
    manifest = json.loads((tmp_path / "agent" / "torchrl_lang.json").read_text())
    assert manifest["heads"]["features"]["options"] == embedding.config()


def saved(tmp_path):
    lm, embedding = tiny_lm(), FeatureEmbedding(F, WIDTH, hidden=7)
    return lm, embedding, save_language_model(tmp_path / "model", lm, {"features": embedding})


@pytest.mark.parametrize(("name", "value"), [("features", 4), ("width", "16"), ("hidden", 0), ("further", 1)])
def test_a_damaged_description_is_refused(tmp_path, name, value):
    _, _, folder = saved(tmp_path)
    reseal(folder, lambda content: content["heads"]["features"]["options"].update({name: value}))
    with pytest.raises(FileError, match="features"):
        load_language_model(folder)


@pytest.mark.parametrize("damage", ["missing", "shape", "not finite"])
def test_damaged_weights_are_refused(tmp_path, damage):
    _, _, folder = saved(tmp_path)
    weights = load_file(folder / "heads.safetensors")
    name = "features.project.0.weight"
    if damage == "missing":
        del weights[name]
    elif damage == "shape":
        weights[name] = weights[name][:, 1:].contiguous()
    else:
        weights[name][0, 0] = torch.nan
    save_file(weights, folder / "heads.safetensors")
    with pytest.raises(FileError, match=name):
        load_language_model(reseal(folder))


def trunk_of_values(kind, *, seeing):
    """Another model than the actor's, with a projector of its own if it sees."""
    trunk = Trunk(tiny_lm(kind, seed=5))
    return with_features(trunk, FeatureEmbedding(F, WIDTH, hidden=3) if seeing else None)


@pytest.mark.parametrize("sees", ["both", "values", "actor"])
def test_values_on_a_trunk_of_their_own_read_features_as_before(tmp_path, sees):
    actor = language_actor(tiny_lm())
    if sees != "values":
        with_features(actor, FeatureEmbedding(F, WIDTH))
    trunk = trunk_of_values("gpt2", seeing=sees != "actor")
    policy = UtteranceActor(
        actor, CONTROL, 4, method="greedy", guidance=ValueGuidance(*heads(), beta=3.0, value_trunk=trunk)
    )
    agent = load_agent(save_agent(tmp_path / "agent", policy, TOKENIZER))
    loaded = agent.policy.decoder
    assert (loaded.actor[0].module.features is None) == (sees == "values")
    assert (loaded.value_trunk.module.features is None) == (sees == "actor")
    found, expected = agent.policy(batch()), policy(batch())
    assert torch.equal(found["action"], expected["action"])
    torch.testing.assert_close(found["action_log_prob"], expected["action_log_prob"])
    other = batch()
    other["features"] += 1.0
    assert not torch.allclose(agent.policy.get_dist(other).log_prob(found["action"]), found["action_log_prob"])
