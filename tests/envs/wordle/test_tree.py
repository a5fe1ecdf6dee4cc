from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.envs.wordle.helpers import letters, plain_feedback
from torchrl_lang._files import FileError, json_digest
from torchrl_lang.envs.wordle import MixturePlayer, RandomWordPlayer, TreePlayer, WordleEnv, demo_words, solve
from torchrl_lang.envs.wordle.tree import DecisionTree

WORDS = demo_words(40)


@pytest.mark.parametrize("rules", ["official", "ilql"])
@settings(max_examples=30, deadline=None)
@given(words=st.lists(st.text(alphabet="abcd", min_size=5, max_size=5), min_size=1, max_size=12, unique=True))
def test_paths_end_with_their_word_and_depend_on_colours_only(rules, words):
    tree = solve(words, rules=rules, progress=False)
    next_guess: dict[tuple, str] = {}
    for number, word in enumerate(words):
        path = tree.path(word)
        assert path[-1] == word
        assert len(path) == tree.n_guesses[number]
        history: tuple = ()
        for guess in path:
            assert next_guess.setdefault(history, guess) == guess
            history += (guess, tuple(plain_feedback(guess, word, rules)))


def test_a_saved_tree_is_the_same_tree(tmp_path):
    for options in ({}, {"rules": "ilql"}, {"max_tries": 2, "guesses": ["fuzzy"]}):
        tree = solve(WORDS, progress=False, **options)
        tree.save(tmp_path / "tree.json")
        again = DecisionTree.load(tmp_path / "tree.json")
        for name in ("words", "guesses", "replies", "rules", "max_tries", "total", "histogram"):
            assert getattr(again, name) == getattr(tree, name)
        assert torch.equal(again.next_node, tree.next_node)


@pytest.mark.parametrize(
    ("change", "noun"),
    [
        (lambda c: c.update(version=2), "version"),
        (lambda c: c.update(format="dataset"), "format"),
        (lambda c: c.update(rules="mine"), "rules"),
        (lambda c: c.update(max_tries=0), "max_tries"),
        (lambda c: c.update(total=c["total"] - 1), "total"),
        (lambda c: c["words"].append("fuzzy"), "no guess that finds"),
        (lambda c: c["words"].pop(), "total"),
        (lambda c: c["guesses"].pop(), "as many replies as guesses"),
        (lambda c: c["guesses"].__setitem__(0, "Fuzzy"), "Fuzzy"),
        (lambda c: c["guesses"].__setitem__(0, 7), r"guesses\.0"),
        (lambda c: c["replies"][0].update(bbbbb=0), "come after their parent"),
        (lambda c: c["replies"][0].update(bbbbb=1000), "come after their parent"),
        (lambda c: c["replies"][0].update(ggggg=1), "codes are 0 to 241"),
        (lambda c: c["replies"][0].update(bbbbb="1"), "replies"),
        (lambda c: c["replies"][0].update(bbxbb=1), "bbxbb"),
        (lambda c: c["replies"][0].clear(), "no guess that finds"),
        (lambda c: c.pop("replies"), "replies"),
        (lambda c: c.update(guesses=[], replies=[]), "at least one"),
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


def test_a_cut_or_edited_file_is_refused(tmp_path):
    path = tmp_path / "tree.json"
    solve(WORDS[:5], progress=False).save(path)
    text = path.read_text()
    for end in range(0, len(text.rstrip()), 37):
        path.write_text(text[:end])
        with pytest.raises(FileError):
            DecisionTree.load(path)
    path.write_text(text.replace(WORDS[0], "fuzzy"))
    with pytest.raises(FileError, match="digest"):
        DecisionTree.load(path)
    with pytest.raises(FileError, match="missing"):
        TreePlayer(tmp_path / "none.json")


def test_a_tree_by_hand():
    # slate: black, black, green, black, green is 2 * 9 + 2; point: only the n is green, 2 * 3.
    tree = DecisionTree(["crane", "slate", "point"], ["crane", "slate", "point"], [{20: 1, 6: 2}, {}, {}])
    assert tree.histogram == {1: 1, 2: 2}
    with pytest.raises(ValueError, match="fuzzy"):
        tree.path("fuzzy")
    with pytest.raises(ValueError, match="no guess that finds 'point'"):
        DecisionTree(["crane", "slate", "point"], ["crane", "slate"], [{20: 1}, {}])
    only_two = DecisionTree(["crane", "slate", "point"], ["crane"], [{}], max_tries=1)
    assert only_two.n_guesses.tolist() == [1, 2, 2]


def test_games_that_left_the_tree_are_played_by_the_other_player():
    tree = solve(WORDS, progress=False)
    player = TreePlayer(tree, otherwise=RandomWordPlayer(["fuzzy"]))
    env = WordleEnv(WORDS, batch_size=[40])
    td = env.reset(hidden_word=torch.arange(40))
    mixed = MixturePlayer([TreePlayer(tree), RandomWordPlayer(["tummy"])], seed=0)
    first = mixed(td)
    strange = (first["action"][:, :5] == letters("tummy")).all(-1)
    assert 10 < strange.sum() < 30
    td = player(env.step(first)["next"])
    fuzzy = (td["action"][:, :5] == letters("fuzzy")).all(-1)
    assert torch.equal(fuzzy, strange)
    # By default it finds the word from there, too.
    td = env.step(TreePlayer(tree, seed=0)(td.exclude("action")))["next"]
    for _ in range(4):
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
