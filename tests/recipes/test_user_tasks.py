"""Tasks of a user's own module, given as ``package.module:name``: a Task class, and environment factories."""

import io
import json
import sys
from copy import deepcopy

import pytest
import torch
from torchrl.envs import TransformedEnv

from tests.recipes.commands import refused
from torchrl_lang.__main__ import main
from torchrl_lang.data import load_dataset
from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.evaluation import GameRecords
from torchrl_lang.recipes.algorithms import ILQL
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.tasks import find_task
from torchrl_lang.recipes.tasks.env_task import RandomTokens, env_task
from torchrl_lang.schema import ControlTokens
from torchrl_lang.text import from_row
from torchrl_lang.transforms import LivingCost

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--batch-size", "8", "--eval-games", "4", "--steps", "2"]

COINS = """
import random
from dataclasses import dataclass

from torchrl_lang.text import CharTokenizer
from torchrl_lang.envs import TextGameEnv
from torchrl_lang.recipes.options import with_defaults
from torchrl_lang.recipes.tasks.base import DataOptions, Task
from torchrl_lang.envs.random_walks.task import RandomWalksData, RandomWalksPlay, RandomWalksTask


class Coins:
    def __init__(self, number):
        self.number = number

    def reset(self, seed):
        coin = random.Random(seed)
        self.heads = sum(coin.random() < 0.5 for _ in range(self.number))
        return "how many"

    def step(self, text):
        right = text == str(self.heads)
        return ("yes" if right else "no"), (1.0 if right else -0.1), right


def make_env(batch_size, *, number=3, seed=None, device=None):
    if number < 1:
        raise RuntimeError(f"no {number} coins")
    tokenizer = CharTokenizer.from_alphabet("abcdefghijklmnopqrstuvwxyz 0123")
    limits = {"row_length": 40, "action_length": 3, "max_turns": 3}
    options = {"batch_size": batch_size, "seed": seed, "device": device}
    return TextGameEnv(lambda: Coins(number), tokenizer, **limits, **options)


@dataclass(frozen=True)
class ShortWalks(RandomWalksTask):
    name = "short_walks"
    presets = {"ilql": {"tau": 0.25}, "evaluate": {"beta": (3.0,)}}


class Walks:
    def task(self):
        return ShortWalks(self.nodes, self.out_degree, self.graph_seed, self.max_turns)


@with_defaults(games=40)
class ShortWalksData(Walks, RandomWalksData):
    '''Generate short walks.'''


@dataclass(frozen=True, kw_only=True)
class ShortWalksPlay(Walks, RandomWalksPlay):
    '''Walk yourself.'''


ShortWalks.data_options, ShortWalks.play_options = ShortWalksData, ShortWalksPlay


class Unnamed(ShortWalks):
    name = None


class Wordle(ShortWalks):
    name = "wordle"


class Half(Task):
    name = "half"


def one_at_a_time(batch_size, **options):
    return make_env(1, **options)


def count(texts, rng):
    return str(len(texts) // 2) if len(texts) < 5 else rng.choice("0123")


def not_an_env(batch_size, **options):
    return {"batch_size": batch_size}


def other_signature(n):
    return make_env(n)


number = 7
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a user's package, importable as in ``python -m`` there."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "my_package").mkdir()
    (folder / "my_package" / "coins.py").write_text(COINS)
    (folder / "broken.py").write_text("import coins_of_another_country\n")
    (folder / "exits.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        yield folder


@pytest.fixture(scope="module")
def coins(home):
    """A dataset and a run of the environment factory."""
    name, folder = "my_package.coins:make_env", home / "coins"
    options = ["--games", "40", "--batch", "8", "--option", "number=2"]
    assert main(["generate", name, "--out", str(folder / "data"), *options]) == 0
    places = ["--data", str(folder / "data"), "--out", str(folder / "run"), "--task", name]
    assert main(["train", "ilql", *places, *TINY]) == 0
    return folder


def test_an_environment_factory_is_a_task_of_all_commands(home, coins, capsys, monkeypatch):
    name, run = "my_package.coins:make_env", coins / "run"
    dataset = load_dataset(coins / "data")
    assert dataset.manifest["notes"]["task"] == name
    assert dataset.manifest["notes"]["options"] == {"number": 2}
    assert main(["evaluate", "--run", str(run), "--task", name, "--games", "4", "--beta", "0", "2"]) == 0
    figures = json.loads((run / "evaluation.json").read_text())
    assert figures["task"] == name
    players = [player["name"] for player in figures["players"]]
    assert players == ["random", "run sample", "run greedy", "run beta 2 greedy"]
    assert main(["play", name, "--watch", str(run), "--games", "1", "--seed", "0"]) == 0
    assert "< how many" in capsys.readouterr().out
    watched = ["play", name, "--watch", run, "--games", "1", "--option"]
    assert "{'number': 2}, not {'number': 1}: omit --option" in refused(capsys, *watched, "number=1")
    monkeypatch.setattr(sys, "stdin", io.StringIO("0\n1\n2\n"))
    assert main(["play", name, "--seed", "0", "--option", "number=1"]) == 0
    assert "(+1)\n< yes\nThe game is over" in capsys.readouterr().out
    assert main(["generate", name, "--help"]) == 0
    assert "--option NAME=VALUE" in capsys.readouterr().out


def test_a_player_of_a_users_module_makes_the_data(home, capsys):
    call = ["generate", "my_package.coins:make_env", "--out", str(home / "counted"), "--games", "20", "--player"]
    assert main([*call, "my_package.coins:count"]) == 0
    dataset = load_dataset(home / "counted")
    assert dataset.manifest["notes"]["player"] == "my_package.coins:count"
    games = [from_row(row, dataset.tokenizer) for row in dataset.rows]
    for game in games:
        texts = [turn.text for turn in game.turns if turn.by_agent]
        assert texts[:2] == ["0", "1"][: len(texts)]
    assert {len(game.turns) for game in games} == {3, 5, 7}
    call[3] = str(home / "other")
    for player, message in {
        "my_package.coins:nobody": "my_package.coins:nobody cannot be imported (AttributeError",
        "my_package.coins:number": "--player my_package.coins:number is 7: expected a function play(texts, rng)",
    }.items():
        assert message in refused(capsys, *call, player)
        assert not (home / "other").exists()


def test_the_task_of_a_factory_travels(coins):
    """Workers get it as a pickle; they play in ``test_features.py``."""
    task = load_run(coins / "run", "my_package.coins:make_env").task
    other = deepcopy(task)  # by the method that pickle uses
    assert other.notes() == task.notes()
    assert torch.equal(other.env(2, seed=5).reset()["tokens"], task.env(2, seed=5).reset()["tokens"])


def test_options_of_a_factory_are_compared_with_the_recorded_ones(coins, capsys):
    name, data, run = "my_package.coins:make_env", coins / "data", coins / "run"
    given = ["--task", name, "--option", "number=2"]
    assert main(["train", "ilql", "--data", str(data), "--out", str(run), *TINY, *given]) == 0  # finished already
    given[-1] = "number=3"
    message = "its options are {'number': 2}, not {'number': 3}"
    assert message in refused(capsys, "train", "bc", "--data", data, "--out", coins / "other", *given)
    assert message in refused(capsys, "evaluate", "--run", run, *given)
    assert "give it as --task package.module:name" in refused(capsys, "evaluate", "--run", run, *given[2:])


def test_values_of_options_are_json_or_texts(home, capsys):
    env_of = ["generate", "my_package.coins:make_env", "--out", "x", "--games", "1", "--option"]
    for text, message in {
        "a-b=1": "--option should be name=value",
        "number=0": "(RuntimeError: no 0 coins at ",
        "number=many": "(TypeError: '<' not supported between instances of 'str' and 'int'",
        "colour=red": "(TypeError: make_env() got an unexpected keyword argument 'colour')",
        "seed=3": "got multiple values for keyword argument 'seed'",
        "device=cpu": "got multiple values for keyword argument 'device'",
    }.items():
        assert message in refused(capsys, *env_of, text)


def test_a_transformed_environment_is_evaluated_with_its_rewards(home):
    make_env = sys.modules["my_package.coins"].make_env
    costly = env_task("coins", lambda **options: TransformedEnv(make_env(**options), LivingCost(0.5)))()
    plain = env_task("coins", make_env)()
    policy = plain.player("random", seed=0).policy
    returns = [task.evaluate(policy, games=6, seed=3)[1] for task in (plain, costly)]
    torch.testing.assert_close(returns[1].returns, returns[0].returns - 0.5 * returns[0].turns)
    assert costly.action_length == plain.action_length


def test_random_tokens_are_valid_and_end():
    control = ControlTokens(0, 1, 2, 3, 4, 5, vocab_size=9)
    player = RandomTokens(control, 4, seed=0)
    actions = player(env_task("corridor", CorridorEnv)({"length": 3}).env(400, seed=0).reset())["action"]
    ends = actions == 1
    assert (ends.sum(-1) == 1).all()
    length = ends.long().argmax(-1)
    assert {1, 2, 3} == set(length.tolist())
    before = torch.arange(4) < length[:, None]
    assert set(actions[before].tolist()) == {6, 7, 8}
    assert set(actions[~before & ~ends].tolist()) == {0}
    short = RandomTokens(control, 1, seed=0)(env_task("corridor", CorridorEnv)({"length": 3}).env(3, seed=0).reset())
    assert short["action"].tolist() == [[1]] * 3


def test_games_that_end_with_a_reward_are_won(home):
    task = find_task("my_package.coins:make_env").without_notes()
    flags = torch.tensor([True, True, False])
    records = GameRecords(None, *[torch.zeros(3)] * 2, flags, ~flags, torch.tensor([1.0, -0.1, 1.0]), torch.ones(3))
    assert task.won(records).tolist() == [True, False, False]


def test_a_task_class_of_a_users_module(home, capsys):
    name, data, run = "my_package.coins:ShortWalks", home / "walks", home / "walks_run"
    small = ["--nodes", "10", "--max-turns", "7"]
    assert main(["generate", name, "--out", str(data), *small]) == 0
    assert len(load_dataset(data)) == 40  # the default of the task's own options
    assert main(["train", "ilql", "--data", str(data), "--out", str(run), "--task", name, *TINY]) == 0
    record = json.loads((run / "config.json").read_text())
    assert (record["tau"], record["notes"]["task"], record["task"]) == (0.25, "short_walks", name)
    assert main(["evaluate", "--run", str(run), "--task", name, "--games", "4"]) == 0
    assert "run beta 3 greedy" in capsys.readouterr().out
    assert main(["play", name, "--watch", str(run), "--games", "1"]) == 0
    assert "task 'short_walks', not 'random_walks'" in refused(capsys, "play", "random_walks", "--watch", run)
    assert ILQL.for_task(find_task(name), data=data, out=run).tau == 0.25
    wrong = ["evaluate", "--run", run, "--task", name, "--option", "nodes=10"]
    assert "is no environment factory, it takes no --option" in refused(capsys, *wrong)


def test_a_name_in_a_manifest_or_a_run_is_never_imported(home, capsys):
    name, data, run = "trap:make_env", home / "trap_data", home / "trap_run"
    (home / "trap.py").write_text("from my_package.coins import make_env\n")
    assert main(["generate", name, "--out", str(data), "--games", "20"]) == 0
    assert main(["train", "bc", "--data", str(data), "--out", str(run), "--task", name, *TINY]) == 0
    sys.modules.pop("trap")
    (home / "trap.py").write_text("raise BaseException('imported')\n")
    recorded = f"{data / 'manifest.json'} is about the task 'trap:make_env'"
    call, other = ["train", "bc", "--data", data, "--out", home / "x"], ["--task", "my_package.coins:make_env"]
    assert f"{recorded}, not 'my_package.coins:make_env'" in refused(capsys, *call, *other)
    error = refused(capsys, *call)
    assert recorded in error
    assert "give its code with --task package.module:name" in error
    for command in (["evaluate", "--run", run], ["train", "ppo", "--start", run, "--out", home / "x"]):
        assert "is about the task 'trap:make_env', the recipes have wordle" in refused(capsys, *command)
        assert "is about the task 'trap:make_env', not 'my_package" in refused(capsys, *command, *other)
    assert "not 'wordle'" in refused(capsys, "play", "wordle", "--watch", run)
    assert "trap" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken:make_env", "(ModuleNotFoundError: No module named 'coins_of_another_country' at "),
        ("exits:make_env", "cannot be imported (SystemExit: 3 at "),
        ("my_package.coins:nothing", "(AttributeError: module 'my_package.coins' has no attribute 'nothing'"),
        ("my_package.coins:number", "is 7: expected a subclass of Task, or a function make_env("),
        ("my_package.coins:Unnamed", "lacks name"),
        ("my_package.coins:Wordle", "There is a task 'wordle' already: give my_package.coins:Wordle another 'name'"),
        ("my_package.coins:Half", "lacks data_options, play_options, action_length, env, player, tokenizer"),
        ("my_package.coins:one_at_a_time", "has batch size [1], expected [4]: pass it on"),
        ("my_package.coins:not_an_env", "returned {'batch_size': 1}: expected a function make_env("),
        ("my_package.coins:other_signature", "argument 'batch_size'): expected a function make_env("),
        (":make_env", ":make_env cannot be imported (ValueError: Empty module name"),
    ],
)
def test_wrong_names(home, name, message, capsys):
    assert message in refused(capsys, "generate", name, "--out", "x", "--games", "4")
    assert not (home / "x").exists()
