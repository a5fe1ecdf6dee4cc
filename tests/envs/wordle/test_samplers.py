"""Branched and adversarial games really continue the expert's, and every row carries what it is."""

import pickle

import pytest
import torch

from torchrl_lang.data import PolicySampler
from torchrl_lang.envs import wordle
from torchrl_lang.envs.wordle.samplers import AdversarialGames, BranchedGames, continue_games, guess_pairs, rows_before
from torchrl_lang.envs.wordle.transcript import turns_of_rows
from torchrl_lang.schema import ROW_KEYS, check_row

WORDS = wordle.demo_words(60)


@pytest.fixture(scope="module")
def branched():
    """Rows of 30 games, with two branches of each state."""
    return BranchedGames(wordle.WordleEnv(WORDS, [32], rules="ilql"), branches=2)(range(100, 130), seed=1)


def test_every_state_of_every_game_has_its_branches(branched):
    rows, guesses = branched, turns_of_rows(branched).tries
    for game in range(100, 130):
        mine = rows["game"] == game
        expert = mine & (rows["kind"] == 0)
        assert expert.sum() == 1
        assert mine.nonzero()[0] == expert.nonzero()[0]  # the expert's row comes first
        expected = torch.arange(int(guesses[expert])).repeat_interleave(2)
        assert torch.equal(rows["branch_turn"][mine & (rows["kind"] == 1)], expected)
    assert (wordle.count_consistent(rows, WORDS, rules="ilql") >= 1).all()  # its colours are those of a hidden word
    assert rows["terminated"].all()


def test_a_branch_begins_with_the_experts_row_and_continues_it(branched):
    rows = branched
    experts = {int(row["game"]): row for row in rows[rows["kind"] == 0]}
    for row in rows[rows["kind"] == 1]:
        expert, turn = experts[int(row["game"])], int(row["branch_turn"])
        length = 1 + 12 * turn
        for key in ROW_KEYS:
            assert torch.equal(row[key][:length], expert[key][:length]), key
        assert int((row["tokens"] == 30).sum()) > turn  # it has at least one more guess
    check_row(rows)


def test_the_train_mask_excludes_the_experts_guesses_only(branched):
    rows = branched
    excluded = rows["agent_mask"] & ~rows["train_mask"]
    assert torch.equal(excluded.sum(-1), 6 * rows["branch_turn"])
    assert not excluded[rows["kind"] == 0].any()
    assert (~rows["train_mask"] <= rows["agent_mask"]).all()
    env = wordle.WordleEnv(WORDS, [32])
    assert "train_mask" not in BranchedGames(env, train_on_opening=True)(range(3), seed=0).keys()
    rows = AdversarialGames(env, train_on_opening=False)(range(8), seed=0)
    assert torch.equal((rows["agent_mask"] & ~rows["train_mask"]).sum(-1), 6 * rows["branch_turn"])
    alone = AdversarialGames(env, adversarial_games=0, suboptimal_games=0)(range(5), seed=0)
    assert alone["kind"].tolist() == [0] * 5


def test_an_invalid_guess_is_part_of_the_state():
    """A guess that is on no list gets no colours; the state after it ends with the guess."""
    games = wordle.WordleEnv(["crane", "slate"], [1], guesses="words", seed=0)
    rows = PolicySampler(games, wordle.RandomWordPlayer(["fuzzy"]))(range(1), seed=0)
    state = rows_before(rows, torch.tensor([2]))
    assert games.tokenizer.decode(state["tokens"][state["attention_mask"]]) == "<a>fuzzy</a>fuzzy</a>"
    assert (continue_games(games, wordle.RandomWordPlayer(["crane", "slate"], seed=0), state)["terminated"]).all()


@pytest.fixture(scope="module")
def adversarial():
    return AdversarialGames(wordle.WordleEnv(WORDS, [32]), adversarial_games=3, suboptimal_games=2)(range(40), seed=2)


def test_the_kinds_have_their_numbers(adversarial):
    rows = adversarial
    guesses = turns_of_rows(rows).tries
    long = (rows["kind"] == 0) & (guesses >= 3)
    assert 0 < long.sum() < 40
    count = torch.bincount(rows["kind"], minlength=3).tolist()
    assert count == [40, 3 * int(long.sum()), 80]
    for game, has_three in zip(range(40), long[rows["kind"] == 0].tolist(), strict=True):
        assert rows["kind"][rows["game"] == game].tolist() == [0] + [1] * (3 * has_three) + [2] * 2


@pytest.mark.parametrize("kind", [BranchedGames, AdversarialGames])
def test_rows_depend_on_numbers_and_seed_also_in_another_process(kind):
    maker = kind(wordle.WordleEnv(WORDS, [32]))
    rows = maker(range(4, 8), seed=3)
    assert (kind(wordle.WordleEnv(WORDS, [32]))(range(4, 8), seed=3) == rows).all()
    copy = pickle.loads(pickle.dumps(maker))  # noqa: S301
    assert (copy(range(4, 8), seed=3) == rows).all()
    other = maker(range(4, 8), seed=4)
    assert other.shape != rows.shape or not (other["tokens"] == rows["tokens"]).all()


def test_mixtures_per_game_draw_their_player_for_each_continued_game():
    players = [wordle.RepeatPlayer(["fuzzy"]), wordle.RandomWordPlayer(WORDS, prob_smart=1.0)]
    maker = BranchedGames(wordle.WordleEnv(WORDS, [32]), suboptimal=wordle.MixturePlayer(players, per="game"))
    rows = maker(range(20), seed=0)
    maker(range(20, 40), seed=0)
    assert (maker(range(20), seed=0) == rows).all()
    # A repeater that takes over repeats an earlier guess, so it never solves the game; the other player mostly does.
    late = rows[(rows["kind"] == 1) & (rows["branch_turn"] > 0)]
    turns, row = turns_of_rows(late), torch.arange(len(late))
    own = turns.guess[row, late["branch_turn"].clamp_max(5)]
    earlier = torch.arange(6) < late["branch_turn"][:, None]
    repeats = ((turns.guess == own[:, None]).all(-1) & earlier).any(-1)
    assert 0.2 < repeats.float().mean() < 0.8
    assert (late["token_reward"].sum(-1)[repeats] == -6).all()


def test_pairs_hold_both_guesses_of_the_state_where_a_row_branches_off(branched, adversarial):
    for rows, kind in ((branched, 1), (adversarial, 1), (adversarial, 2)):
        turns = turns_of_rows(rows)
        experts = {int(rows["game"][row]): row for row in (rows["kind"] == 0).nonzero().flatten().tolist()}
        expected = []
        for row in (rows["kind"] == kind).nonzero().flatten().tolist():
            expert, turn = experts[int(rows["game"][row])], int(rows["branch_turn"][row])
            pair = [wordle.WordIndex.text(turns.guess[each, turn]) for each in (expert, row)]
            expected += [(12 * turn + 1, *pair)] * (pair[0] != pair[1])
        text = wordle.WordIndex.text
        found = [(len(p.tokens), text(p.expert), text(p.other)) for p in guess_pairs(rows, kind)]
        assert found == expected
        assert len(found) > 10
    assert guess_pairs(adversarial[adversarial["kind"] == 2], 2) == []
