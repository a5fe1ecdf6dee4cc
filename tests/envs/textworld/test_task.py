"""TextWorld as a task of the recipes: games apart, one tokenizer, won games known by their records, end to end."""

import json
import random
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torchrl.envs import Compose, TransformedEnv

pytest.importorskip("textworld", reason="the extra 'textworld' is not installed")

from tests.engines import reused
from torchrl_lang._files import FileError
from torchrl_lang.data import load_dataset
from torchrl_lang.data.generate import play_to_end, seed_of_games
from torchrl_lang.envs.textworld import ExpertPlayer, RandomAdmissiblePlayer
from torchrl_lang.envs.textworld.games import GameSets, game_texts, solution, split_games, theme_words
from torchrl_lang.envs.textworld.task import ExchangedCopies, TextWorldData, TextWorldTask
from torchrl_lang.envs.textworld.text import TEMPLATES
from torchrl_lang.evaluation import play_games
from torchrl_lang.recipes import datasets, evaluate
from torchrl_lang.recipes.algorithms import BC, ILQL, train
from torchrl_lang.recipes.algorithms.finished import Evaluate
from torchrl_lang.recipes.datasets import open_dataset, task_from_notes
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.text import word_tokenizer
from torchrl_lang.transforms import EntryReward


@pytest.fixture(scope="module", autouse=True)
def cache(pytestconfig):
    """Games are built once and kept in pytest's cache; the engine's processes serve one test after another."""
    with pytest.MonkeyPatch.context() as patch, reused():
        patch.setenv("XDG_CACHE_HOME", str(pytestconfig.cache.mkdir("games")))
        yield


@pytest.fixture(scope="module")
def coins():
    """Three games of different solutions; other tests have the second."""
    fields = {"games": 3, "valid": 1, "test": 1, "action_length": 10}  # so few games do not know every word
    return TextWorldTask.of("coin_collector", options={"level": 3}, **fields)


@pytest.fixture(scope="module")
def meals():
    return TextWorldTask.of("simple", games=2, valid=0, test=1)


def test_games_of_one_solution_are_in_one_set(tmp_path):
    games = []
    for world, way in enumerate(("west", "south", "north", "north", "east")):
        games.append(tmp_path / f"{world}.z8")
        content = {"metadata": {"walkthrough": [f"go {way}", "take coin"], "seed": world}, "world": world}
        games[-1].with_suffix(".json").write_text(json.dumps(content))
    sets = split_games(games, valid=1, test=2)
    solutions = [{solution(game) for game in some} for some in sets]
    assert sum(map(len, solutions)) == len(set.union(*solutions)) == 4
    assert sorted([*sets.train, *sets.valid, *sets.test]) == games
    assert min(len(sets.train), len(sets.valid), len(sets.test) - 1) >= 1
    assert split_games(random.Random(0).sample(games, 5), valid=1, test=2) == sets
    freely = split_games(games, valid=1, test=2, apart="games")
    assert (len(freely.train), len(freely.valid), len(freely.test)) == (2, 1, 2)  # no two of them are the same
    again = json.loads(games[0].with_suffix(".json").read_text())
    again["metadata"]["seed"] = 7  # of which the game is not another one
    games[4].with_suffix(".json").write_text(json.dumps(again))
    apart = split_games(games, valid=1, test=1, apart="games")
    assert any({games[0], games[4]} <= {*some} for some in apart)
    assert split_games(games, valid=1, test=1, seed=1) != split_games(games, valid=1, test=1)
    with pytest.raises(ValueError, match="leave none to learn from"):
        split_games(games, valid=3, test=3)


def test_words_come_from_training_games_alone(meals):
    tokenizer, sets = meals.tokenizer(), meals.sets()
    template = TEMPLATES[meals.template]
    assert tokenizer.config() == word_tokenizer(game_texts(sets.train, template)).config()
    assert tokenizer.config() != word_tokenizer(game_texts([*sets.train, *sets.test], template)).config()
    unheard = "a xylophone, ~ and 5!"
    assert tokenizer.decode(tokenizer.encode(unheard)) == unheard


def test_the_engines_names_are_known_before_they_are_met():
    """And no word of its sentences, by names as they are in games."""
    words = theme_words()
    assert {"locker", "boysenberry", "non-euclidean", "restroom", "type 0", "type y"} <= set(words)
    assert not {"you", "the", "door", "take", "unlock", "north", "thing", "of", "n", "x", "typical"} & set(words)
    assert words == sorted(set(words))


def test_names_of_all_custom_games_are_symbols_and_trade_places_in_training_games(games, monkeypatch):
    """Of a word two symbols, because after a digit the space belongs to the digit."""
    monkeypatch.setattr(TextWorldTask, "sets", lambda _: GameSets(*[(games["custom"],)] * 3))
    task = TextWorldTask.of("custom", template="lower", exchange=True)
    assert [bool(task.env(1, split=split).exchange) for split in task.splits] == [False, False, True]
    tokenizer = task.tokenizer()
    symbols = [
        tokenizer.symbols[number] for number in tokenizer.encode("take type 7 boysenberry from non-euclidean spork")
    ]
    assert symbols[-7:] == ["7 ", "boysenberry", " from", " non", "-", "euclidean", " spork"]


