from __future__ import annotations

import re

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import EnvBase
from torchrl.envs.utils import check_env_specs

from tests.envs.wordle.helpers import SYMBOL, action, letters, play, text
from torchrl_lang.envs.wordle import RandomWordPlayer, WordleEnv
from torchrl_lang.envs.wordle.candidate_sets import unpack_words
from torchrl_lang.envs.wordle.rules import feedback, feedback_code

WORDS = ["erase", "abide", "speed", "crane", "slate"]


def hidden(*numbers: int) -> TensorDict:
    return TensorDict(hidden_word=torch.tensor(numbers), batch_size=[len(numbers)])


def test_a_game_of_the_paper_token_by_token():
    env = WordleEnv(WORDS, batch_size=[1], rules="ilql", action_length=7)
    td = env.reset(hidden(0))
    assert text(td[0]) == "<a>"
    rewards = []
    for guess in ("crane", "xx", "abcdef", "geese", "speed", "abide"):
        td = play(env, td, guess)
        rewards.append(td["reward"].item())
    assert text(td[0]) == (
        "<a>crane</a><b><g><g><b><g></s>xx</a>abcdef</a>geese</a><b><y><y><g><g></s>speed</a><y><b><y><y><b></s>"
        "abide</a><y><b><b><b><g></s></eod>"
    )
    assert rewards == [-1.0] * 6
    assert td["attention_mask"].sum() == 60
    # Where the paper's code counts an action at index i, our mask is True on the token i + 1.
    acts = [*range(6), *range(12, 28), *range(34, 40), *range(46, 52)]
    assert (td["agent_mask"][0].nonzero().flatten() - 1).tolist() == acts
    assert (td["token_reward"][0].nonzero().flatten() - 1).tolist() == [5, 14, 21, 27, 39, 51]
    assert td["token_reward"].sum() == -6
    assert td["terminated"].item()
    assert not td["truncated"].item()


@pytest.mark.parametrize("tries", [1, 3, 6])
def test_return_of_a_game_solved_by_the_kth_guess(tries):
    env = WordleEnv(WORDS, batch_size=[1])
    td = env.reset(hidden(0))
    for guess in ["crane", "xxxxx", "abide", "speed", "slate"][: tries - 1]:
        td = play(env, td, guess)
        assert not td["done"].item()
    td = play(env, td, "erase")
    assert td["terminated"].item()
    assert td["reward"].item() == 0
    assert td["token_reward"].sum().item() == -(tries - 1)


@pytest.mark.parametrize(
    "guess", ["", "x", "four", "sixsix", "cran<g>", "</s>abcd", "<a>abcd", "<|pad|>", "</eod>aaaa"]
)
def test_invalid_guesses_cost_a_try_and_get_no_colours(guess):
    env = WordleEnv(["crane"], batch_size=[1], action_length=8, max_tries=2, consistent=True)
    td = env.reset()
    ids = [SYMBOL[s] for s in re.findall(r"<[^>]*>|.", guess)]
    full = [*ids, SYMBOL["</a>"]] + [SYMBOL["<|pad|>"]] * 8
    td["action"] = torch.tensor([full[:8]])
    td = env.step(td)["next"]
    assert td["reward"].item() == -1
    assert not td["done"].item()
    said = "" if guess == "<|pad|>" else guess
    assert text(td[0]) == f"<a>{said}</a>"
    assert td["consistent"].all()
    td = play(env, td, "crane")
    assert td["terminated"].item()
    assert td["reward"].item() == 0


def test_which_guesses_are_valid(tmp_path):
    path = tmp_path / "more.txt"
    path.write_text("zebra\n")
    for guesses, valid in ((None, (True, True, True)), ("words", (True, False, False)), (path, (True, True, False))):
        env = WordleEnv(["crane", "slate"], batch_size=[3], guesses=guesses)
        td = play(env, env.reset(hidden(0, 0, 0)), "slate", "zebra", "qqqqq")
        assert tuple("</s>" in text(row) for row in td.unbind(0)) == valid
        assert (td["reward"] == -1).all()


