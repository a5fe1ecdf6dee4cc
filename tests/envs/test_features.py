"""What games show beside their texts: it comes with every observation and into every row of an episode."""

from __future__ import annotations

import pytest
import torch
from torchrl.envs import SerialEnv, TransformedEnv

from tests.envs.conftest import Picture, picture_env
from tests.envs.helpers import say_after
from torchrl_lang.data import DatasetWriter, load_dataset, row_buffer, rows_from_rollout
from torchrl_lang.envs import PromptEnv, TextGameEnv, check_language_env
from torchrl_lang.modules import FeatureEmbedding, UtteranceActor, causal_lm, language_actor, with_features
from torchrl_lang.text import CharTokenizer
from torchrl_lang.transforms import KLRewardTransform, frozen_copy

LETTERS = CharTokenizer.from_alphabet("abc")
BOTH = ("features", "features_mask")


def seeds(*numbers):
    return torch.tensor(numbers)


def test_each_game_shows_its_own_and_padding_is_masked():
    td = picture_env(batch_size=[3]).reset(game_seed=seeds(0, 1, 5))
    assert td["features"].dtype == torch.float32
    assert td["features"].tolist() == [
        [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        [[0.0, 1.0, 0.0], [0.5, 0.25, 1.0]],
        [[0.0, 0.0, 1.0], [0.5, 0.25, 5.0]],
    ]
    assert td["features_mask"].tolist() == [[True, False], [True, True], [True, True]]


def test_a_state_that_is_set_has_the_features_of_its_game():
    env, other = picture_env(batch_size=[2]), picture_env(batch_size=[2])
    td = say_after(env, env.reset(game_seed=seeds(1, 2)), "a", "a")
    state = td.exclude("reward", *BOTH).set("game_seed", seeds(1, 2))
    found = other.reset(state, set_state=True)
    for key in BOTH:
        assert torch.equal(found[key], td[key])


@pytest.mark.parametrize(
    ("shown", "error", "match"),
    [
        ("x", TypeError, r"Game 0 .*shows 'x' as its features"),
        (None, TypeError, "features"),
        ([1.0, 2.0, 3.0], ValueError, r"shape \(3,\)"),
        ([[1.0, 2.0]], ValueError, r"shape \(1, 2\)"),
        ([[1.0] * 3] * 3, ValueError, r"shape \(3, 3\)"),
        ([[1.0, 2.0, float("nan")]], ValueError, "not finite"),
    ],
)
def test_what_is_no_features_is_refused(shown, error, match):
    class Wrong(Picture):
        def reset(self, seed):
            text = super().reset(seed)
            self.features = shown
            return text

    env = TextGameEnv(
        Wrong, CharTokenizer.from_alphabet("abcno?"), row_length=24, action_length=3, features=(2, 3), seed=0
    )
    with pytest.raises(error, match=match):
        env.reset()


@pytest.mark.parametrize("size", [(0, 3), (2, 0), (2, 3.0)])
def test_a_size_is_two_numbers(size):
    with pytest.raises(ValueError, match="features must be"):
        TextGameEnv(Picture, LETTERS, row_length=24, action_length=3, features=size)


# -- prompts -----------------------------------------------------------------------------------------------------------


def prompt_env(n=2, features=None, **options):
    features = [torch.eye(3)[i : i + 1] for i in range(3)] if features is None else features
    prompts, options = ["a", "a", "b"][: max(len(features), 3)], {"row_length": 12, "action_length": 3} | options

    def reward(shown, said):
        return [float(one == two) for one, two in zip(shown, said, strict=True)]

    return PromptEnv(prompts, reward, LETTERS, batch_size=[n], features=features, seed=0, **options)


def test_prompts_come_with_their_features():
    features = [[[1.0, 2.0]], torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.zeros(0, 2)]
    env = prompt_env(3, features)
    td = env.reset(game_seed=seeds(1, 2, 0))
    assert td["features"].tolist() == [[[3.0, 4.0], [5.0, 6.0]], [[0.0, 0.0], [0.0, 0.0]], [[1.0, 2.0], [0.0, 0.0]]]
    assert td["features_mask"].tolist() == [[True, True], [False, False], [True, False]]
    check_language_env(prompt_env(), lambda n: prompt_env(n), utterances=["a", "b"])


# -- what becomes of them ----------------------------------------------------------------------------------------------


def reader(env, seed=1):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lm = causal_lm(vocab_size=env.tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=40)
        actor = with_features(language_actor(lm), FeatureEmbedding(3, 8))
    return UtteranceActor(actor, env.tokenizer.control, env.action_length, seed=seed)


def one_picture_a_row(rows):
    """Whether the rows of an episode have the features of its game: those of right answers show their letter."""
    right = rows["terminated"].flatten() & (rows["token_reward"].sum(-1) == 1.0)
    tokenizer = CharTokenizer.from_alphabet("abcno?")
    for row in rows[right]:
        text = tokenizer.decode(row["tokens"][row["agent_mask"]])
        assert "abc"[int(row["features"][0].argmax())] == text.replace("</a>", "")[-1]
    return int(right.sum())


@pytest.mark.parametrize("wrap", ["plain", "transformed", "serial"])
def test_rows_of_a_rollout_keep_them(wrap):
    env = picture_env(batch_size=[32], seed=0)
    policy = reader(env)
    if wrap == "transformed":
        env = TransformedEnv(env, KLRewardTransform(frozen_copy(policy), coef=0.0))
    if wrap == "serial":
        env = SerialEnv(2, lambda: picture_env(batch_size=[16], seed=3))
    rollout = env.rollout(12, policy, break_when_any_done=False)
    rows = rows_from_rollout(rollout, unfinished="drop")
    assert one_picture_a_row(rows) > 5
    assert rows["features"].flatten(1).unique(dim=0).shape[0] > 3


def test_datasets_and_buffers_keep_them(tmp_path):
    env = picture_env(batch_size=[16], seed=0)
    rows = rows_from_rollout(env.rollout(9, reader(env), break_when_any_done=False), unfinished="drop")
    with DatasetWriter(tmp_path / "data", env.tokenizer, env.row_length, keep=BOTH) as writer:
        writer.extend(rows)
    data = load_dataset(tmp_path / "data")
    sampled = next(iter(row_buffer(data, len(rows), seed=0)))
    order = row_buffer(rows, len(rows), seed=0).sample()
    for key in (*BOTH, "tokens"):
        assert torch.equal(sampled[key], order[key])
    assert one_picture_a_row(sampled)
