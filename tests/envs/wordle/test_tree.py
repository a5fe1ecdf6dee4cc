import json

import pytest
import torch

from tests.envs.wordle.helpers import letters, plain_feedback
from torchrl_lang._files import FileError, json_digest
from torchrl_lang.envs.wordle import (
    RandomWordPlayer,
    TreePlayer,
    WordleEnv,
    demo_words,
    expected_return,
    solve,
)
from torchrl_lang.envs.wordle.tree import DecisionTree

WORDS = demo_words(40)


@pytest.mark.parametrize("rules", ["official", "ilql"])
def test_paths_depend_on_colours_only_and_a_tree_player_takes_them(rules):
    tree = solve(WORDS, rules=rules, guesses=["fuzzy"], opener="fuzzy", progress=False)
    next_guess: dict[tuple, str] = {}
    for word, number in zip(WORDS, tree.n_guesses.tolist(), strict=True):
        path, history = tree.path(word), ()
        assert path[-1] == word
        assert len(path) == number
        for guess in path:
            assert next_guess.setdefault(history, guess) == guess
            history += (guess, tuple(plain_feedback(guess, word, rules)))
    found = expected_return(TreePlayer(tree), WORDS, rules=rules)
    assert torch.equal(found.returns, 1 - tree.n_guesses.double())
    assert found.mean == pytest.approx(tree.expected_return)
    assert {k: n for k, n in found.histogram.items() if n} == tree.histogram


def test_returns_of_lost_and_invalid_games_and_of_players_that_draw():
    found = expected_return(RandomWordPlayer(["crane"], action_length=8), ["slate", "crane"], max_tries=3)
    assert found.returns.tolist() == [-3, 0]
    assert found.histogram == {1: 1, 2: 0, 3: 0, 4: 1}
    assert found.mean == -1.5
    assert expected_return(RandomWordPlayer(["fuzzy"]), WORDS, guesses="words", max_tries=2).mean == -2


def test_a_saved_tree_is_the_same_tree(tmp_path):
    for options in ({"rules": "ilql"}, {"max_tries": 2, "guesses": ["fuzzy"]}):
        tree = solve(WORDS, progress=False, **options)
        tree.save(tmp_path / "tree.json")
        again = DecisionTree.load(tmp_path / "tree.json")
        for name in ("words", "guesses", "replies", "rules", "max_tries", "total", "histogram"):
            assert getattr(again, name) == getattr(tree, name)
        assert torch.equal(again.next_node, tree.next_node)


@pytest.mark.parametrize(
    ("change", "noun"),
    [
        (lambda c: c.update(rules="mine"), "rules"),
        (lambda c: c.update(max_tries=0), "max_tries"),
        (lambda c: c.update(version=1), "has version 1, but"),
        (lambda c: c["guesses"].pop(), "replies"),
        (lambda c: c["replies"][0].update(bbbbb=0), "after their parent"),
        (lambda c: c["replies"][0].update(bbxbb=1), "bbxbb"),
        (lambda c: c["replies"][0].clear(), "no guess that finds"),
        (lambda c: c.update(guesses=[], replies=[]), "at least 1"),
    ],
)
def test_a_damaged_tree_is_refused(tmp_path, change, noun):
    """Even with a digest that fits: every word is followed to its end."""
    path = tmp_path / "tree.json"
    solve(WORDS, progress=False).save(path)
    content = json.loads(path.read_text())
    del content["digest"]
    change(content)
    path.write_text(json.dumps({**content, "digest": json_digest(content)}))
    with pytest.raises(FileError, match=f"tree.json .*{noun}"):
        DecisionTree.load(path)


def test_a_tree_by_hand():
    words = ("crane", "slate", "point")
    tree = DecisionTree(words=words, guesses=words, replies=({"bbgbg": 1, "bbbgb": 2}, {}, {}))
    assert tree.histogram == {1: 1, 2: 2}
    only_two = DecisionTree(words=words, guesses=words[:1], replies=({},), max_tries=1)
    assert only_two.n_guesses.tolist() == [1, 2, 2]


def test_games_that_left_the_tree_are_played_by_the_other_player():
    tree = solve(WORDS, progress=False)
    env = WordleEnv(WORDS, batch_size=[40])
    td = TreePlayer(tree)(env.reset(hidden_word=torch.arange(40)))
    strange = torch.arange(40) % 2 == 0
    td["action"][strange, :5] = letters("tummy")
    td = env.step(td)["next"]
    action = TreePlayer(tree, otherwise=RandomWordPlayer(["fuzzy"]))(td.clone())["action"]
    assert torch.equal((action[:, :5] == letters("fuzzy")).all(-1), strange)
    for _ in range(5):  # by default it finds the word from there, too
        td = env.step(TreePlayer(tree, seed=0)(td))["next"]
    assert (td["token_reward"].sum(-1) > -6).double().mean() > 0.95


def test_an_invalid_guess_stays_in_the_tree():
    tree = solve(WORDS, progress=False)
    env = WordleEnv(WORDS, batch_size=[40], guesses="words", max_tries=7)
    td = env.reset(hidden_word=torch.arange(40))
    td = env.step(RandomWordPlayer(["zzzzz"])(td))["next"]
    player = TreePlayer(tree, otherwise=RandomWordPlayer(["zzzzz"]))
    for _ in range(6):
        td = env.step(player(td))["next"]
    assert torch.equal(-td["token_reward"].sum(-1).long(), tree.n_guesses)
