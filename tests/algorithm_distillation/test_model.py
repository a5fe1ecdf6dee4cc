"""The model: against plain NumPy loops, causal, and reading what it should; saved ones compute the same."""

import json
import os

import numpy as np
import pytest
import torch
from torchrl.data import Binary, Bounded, Categorical, OneHot, Unbounded

from tests.algorithm_distillation import reference
from tests.algorithm_distillation.models import CONTEXT, EPISODE, model, windows
from tests.sealed import reseal
from torchrl_lang._files import FileError
from torchrl_lang.algorithm_distillation import ADTransformer, Continuous, Discrete, load_ad_model, save_ad_model
from torchrl_lang.algorithm_distillation.entries import entry_of_spec
from torchrl_lang.algorithm_distillation.network import StepEmbedding, Steps
from torchrl_lang.envs.grids import DarkRoomEnv


def test_hidden_states_and_predictions_equal_plain_loops():
    made = model()
    rows = made(windows(made))
    w = reference.weights_of(made)
    for row in rows.unbind(0):
        columns = [row[key].squeeze(-1).numpy() for key in ("observation", "action", "reward", "episode_step")]
        embedded = reference.embed(w, [3, 4, 6, EPISODE, CONTEXT], *columns)
        hidden = reference.hidden_states(w, 2, 2, embedded)
        logits = reference.linear(w, "action_head.out", hidden)
        np.testing.assert_allclose(row["action_parameters"].detach(), logits, atol=2e-4)
        mixed = reference.linear(w, "outcome_head.hidden", hidden) + w["outcome_head.action.weight"][row["action"]]
        mixed = np.maximum(mixed, 0)
        reward, log_prob = reference.linear(w, "outcome_head.reward_and_log_prob", mixed).T
        np.testing.assert_allclose(row["predicted_reward"][..., 0].detach(), reward, atol=2e-4)
        np.testing.assert_allclose(row["predicted_log_prob"].detach(), log_prob, atol=2e-4)
        observation = reference.linear(w, "outcome_head.observation", mixed)
        np.testing.assert_allclose(row["predicted_observation"].detach(), observation, atol=2e-4)


# What the prediction of a key at step 4 may depend on: entries of the same step, and of the one before.
SAME_STEP = {
    "action_parameters": {"observation", "episode_step"},
    "predicted_reward": {"observation", "episode_step", "action"},
}


@pytest.mark.parametrize("key", SAME_STEP)
@pytest.mark.parametrize("entry", ["observation", "action", "reward", "episode_step"])
def test_each_step_reads_earlier_steps_and_the_start_of_its_own(made, key, entry):
    base, t = windows(made), 4
    changed = base.clone()
    value = changed[entry][:, t]
    changed[entry][:, t] = value + 1 if value.is_floating_point() else 1 - value.clamp_max(1)
    before, after = made(base)[key], made(changed)[key]
    moved = (before != after).flatten(2).any(-1).any(0)
    assert not moved[:t].any(), "reads the future"
    assert bool(moved[t]) == (entry in SAME_STEP[key])
    assert moved[t + 1 :].all(), "does not read the past"


def test_no_reward_differs_from_a_reward_of_zero():
    """Also for a model without positions."""
    made = model()
    with torch.no_grad():
        made.trunk.embedding.table.weight[-CONTEXT:] = 0
    rows = windows(made, length=2)
    rows["reward"][:] = 0
    rows["episode_step"][:] = 0
    rows["observation"][:, 1] = rows["observation"][:, 0]
    embedded = made.trunk.embedding
    with torch.no_grad():
        embedded.table.weight[7:13] = 0  # previous actions
    hidden = made.hidden_states(rows)
    assert (hidden[:, 0] - hidden[:, 1]).abs().max() > 1e-3


def test_shapes_for_any_batch_shape(made):
    rows = windows(made, rows=6)
    flat, deep, single = made(rows.clone()), made(rows.clone().view(2, 3, CONTEXT)), made(rows[0].clone())
    for key in made.out_keys:
        assert torch.allclose(flat[key], deep[key].flatten(0, 1), atol=1e-5)
        assert torch.allclose(flat[key][0], single[key], atol=1e-5)
    assert made.get_dist(rows).batch_shape == rows.shape


