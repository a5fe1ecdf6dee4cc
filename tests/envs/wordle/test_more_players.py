"""Players of the ILQL paper that simulate, ask the user, or play start words."""

from __future__ import annotations

import copy

import pytest
import torch
from torchrl.collectors import Collector

from tests.envs.wordle.helpers import letters, plain_feedback
from tests.envs.wordle.test_terminal import Person
from torchrl_lang.envs.wordle import (
    OPENERS,
    MixturePlayer,
    MonteCarloPlayer,
    OptimalPlayer,
    RandomWordPlayer,
    StartWordPlayer,
    TreePlayer,
    Turns,
    UserPlayer,
    WordIndex,
    WordleEnv,
    demo_words,
    play_human,
    read_turns,
    solve,
)
from torchrl_lang.evaluation import play_games

WORDS = demo_words(30)


def turns_of(*histories):
    """One row for each history of ``(guess, hidden word)``, or ``None`` for an invalid guess."""
    guess = torch.zeros(len(histories), 6, 5, dtype=torch.int64)
    colours, answered, tries = torch.zeros_like(guess), [], []
    for row, history in enumerate(histories):
        heard = [move for move in history if move is not None]
        for turn, (word, hidden) in enumerate(heard):
            guess[row, turn] = letters(word)[0]
            colours[row, turn] = torch.tensor(plain_feedback(word, hidden, "official"))
        answered.append(len(heard))
        tries.append(len(history))
    return Turns(guess, colours, torch.tensor(answered), torch.tensor(tries))


# -- Monte Carlo ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("best", ["abbot", "tribe"])  # before and after the others in the alphabet
def test_the_best_first_guess_of_many_games(best):
    """One of five words splits the others, worked by hand."""
    words = ["baker", "maker", "taker", "waker", best]
    # It separates taker (t), baker (b) and the pair of maker and waker; the others split off only themselves and it.
    player = MonteCarloPlayer(RandomWordPlayer(words, prob_smart=1.0, seed=0), words, samples=500, seed=1)
    chosen = player.choose(turns_of(*[()] * 8))
    assert [WordIndex.text(guess) for guess in chosen] == [best] * 8


def test_equal_first_guesses_share_their_games_and_the_first_of_equal_means_wins():
    player = MonteCarloPlayer(RandomWordPlayer(["crane"]), ["crane"], samples=4)
    drawn = letters("aaaaa", "bbbbb", "ccccc", "bbbbb", "ccccc", "aaaaa", "bbbbb", "bbbbb")
    returns = torch.tensor([-6.0, 0, -1, -1, -2, -1, -1, -1], dtype=torch.float64)  # b: -0.5; then a and b: -1
    player._simulate = lambda turns, hidden: (drawn, returns)
    assert [WordIndex.text(guess) for guess in player.choose(turns_of([], []))] == ["bbbbb", "aaaaa"]


def test_rows_of_a_batch_are_simulated_from_their_own_state():
    words = ["baker", "maker", "taker", "point"]
    player = MonteCarloPlayer(RandomWordPlayer(words, prob_smart=1.0, seed=0), words, samples=20, seed=1)
    chosen = player.choose(
        turns_of([("baker", "point")], [("point", "taker")], [("point", "maker"), ("baker", "maker")])
    )
    assert [WordIndex.text(guess) for guess in chosen[:2]] == ["point", "taker"]  # the t of point is yellow
    assert WordIndex.text(chosen[2]) == "maker"


@pytest.mark.parametrize("used", [0, 4, 5])
def test_simulated_games_end_with_the_last_try(used):
    """Invalid guesses have used tries, too."""
    words = ["crane", "slate"]
    player = MonteCarloPlayer(RandomWordPlayer(["crane"]), words, seed=1, max_tries=6)
    before = turns_of([None] * used, [None] * used)
    first, returns = player._simulate(before, letters("slate", "crane"))
    assert returns.tolist() == [used - 6, 0]
    assert [WordIndex.text(guess) for guess in first] == ["crane", "crane"]


