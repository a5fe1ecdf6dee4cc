from __future__ import annotations

import hashlib

import pytest
import torch
from torchrl.envs import RewardScaling, StepCounter, TransformedEnv

from torchrl_lang.data import generate_dataset, rows_from_rollout
from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor
from torchrl_lang.text import from_row
from torchrl_lang.transforms import KLConstrainedTransform, frozen_copy

EPISODES = 50


def act(td):
    written = td["attention_mask"].sum(-1, keepdim=True)
    return td.set("action", (written + torch.arange(4)) % 4)


def make(talk, folder, *, batch, **kwargs):
    env = talk(batch_size=batch, row_length=96, patience=6)
    options = {"episodes": EPISODES, "seed": 3, "progress": False, "policy": act, **kwargs}
    policy, folder = options.pop("policy"), folder / f"{batch}"
    return env, generate_dataset(env, policy, folder, **options)


def digest(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("batch", [[1], [7], [64], [2, 3], []])
def test_the_data_set_holds_the_first_episodes_to_begin(talk, tmp_path, batch):
    """Short or long, episode k of the seed is row k; so the batch size does not matter."""
    env, dataset = make(talk, tmp_path, batch=batch)
    turns = [sum(turn.by_agent for turn in dataset.episode(k).turns) for k in range(len(dataset))]
    assert turns == env.lengths(torch.arange(EPISODES)).tolist()


def test_the_first_to_finish_would_be_the_short_ones(talk):
    """The bias that the test above guards against is there to be had."""
    env = talk(batch_size=[EPISODES], row_length=96, patience=6, seed=3)
    rollout = env.rollout(60, act, break_when_any_done=False)
    rows = rows_from_rollout(rollout, unfinished="drop")
    when = rollout["next", "done"].squeeze(-1).nonzero()[:, 1]
    first = rows[when.argsort(stable=True)[:EPISODES]]
    turns = [sum(turn.by_agent for turn in from_row(row, env.tokenizer).turns) for row in first.unbind(0)]
    assert sum(turns) < 0.8 * env.lengths(torch.arange(EPISODES)).sum()


def test_the_same_seed_gives_the_same_files(talk, tmp_path):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    folders = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        (tmp_path / name).mkdir()
        folders.append(make(talk, tmp_path / name, batch=[8], seed=seed, policy=None)[1].folder)
        torch.rand(3)
        torch.random.set_rng_state(before)
    first, second, other = (digest(folder) for folder in folders)
    assert first == second
    assert first["rows/tokens.memmap"] != other["rows/tokens.memmap"]


def test_the_global_stream_is_left_alone(talk, tmp_path):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    make(talk, tmp_path, batch=[8], policy=None)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_manifest_tells_who_played(talk, tmp_path):
    _, dataset = make(talk, tmp_path, batch=[8], policy=None, notes={"patience": 6})
    assert dataset.manifest["notes"] == {"patience": 6}
    assert dataset.manifest["source"] == "random tokens in Talk"
    assert dataset.manifest["seed"] == 3
    assert dataset.manifest["episodes"] == EPISODES == len(dataset)


def test_a_limit_from_outside_truncates(talk, tmp_path):
    env = TransformedEnv(talk(batch_size=[8], row_length=96, patience=6), StepCounter(max_steps=2))
    dataset = generate_dataset(env, act, tmp_path / "x", episodes=20, seed=0, progress=False)
    lengths = env.lengths(torch.arange(20))
    assert dataset[:]["terminated"].flatten().tolist() == (lengths <= 2).tolist()
    assert dataset[:]["truncated"].flatten().tolist() == (lengths >= 2).tolist()
    env.rollout(2, act)  # the environment is left open


def test_a_progress_bar_on_demand(talk, tmp_path, capsys):
    make(talk, tmp_path, batch=[8], progress=True)
    assert "mean_return" in capsys.readouterr().err
    with pytest.raises(FileExistsError):
        make(talk, tmp_path, batch=[8])
    make(talk, tmp_path, batch=[8], overwrite=True)
    assert capsys.readouterr().err == ""


def test_nothing_is_left_behind_by_a_failing_player(talk, tmp_path):
    def fall_over(td):
        raise RuntimeError("tired")

    with pytest.raises(RuntimeError, match="tired"):
        make(talk, tmp_path, batch=[8], policy=fall_over)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="episodes must be an integer of at least 1"):
        make(talk, tmp_path, batch=[8], episodes=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(talk, tmp_path, value):
    class Broken(talk):
        def _reply(self, utterance, task, live):
            reply, task = super()._reply(utterance, task, live)
            return reply._replace(reward=torch.where(task["number"] == 9, value, reply.reward)), task

    with pytest.raises(ValueError, match="not finite"):
        generate_dataset(Broken(batch_size=[4]), act, tmp_path / "x", episodes=20, seed=0, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_rewards_are_those_that_transforms_left(talk, tmp_path):
    def rewards(name, **kwargs):
        env = TransformedEnv(talk(batch_size=[4], row_length=96, patience=6), RewardScaling(0.0, 10.0))
        options = {"episodes": 20, "seed": 3, "progress": False, **kwargs}
        return generate_dataset(env, act, tmp_path / name, **options)[:]["token_reward"]

    own = rewards("own", reward_key=None)
    assert own.any()
    torch.testing.assert_close(rewards("scaled"), 10 * own)


def test_rewards_less_a_penalty_are_refused(talk, tmp_path):
    env = talk(batch_size=[4], row_length=96, patience=6)
    lm = causal_lm(vocab_size=env.tokenizer.vocab_size, layers=1, width=8, heads=1, max_length=96)
    actor = language_actor(lm)
    policy = UtteranceActor(actor, env.tokenizer.control, 4, seed=0)
    env = TransformedEnv(env, KLConstrainedTransform(frozen_copy(policy), 0.1))
    with pytest.raises(ValueError, match="which a dataset does not record"):
        generate_dataset(env, policy, tmp_path / "x", episodes=8, seed=0, progress=False)
    assert list(tmp_path.iterdir()) == []
