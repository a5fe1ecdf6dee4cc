"""Prompts and a reward for completions."""

from functools import partial

import pytest
import torch
from torchrl.collectors import Collector

from torchrl_lang.data import EpisodeRows, row_buffer
from torchrl_lang.envs import PromptEnv, TokenEnv, check_language_env
from torchrl_lang.evaluation import play_games
from torchrl_lang.functional import group_advantages
from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor
from torchrl_lang.objectives import BCLoss
from torchrl_lang.text import CharTokenizer, from_row
from torchrl_lang.training import muon_adamw, train_steps

from .helpers import prompt_env, say_after

LETTERS = CharTokenizer.from_alphabet("abcdef")
make = partial(prompt_env, tokenizer=LETTERS, row_length=14)


def test_the_rules_of_language_environments():
    check_language_env(make(), lambda n: make([n]), utterances=["a", "fed"])
    check_language_env(TokenEnv(make()), lambda n: TokenEnv(make([n])), utterances=["a", "fed"])


def test_one_turn_rewarded_in_one_call():
    calls = []

    def reward(prompts, completions):
        calls.append((prompts, completions))
        return torch.tensor([1.0, -2.0, 0.0])[: len(prompts)]

    env = make([3], reward=reward)
    td = say_after(env, env.reset(game_seed=torch.tensor([0, 1, 2])), "a", "bb", "")
    assert calls == [(["ab", "c", ""], ["a", "bb", ""])]
    assert td["reward"].flatten().tolist() == [1.0, -2.0, 0.0]
    assert td["terminated"].all()
    turns = from_row(td[1], LETTERS).turns
    assert [(turn.text, turn.reward) for turn in turns] == [("c", None), ("bb", -2.0)]
    assert env.tokenizer.decode(td["tokens"][2, :3]) == "<a></a></eod>"  # no prompt: the agent has the first turn


def test_prompts_come_with_their_features():
    features = [[[1.0, 2.0]], torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.zeros(0, 2)]
    env = partial(make, prompts=list("abc"), features=features)
    td = env([3]).reset(game_seed=torch.tensor([1, 2, 0]))
    assert td["features"].tolist() == [[[3.0, 4.0], [5.0, 6.0]], [[0.0, 0.0], [0.0, 0.0]], [[1.0, 2.0], [0.0, 0.0]]]
    assert td["features_mask"].tolist() == [[True, True], [False, False], [True, False]]
    check_language_env(env(), lambda n: env([n]), utterances=["a", "b"])


def test_a_reward_that_draws_is_seeded_with_the_environment():
    class Drawing:
        def __init__(self):
            self.set_seed(0)

        def set_seed(self, seed):
            self.generator = torch.Generator().manual_seed(seed)

        def __call__(self, prompts, completions):
            return torch.rand(len(prompts), generator=self.generator)

    def rewards(env):
        return say_after(env, env.reset(), "a", "b")["reward"].flatten().tolist()

    env = make(reward=Drawing(), seed=5)
    first, further = rewards(env), rewards(env)
    env.set_seed(5)
    assert rewards(env) == first != further


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1.0], r"returned \[1.0\], expected 2"),
        (1.0, "returned 1.0, expected 2"),
        ([1.0, float("nan")], "finite"),
        ([1.0, "x"], "expected a finite number"),
    ],
)
def test_wrong_rewards(rewards, reason):
    env = make(reward=lambda prompts, completions: rewards)
    td = env.reset()
    with pytest.raises((TypeError, ValueError), match=reason):
        say_after(env, td, "a", "b")


@pytest.mark.slow
def test_learning_to_repeat_the_prompt():
    """Weighted imitation of its own completions finds the one right answer to each of three prompts."""

    def repeats(prompts, completions):
        return [float(prompt == completion) for prompt, completion in zip(prompts, completions, strict=True)]

    def env(games, seed):
        return PromptEnv(list("abc"), repeats, LETTERS, row_length=8, action_length=2, batch_size=games, seed=seed)

    torch.manual_seed(0)
    lm = causal_lm(vocab_size=LETTERS.vocab_size, layers=1, width=16, heads=2, max_length=10, initializer_range=0.1)
    policy = UtteranceActor(language_actor(lm), LETTERS.control, 2, seed=0)
    loss, rows_of = BCLoss(language_actor(lm), actor_normalizer="action"), EpisodeRows()
    optimizer = muon_adamw(loss, 3e-3)
    collector = Collector(env(128, 0), policy, frames_per_batch=128, total_frames=128 * 24,
                          auto_register_policy_transforms=False)  # fmt: skip
    for steps in collector:
        rows = rows_of(steps)
        advantage = group_advantages(rows["token_reward"].sum(-1), rows["tokens"][:, 1])
        for _ in train_steps(loss, row_buffer(rows[advantage > 0], 32).sample, optimizer, steps=4):
            pass
    collector.shutdown()
    assert play_games(env(64, 1), policy, games=64, seed=1).returns.mean() > 0.9