def test_a_finished_simulation_costs_nothing_more():
    words = ["crane", "slate", "point"]
    player = MonteCarloPlayer(RandomWordPlayer(["slate"]), words, seed=0)
    hidden = letters("slate", "point", "slate")
    _, returns = player._simulate(turns_of([], [], [("crane", "slate")]), hidden)
    assert returns.tolist() == [0, -6, 0]


def test_where_no_word_agrees_the_players_own_guess_is_played():
    player = MonteCarloPlayer(RandomWordPlayer(["crane", "fuzzy"], seed=0), ["crane", "slate"], seed=0)
    impossible = turns_of(*[[("crane", "point")]] * 30)
    assert {WordIndex.text(guess) for guess in player.choose(impossible)} == {"crane", "fuzzy"}


def test_it_improves_on_its_player_and_repeats_with_its_seeds():
    def games(make):
        env = WordleEnv(WORDS, batch_size=[600])
        return play_games(env, make(), games=600, seed=0)

    def sampler():
        return RandomWordPlayer(WORDS, prob_smart=0.5, seed=0)

    improved = games(lambda: MonteCarloPlayer(sampler(), WORDS, samples=20, seed=1))
    assert improved.returns.mean() > games(sampler).returns.mean() + 0.4
    again = games(lambda: MonteCarloPlayer(sampler(), WORDS, samples=20, seed=1))
    assert torch.equal(improved.rows["tokens"], again.rows["tokens"])


def test_sampling_players_of_any_kind():
    players = [RandomWordPlayer(WORDS, prob_smart=1.0, seed=0), OptimalPlayer(WORDS, seed=1)]
    for player in (
        MixturePlayer(players, per="game", seed=2),
        TreePlayer(solve(WORDS)),
        MonteCarloPlayer(players[0], WORDS, samples=2, seed=3),
    ):
        env = WordleEnv(WORDS, batch_size=[20], seed=0)
        games = env.rollout(6, MonteCarloPlayer(player, WORDS, samples=3, seed=4), break_when_any_done=False)
        assert games["next", "terminated"].any(1).all()