def test_shipped_words_and_options():
    env = WordleEnv(batch_size=[2])
    assert (env.n_words, env.row_length, env.action_length) == (2250, 74, 6)
    check_env_specs(WordleEnv(WORDS, batch_size=[3], consistent=True, seed=0))
    for kwargs, message in (
        ({"max_tries": 0}, "max_tries"),
        ({"consistent": "bits"}, "consistent='bits'"),
        ({"action_length": 5}, "action_length"),
        ({"rules": "mine"}, "rules='mine'"),
        ({"words": ["crane", "Slate"]}, "Slate"),
        ({"words": ["crane"], "guesses": ["crane", "crane"]}, "is a duplicate of"),
    ):
        with pytest.raises(ValueError, match=message):
            WordleEnv(**kwargs)


@pytest.mark.parametrize("rules", ["official", "ilql"])
def test_consistent_words_after_every_guess(rules):
    env = WordleEnv(batch_size=[64], rules=rules, consistent=True, seed=0)
    td = env.reset()
    assert td["consistent"].all()
    player = RandomWordPlayer(seed=0)
    all_words, word = letters(*env.words), letters(*env.words)[env.hidden_word]
    expected = torch.ones(64, 2250, dtype=torch.bool)
    for _ in range(4):
        td = player(td)
        guess = td["action"][:, :5]
        live = ~td["done"]
        code = feedback_code(feedback(guess, word, rules))
        same = feedback_code(feedback(guess[:, None], all_words[None], rules)) == code[:, None]
        expected = torch.where(live, expected & same, expected)
        td = env.step(td)["next"]
        assert torch.equal(td["consistent"], expected)
        assert td["consistent"].gather(-1, env.hidden_word[:, None]).all()


@pytest.mark.parametrize("words", [WORDS, None])
def test_packed_sets_unpack_to_the_sets(words):
    env, packed = (WordleEnv(words, batch_size=[3, 2], consistent=kind, seed=0) for kind in (True, "packed"))
    check_env_specs(packed)
    plain = env.rollout(14, RandomWordPlayer(words, seed=0), break_when_any_done=False)
    packed.set_seed(0)
    bits = packed.rollout(14, RandomWordPlayer(words, seed=0), break_when_any_done=False)
    for one, other in ((plain, bits), (plain["next"], bits["next"])):
        assert other["consistent"].dtype == torch.uint8
        assert other["consistent"].shape == (3, 2, 14, -(-env.n_words // 8))
        assert torch.equal(one["consistent"], unpack_words(other["consistent"], env.n_words))
    with pytest.raises(ValueError, match="9 words need uint8 of 2 bytes"):
        unpack_words(torch.zeros(1, 1, dtype=torch.uint8), 9)


def test_beginning_rows_anew_is_what_torchrl_does():
    ours, theirs = WordleEnv(WORDS, batch_size=[5], seed=0), WordleEnv(WORDS, batch_size=[5], seed=0)
    one, other = ours.reset(), theirs.reset()
    seen = []
    for turn in range(14):
        guesses = action(ours, *[WORDS[(turn + row) % 5] for row in range(5)])
        for td in (one, other):
            td.set("action", guesses).set("extra", torch.arange(1.0, 6.0)).set(("more", "still"), torch.ones(5, 2))
        one = ours.maybe_reset(ours._step_mdp(ours.step(one)))
        other = EnvBase.maybe_reset(theirs, theirs._step_mdp(theirs.step(other)))
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        for key in one.keys(True, True):
            assert torch.equal(one[key], other[key]), key
        seen.append(int((one["extra"] == 0).sum()))
    assert any(0 < zeros < 5 for zeros in seen)
    assert 0 in seen


def test_hidden_word_is_named_for_the_rows_that_are_reset():
    env = WordleEnv(batch_size=[4], seed=0)
    env.reset(hidden(3, 2, 1, 0))
    assert env.hidden_word.tolist() == [3, 2, 1, 0]
    partial = hidden(9, 8, -5, 6).set("_reset", torch.tensor([[True], [False], [False], [True]]))
    env.reset(partial)  # -5 concerns no row that is reset
    assert env.hidden_word.tolist() == [9, 2, 1, 6]
    env.hidden_word.zero_()
    assert env.hidden_word.tolist() == [9, 2, 1, 6]
