"""Games replayed with other words or rules, branched and adversarial games, and the words that a transcript leaves."""

import pickle

import pytest
import torch

from tests.envs.wordle.helpers import plain_feedback, text
from torchrl_lang.data import PolicySampler
from torchrl_lang.envs import wordle
from torchrl_lang.envs.wordle.samplers import AdversarialGames, BranchedGames, continue_games, guess_pairs, rows_before
from torchrl_lang.envs.wordle.transcript import replay_games, turns_of_rows
from torchrl_lang.schema import ROW_KEYS, check_row

WORDS = wordle.demo_words(100)


@pytest.mark.parametrize("rules", ["official", "ilql"])
def test_consistent_words_of_rows_and_texts(rules):
    env = wordle.WordleEnv(WORDS, [12], rules=rules)
    rows = PolicySampler(env, wordle.RandomWordPlayer(WORDS))(range(12), 0)
    counts = wordle.count_consistent(rows, WORDS, rules=rules)
    for row, count in zip(rows, counts.tolist(), strict=True):
        found = wordle.consistent_words(row, WORDS, rules=rules)
        decoded = text(row)
        turns = [part.split("</a>") for part in decoded[3:].split("</s>") if "</a>" in part]
        played = [(guess, ["byg".index(c) for c in colours.strip("<>").split("><")]) for guess, colours in turns]
        assert found == [w for w in WORDS if all(plain_feedback(g, w, rules) == c for g, c in played)]
        assert len(found) == count
        assert wordle.consistent_words(decoded, WORDS, rules=rules) == found
        for symbols in ("byg", "⬛🟨🟩"):
            lines = "\n".join(f"{guess} {''.join(symbols[c] for c in colours)}" for guess, colours in played)
            assert wordle.consistent_words(lines, WORDS, rules=rules) == found


def test_nothing_played_leaves_all_words():
    assert wordle.consistent_words("", WORDS) == wordle.consistent_words("<a>", WORDS) == WORDS
    assert len(wordle.consistent_words("")) == 2250
    states = wordle.WordleEnv(WORDS, [5000]).reset()
    assert torch.equal(wordle.count_consistent(states, WORDS), torch.full((5000,), 100))
    assert wordle.count_consistent(states[:0], WORDS).shape == (0,)


@pytest.mark.parametrize(
    "transcript",
    ["crane", "crane byb", "crane bybbx", "Crane bybbb", "<a>CRANE</a><b><g><g><b><g></s>", "<a>crane</a><b><g><g>"]
    + ["<a>crane</a><b><g><g><b><x></s>", "<a>slate</a><b><g><g><b><g></s>cr?ne</a>", "<g><g><g><g><g>"],
)
def test_other_text_is_an_error(transcript):
    with pytest.raises(ValueError, match="a guess"):
        wordle.consistent_words(transcript, WORDS)


def test_guesses_without_colours_rule_nothing_out():
    transcript = "<s><a>crane</a><b><b><b><b><b></s>slopyy</a></s>slo"
    expected = wordle.consistent_words("crane bbbbb", WORDS)
    assert wordle.consistent_words(transcript, WORDS) == expected != WORDS
    assert wordle.consistent_words(transcript + "</a></eod><|pad|>", WORDS) == expected


def played(n=150, rules="official", words=WORDS, max_tries=6, prob_smart=0.7, **options):
    env = wordle.WordleEnv(words, [50], rules=rules, max_tries=max_tries, **options)
    return PolicySampler(env, wordle.RandomWordPlayer(WORDS, prob_smart=prob_smart, rules=rules))(range(n), seed=0)


@pytest.mark.parametrize("rules", ["official", "ilql"])
@pytest.mark.parametrize("max_tries", [1, 8])
def test_the_same_words_and_rules_give_the_same_rows(rules, max_tries):
    rows = played(rules=rules, max_tries=max_tries)
    replayed = replay_games(rows, WORDS, rules=rules, old_rules=rules, max_tries=max_tries)
    assert torch.equal(replayed.kept, torch.arange(150))
    assert (replayed.rows.select(*rows.keys()) == rows.select(*rows.keys())).all()
    assert not any(replayed.left_out.values())


@pytest.mark.parametrize(("old", "new"), [("official", "ilql"), ("ilql", "official")])
def test_other_rules_colour_the_same_guesses(old, new):
    rows = played(rules=old)
    replayed = replay_games(rows, WORDS, rules=new, old_rules=old)
    before, after = turns_of_rows(rows), turns_of_rows(replayed.rows)
    assert torch.equal(before.guess[:, :6], after.guess[:, :6])
    assert torch.equal(before.tries, after.tries)
    assert torch.equal(rows["token_reward"].sum(-1), replayed.rows["token_reward"].sum(-1))  # solved games stay solved
    changed = 0
    for row in range(len(rows)):
        hidden = WORDS[int(replayed.hidden_word[row])]
        for turn in range(int(after.tries[row])):
            guess = wordle.WordIndex.text(after.guess[row, turn])
            assert after.colours[row, turn].tolist() == plain_feedback(guess, hidden, new)
            assert before.colours[row, turn].tolist() == plain_feedback(guess, hidden, old)
            changed += after.colours[row, turn].tolist() != before.colours[row, turn].tolist()
    assert changed
    check_row(replayed.rows, vocab_size=35)


def test_every_reason_is_counted_once():
    rows = played()
    guesses = replay_games(rows, WORDS, guesses=["fuzzy"])  # all guesses are hidden words
    assert not any(guesses.left_out.values())
    replayed = replay_games(rows, WORDS[:50], guesses=WORDS[:97], max_tries=3)
    assert len(replayed.rows) + sum(replayed.left_out.values()) == 150
    assert all(replayed.left_out[reason] for reason in list(replayed.left_out)[1:])
    strict = played(words=WORDS[:40], guesses="words", prob_smart=0.0)  # other guesses get no colours there
    mute = turns_of_rows(strict).answered < turns_of_rows(strict).tries
    for rows, words in ((strict, ["zzzzz"]), (strict[:0], WORDS)):
        assert replay_games(rows, words).rows.shape == (0,)
    assert replay_games(strict, WORDS).left_out["a guess got no colours"] == int(mute.sum()) > 0


def test_unfinished_games_stay_unfinished():
    """A game of three guesses in a game of six is truncated."""
    rows = played(max_tries=3)
    replayed = replay_games(rows, WORDS).rows
    solved = rows["token_reward"].sum(-1) > -3
    assert torch.equal(replayed["terminated"][:, 0], solved)
    assert torch.equal(replayed["truncated"], ~replayed["terminated"])
    assert not (replayed["tokens"][~solved] == 34).any()
    check_row(replayed)


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