def test_monte_carlo_options():
    for options in ({"samples": 0}, {"max_tries": 0}, {"rules": "mine"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            MonteCarloPlayer(RandomWordPlayer(WORDS), WORDS, **options)


# -- in collectors --------------------------------------------------------------------------------------------------


def make(seed):
    return WordleEnv(WORDS, batch_size=[4], seed=seed)


@pytest.mark.parametrize("name", ["tree", "monte carlo", "start", "guess list"])
def test_players_in_a_collector(name):
    player = {
        "tree": lambda: TreePlayer(solve(WORDS)),
        "monte carlo": lambda: MonteCarloPlayer(RandomWordPlayer(WORDS, seed=0), WORDS, samples=3, seed=1),
        "start": lambda: StartWordPlayer(WORDS, seed=0),
        "guess list": lambda: OptimalPlayer(WORDS, guesses=OPENERS, seed=0),
    }[name]()
    collector = Collector(make(0), player, frames_per_batch=40, total_frames=80, auto_register_policy_transforms=False)
    batches = list(collector)
    collector.shutdown()
    assert [batch.shape for batch in batches] == [(4, 10)] * 2
    assert torch.cat(batches, 1)["next", "done"].any()


def test_a_copy_plays_the_same_games():
    player = MonteCarloPlayer(TreePlayer(solve(WORDS), seed=0), WORDS, samples=2, seed=1)
    same = [make(0).rollout(4, each, break_when_any_done=False)["action"] for each in (copy.deepcopy(player), player)]
    assert torch.equal(*same)


# -- start words ----------------------------------------------------------------------------------------------------


def test_start_words_are_played_while_they_fit():
    player = StartWordPlayer(WORDS, seed=0)
    env = WordleEnv(WORDS, batch_size=[300], seed=0)
    td = env.reset()
    for _ in range(5):
        turns = read_turns(td["tokens"], td["attention_mask"], td["agent_mask"])
        starts_fit = player.start_sets.size(turns.filter(player.start_sets)) > 0
        td = player(td)
        guess = td["action"][:, :5]
        live = ~td["done"].squeeze(-1)
        is_start = player.starts.find(guess) >= 0
        assert is_start[live & starts_fit].all()
        assert not is_start[live & ~starts_fit].any()
        td = env.step(td)["next"]


def test_probabilities_of_start_words():
    player = StartWordPlayer(["crane", "slate", "point"], starts=["stare", "crate"], seed=0)
    words = ["crane", "slate", "point", "stare", "crate", "fuzzy"]
    turns = turns_of([], [("stare", "crate")], [("stare", "point")])
    chances = torch.stack([player.probability(turns, letters(word).expand(3, -1)) for word in words], 1)
    assert chances.tolist() == [[0, 0, 0, 0.5, 0.5, 0], [0, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0]]
    with pytest.raises(ValueError, match="starts"):
        StartWordPlayer(["crane"], openers=["slate"])


# -- the user -------------------------------------------------------------------------------------------------------


def test_a_user_plays_several_games():
    person = Person("slate", "crane", "slat", "abide", "q")
    words = ["crane", "slate", "abide"]
    user = UserPlayer(words, colour=False, input_fn=person, print_fn=person.seen.append)
    env = WordleEnv(words, batch_size=[2], seed=0)
    td = user(env.reset(hidden_word=torch.tensor([0, 2])))
    assert [WordIndex.text(guess) for guess in td["action"][:, :5]] == ["slate", "crane"]
    assert person.seen == ["Game 1 of 2, guess 1: ", "Game 2 of 2, guess 1: "]
    with pytest.raises(EOFError, match="quit"):
        user(env.step(td)["next"])
    assert "Five letters, please: 'slat' has 4." in person.text
    assert " S  L [A] T [E]" in person.text
    assert " C  R (A) N [E]" in person.text


def test_a_user_without_a_list_may_guess_any_five_letters():
    user = UserPlayer(input_fn=Person("?", "qqqqq"), print_fn=lambda line: None)
    td = user(WordleEnv(["crane"], batch_size=[1], seed=0).reset())
    assert td["action"][0].tolist() == [16] * 5 + [30]


def test_the_user_takes_or_leaves_a_hint():
    lines = ["?", "", "?", "slate"]
    person = Person(*lines)
    hint = OptimalPlayer(["crane", "slate"], ties="first")
    user = UserPlayer(hint=hint, colour=False, input_fn=person, print_fn=person.seen.append)
    env = WordleEnv(["slate"], batch_size=[1], guesses=["crane"], seed=0)
    td = user(env.reset())
    assert WordIndex.text(td["action"][0, :5]) == "crane"
    td = user(env.step(td)["next"])
    assert WordIndex.text(td["action"][0, :5]) == "slate"
    assert [line for line in person.seen if "Hint" in line] == [
        "Hint: crane. Enter plays it.",
        "Hint: slate. Enter plays it.",
    ]


def test_hints_while_a_person_plays():
    person = Person("?", "", "", "?", "")
    env = WordleEnv(["slate"], batch_size=[1], guesses=["crane"], seed=0)
    hint = OptimalPlayer(["crane", "slate"], ties="first")
    assert play_human(env, hint=hint, input_fn=person, print_fn=person.seen.append) == -1
    assert "? gives a hint" in person.text
    assert "Five letters, please: '' has 0." in person.text  # a hint is for one guess
    assert play_human(env, input_fn=Person("?", "slate"), print_fn=person.seen.append) == 0
    assert "without '?'" in person.text