def test_the_model_of_an_environment_and_entries_of_specs():
    room = ADTransformer.for_env(DarkRoomEnv(7, episode_length=10), context=30, width=8)
    assert (room.observation, room.action, room.episode_length) == (Discrete([7, 7]), Discrete([5]), 10)
    specs = (Categorical(4), Bounded(-1, 1, shape=(3,)), Binary(3))
    assert [entry_of_spec(spec) for spec in specs] == [Discrete([4]), Continuous(3), Discrete([2, 2, 2])]
    for spec in (OneHot(3), Unbounded(shape=(2, 2)), Unbounded(shape=())):
        with pytest.raises(ValueError, match="Categorical specs of shape"):
            entry_of_spec(spec)


@pytest.mark.parametrize("wrong", [{"context": 4}, {"width": 15}, {"action": Discrete([2, 2])}])
def test_wrong_options(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        model(**wrong)
    with pytest.raises(ValueError, match="sizes"):
        Discrete([])


@pytest.mark.parametrize(
    ("key", "value"), [("observation", 4), ("action", 5), ("episode_step", EPISODE), ("action", -1)]
)
def test_numbers_out_of_range(key, value):
    """The tables lie beside each other: the next one would be read."""
    rows = windows(model())
    rows[key][1, 2] = value
    made = model()
    with pytest.raises(ValueError, match=f"'{key}' must be at least 0 and below"):
        made.hidden_states(rows)
    made.hidden_states(windows(made))
    with pytest.raises(RuntimeError, match=f"'{key}' must be at least 0 and below"):
        made.hidden_states(rows)
    made.hidden_states(windows(made))


def test_real_numbers_of_the_steps_of_a_context():
    embedding = StepEmbedding(Continuous(1), Continuous(2), context=2, episode_length=2, width=1)
    torch.nn.init.zeros_(embedding.table.weight)
    torch.nn.init.ones_(embedding.reals.weight)
    observation, action = torch.tensor([[2.0], [11.0]]), torch.tensor([[5.0, 7.0], [5.0, 7.0]])
    steps = Steps(observation, action, torch.tensor([3.0, 3.0]), torch.arange(2), torch.arange(2))
    # The first has its observation and the flag; the second its observation, and the action and reward before it.
    assert embedding(steps).tolist() == [[2 + 1], [11 + 5 + 7 + 3]]


FILES = {"ad_model.json", "model.safetensors", "checksums.json"}


def test_a_loaded_model_computes_the_same(tmp_path, made):
    before = torch.get_rng_state()
    loaded = load_ad_model(save_ad_model(tmp_path / "model", made, trained_on={"tasks": [1, 2]}))
    assert torch.equal(before, torch.get_rng_state())
    assert set(os.listdir(tmp_path / "model")) == FILES
    rows = windows(made)
    for key in made.out_keys:
        assert torch.equal(made(rows.clone())[key], loaded(rows.clone())[key])
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert json.loads((tmp_path / "model" / "ad_model.json").read_text())["trained_on"] == {"tasks": [1, 2]}


def test_a_saved_model_is_replaced_and_other_folders_and_numbers_that_are_none_are_refused(tmp_path):
    save_ad_model(tmp_path / "model", model())
    save_ad_model(tmp_path / "model", model(seed=1))
    loaded = load_ad_model(tmp_path / "model")
    assert torch.equal(loaded.action_head.out.bias, model(seed=1).action_head.out.bias)
    (tmp_path / "model" / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError, match=r"notes.txt"):
        save_ad_model(tmp_path / "model", model())
    torch.nn.init.constant_(loaded.action_head.out.bias, torch.nan)
    with pytest.raises(ValueError, match=r"not finite, such as action_head.out.bias"):
        save_ad_model(tmp_path / "other", loaded)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=2), "version 2"),
        (lambda c: c.update(width=0), 'has 0 as "width"'),
        (lambda c: c.update(width=10**6), "does not hold the model's tensors"),
        (lambda c: c.update(layers=3), r"trunk.blocks.2"),
        (lambda c: c.update(layers=10**12), "layers"),
        (lambda c: c.update(action={"size": True}), "action"),
        (lambda c: c.pop("observation"), 'has no field "observation"'),
    ],
)
def test_wrong_descriptions(tmp_path, change, message):
    """With right checksums, as another program might write them."""
    folder = save_ad_model(tmp_path / "model", model())
    reseal(folder / "ad_model.json", change)
    with pytest.raises(FileError, match=message):
        load_ad_model(folder)