def test_a_copy_is_what_game_and_expert_write_with_other_names(games, tmp_path, monkeypatch):
    monkeypatch.setattr(TextWorldTask, "sets", lambda _: GameSets(*[(games["custom"],)] * 3))
    fields = {"kind": "custom", "template": "lower", "action_length": 24, "row_length": 2500}
    options = TextWorldData(out=tmp_path / "data", **fields, exchange=True, episodes=2, copies=3)
    with closing(options.task().env(1, offers="expert", order="cycle")) as env:  # its first game has its own names
        given, copy = ExchangedCopies(env, ExpertPlayer(), copies=2)(range(1), seed=0).unbind(0)
        names = torch.tensor([seed_of_games(0, range(1)) + 1])
        played = play_to_end(env, ExpertPlayer(), env.reset(game_seed=names))[0].select(*copy.keys())
    assert (given["tokens"] != copy["tokens"]).any()
    assert (played == copy).all()
    dataset, task = open_dataset(datasets.main(options))
    rows = dataset[:]
    assert task == options.task()
    assert len(rows["tokens"].unique(dim=0)) == len(rows) == 6
    with pytest.raises(ValueError, match="add --exchange"):
        TextWorldData(out=tmp_path, **fields, copies=2)


def test_a_world_names_rooms_objects_and_commands(tmp_path):
    task = TextWorldData(out=tmp_path, kind="custom", world="w4-o6-q8", template="lower").task()
    assert (task.kind, dict(task.options)) == ("custom", {"world_size": 4, "nb_objects": 6, "quest_length": 8})


def test_what_is_no_first_command(coins, tmp_path):
    for command in ("", "save", "go to " * 20):
        with pytest.raises(ValueError, match="no command of a game"):
            coins.behavior_policy(TextWorldData(out=tmp_path, first_command=command))


def test_damaged_notes(coins):
    for options, named in ((None, "options"), ({"level": [1]}, "options"), ({"height": 1}, "height")):
        with pytest.raises(FileError, match=rf"run\.json .*{named}"):
            task_from_notes({**coins.notes(), "task": "textworld", "options": options}, Path("run.json"))


def test_a_won_game_is_known_by_its_records(meals):
    """Won, lost (the dinner is eaten) and cut off, side by side, whatever a turn earns."""
    task, offers = meals, ("expert", "admissible", "was_admissible")
    transforms = EntryReward({"points": -1.0}), EntryReward({"won": 0.0, "lost": 3.0})
    env = TransformedEnv(task.env(4, offers=offers, order="cycle"), Compose(*transforms))

    class Table(ExpertPlayer):
        """The expert, a glutton who eats what it is told to cook, and two who never do anything."""

        def forward(self, tensordict):
            action = super().forward(tensordict)["action"].clone()
            for command in tensordict["admissible_action"][1][tensordict["admissible_mask"][1]]:
                if task.tokenizer().decode(command.tolist()).startswith("eat "):
                    action[1] = command
            action[2:] = env.tokenizer.control.pad
            action[2:, 0] = env.tokenizer.control.end_of_action
            return tensordict.set("action", action)

    with closing(env):
        records = play_games(env, Table(), games=4, seed=0, keep=["won"])
    assert records.terminated.tolist() == [True, True, False, False]
    assert task.won(records).tolist() == [True, False, False, False]
    assert task.summary(records, "all").win_rate == 0.25


def test_judging_plays_the_held_out_games_in_turn(coins):
    held = len(coins.sets().test)
    expert = {"offers": "expert", "split": "test", "seed": 0}
    summary, records = coins.evaluate(ExpertPlayer(), games=2 * held, name="expert", **expert)
    assert (summary.name, summary.games, summary.win_rate, summary.mean_turns) == ("expert", 2 * held, 1.0, 3.0)
    assert torch.equal(records.rows["tokens"][:held], records.rows["tokens"][held:])
    _, narrow = coins.evaluate(ExpertPlayer(), games=2 * held, batch=1, **expert)
    assert torch.equal(records.rows["tokens"], narrow.rows["tokens"])
    chance, _ = coins.evaluate(RandomAdmissiblePlayer(seed=0), games=32, offers="admissible", seed=0)
    assert chance.win_rate > 0
    assert chance.mean_turns > 3.0


SMALL = {"layers": 1, "width": 16, "heads": 2, "batch_size": 8, "eval_games": 4, "log_every": 2, "device": "cpu"}
SHORT = {"steps": 2, "eval_every": 2}


def test_from_games_to_a_table(tmp_path, capsys, monkeypatch):
    games = {"kind": "coin_collector", "level": 3, "games": 3, "valid": 1, "test": 1}
    data = datasets.main(TextWorldData(out=tmp_path / "data", episodes=8, action_length=10, batch=8, **games))
    dataset = load_dataset(data)
    task = task_from_notes(dataset.manifest["notes"], data)
    assert len(dataset) == 8
    assert dataset.tokenizer.config() == task.tokenizer().config()
    train(BC(data=data, out=tmp_path / "bc", **SMALL, **SHORT))
    train(ILQL(data=data, out=tmp_path / "ilql", **SMALL, **SHORT))
    capsys.readouterr()
    evaluate.main(Evaluate(run=tmp_path / "ilql", also=(tmp_path / "bc",), beta=(2.0,)))
    out = capsys.readouterr().out
    figures = json.loads((tmp_path / "ilql" / "evaluation.json").read_text())
    names = [player["name"] for player in figures["players"]]
    assert names == ["random", "expert", "ilql beta 2 greedy", "bc sample", "bc greedy"]
    assert all(name in out for name in names)
    held = figures["games"]
    assert held == len(task.sets().test)
    assert [player["games"] for player in figures["players"]] == [5 * held, held, held, 5 * held, held]
    assert figures["players"][1]["win_rate"] == 1.0
    assert "game 0: return" in (tmp_path / "ilql" / "transcripts.txt").read_text()
    monkeypatch.setattr(TextWorldTask, "tokenizer", lambda task: word_tokenizer(["go east, take coin."]))
    for opened in (lambda: open_dataset(data), lambda: load_run(tmp_path / "bc")):  # every word would be another
        with pytest.raises(ValueError, match="another tokenizer than 'textworld' has"):
            opened()
