import re

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import check_env_specs

from tests.envs.wordle.helpers import SYMBOL, letters, play, text
from torchrl_lang.envs.wordle import RandomWordPlayer, WordIndex, WordleEnv
from torchrl_lang.envs.wordle.rules import CandidateSets, feedback
from torchrl_lang.schema import ROW_KEYS

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


@pytest.mark.parametrize("guess", ["", "four", "sixsix", "cran<g>", "</s>abcd", "<|pad|>", "</eod>aaaa"])
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


def test_packed_sets_unpack_to_the_sets():
    env, packed = (WordleEnv(batch_size=[3, 2], consistent=kind, seed=0) for kind in (True, "packed"))
    assert (packed.n_words, packed.row_length, packed.action_length) == (2250, 74, 6)
    check_env_specs(WordleEnv(WORDS, batch_size=[3], consistent=True, seed=0))
    check_env_specs(packed)
    packed.set_seed(0)
    plain, bits = (e.rollout(8, RandomWordPlayer(seed=0), break_when_any_done=False) for e in (env, packed))
    sets = CandidateSets(WordIndex(env.words).letters)
    for one, other in ((plain, bits), (plain["next"], bits["next"])):
        assert other["consistent"].dtype == torch.uint8
        assert other["consistent"].shape == (3, 2, 8, -(-env.n_words // 8))
        assert torch.equal(one["consistent"], sets.members(other["consistent"]))


def test_the_draw_is_uniform_over_what_is_possible_and_follows_the_seed():
    words = ["baker", "maker", "taker", "wager", "zebra"]
    env = WordleEnv(words, batch_size=[3000], seed=0)
    td = play(env, env.reset(hidden(*[0] * 3000)), *["cater"] * 3000)

    def drawn(seed):
        other = WordleEnv(words, batch_size=[3000], seed=seed)
        other.reset(td.select(*ROW_KEYS).clone(), set_state=True)
        return other.hidden_word

    first = drawn(1)
    agree = (feedback(letters("cater"), letters(*words)) == feedback(letters("cater"), letters("baker"))).all(-1)
    count, n = first.bincount(minlength=5), int(agree.sum())
    assert 1 < n < 5
    assert (count[~agree] == 0).all()
    assert ((count[agree] - 3000 / n).abs() < 5 * (3000 / n) ** 0.5).all()
    assert torch.equal(first, drawn(1))
    assert not torch.equal(first, drawn(2))


def test_transcripts_that_cannot_go_on():
    env = WordleEnv(["crane", "slate", "abide"], batch_size=[1], max_tries=2)
    one = play(env, env.reset(hidden(1)), "crane")
    rows = one.select(*ROW_KEYS).clone()
    mute = rows.clone()
    mute["attention_mask"][0, 7:] = False  # ends in the guess
    strange, solved = rows.clone(), rows.clone()
    strange["tokens"][0, 7:12], solved["tokens"][0, 7:12] = 28, 26  # five yellow squares, five green ones
    lost = play(env, one, "abide").select(*ROW_KEYS)
    for wrong, noun in (
        (rows.clone().update(hidden(0)), "colours that do not fit its hidden_word"),
        (mute, "a valid guess without colours"),
        (strange, "colours that fit no word"),
        (solved, "no guess left"),
        (lost, "ended"),
    ):
        with pytest.raises(ValueError, match=rf"Row 0 has {noun}"):
            env.reset(wrong, set_state=True)
    words = WordleEnv(["slate", "abide"], guesses="words", batch_size=[1], max_tries=2)
    with pytest.raises(ValueError, match="colours of another"):  # there "crane" is none
        words.reset(rows, set_state=True)
    # After the errors the environment is as good as new.
    assert text(env.reset(rows, set_state=True)[0]) == "<a>crane</a><b><b><g><b><g></s>"
