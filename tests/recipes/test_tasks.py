"""Tasks as data: presets, the registry, tasks of one's own, and random walks from the dataset to the table."""

import io
import json
import sys
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import pytest
import torch

from tests.recipes.commands import from_own_notes
from tests.recipes.walks import GRAPH
from torchrl_lang.__main__ import main
from torchrl_lang._files import FileError
from torchrl_lang.envs.random_walks import random_graph
from torchrl_lang.envs.random_walks.task import RandomWalksTask
from torchrl_lang.envs.wordle.task import HABIT, WordleData
from torchrl_lang.recipes import datasets
from torchrl_lang.recipes.algorithms import ALGORITHMS, BC, BCQ, CHAI, CQL, ILQL, train
from torchrl_lang.recipes.algorithms.finished import Evaluate
from torchrl_lang.recipes.algorithms.online import OnlineOptions
from torchrl_lang.recipes.command_line import parse
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.tasks import TASKS, presets_of, register, task_class, task_from_notes

KINDS = [*(kind for kind in ALGORITHMS.values() if kind.__base__ not in ALGORITHMS.values()), Evaluate]


def parsed(options, *arguments):
    return parse(options, list(map(str, arguments)), "x")


def test_an_option_is_the_given_one_or_the_tasks_or_the_default(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"notes": {"task": "random_walks"}}))
    options = parsed(ILQL, "--data", tmp_path, "--out", "x", "--tau", 0.5)
    preset = RandomWalksTask.presets["ilql"]
    assert (options.tau, options.cql_weight, options.lr) == (0.5, 0.2, 0.002)
    assert (preset["tau"], preset["cql_weight"]) == (0.05, 0.2)
    assert "lr" not in preset
    (tmp_path / "manifest.json").write_text(json.dumps({"notes": {"task": "wordle"}}))
    assert parsed(ILQL, "--data", tmp_path, "--out", "x").cql_weight == 0.01


@pytest.mark.parametrize("options", KINDS, ids=lambda options: options.__name__)
@pytest.mark.parametrize("name", TASKS)
def test_every_preset_gives_valid_options(options, name):
    missing = {field.name for field in fields(options) if field.default is field.default_factory is MISSING}
    required = dict.fromkeys(missing | ({"start"} if issubclass(options, (CHAI, OnlineOptions)) else set()), Path("x"))
    chosen = options.for_task(task_class(name), **required)
    preset = options.preset_of(presets_of(name))
    assert all(getattr(chosen, key) == value for key, value in preset.items())


@pytest.mark.parametrize("name", TASKS)
def test_every_option_of_a_preset_is_one_of_a_recipe(name):
    for preset, values in task_class(name).presets.items():
        kinds = [kind for kind in KINDS if preset in (kind.preset, kind.algorithm)]
        assert set(values) <= {key for kind in kinds for key in kind.preset_of(presets_of(name))}


def test_values_of_a_recipes_own_preset_count_more(monkeypatch):
    presets = {"ilql": {"tau": 0.25, "steps": 7, "beta": 3.0}, "cql": {"tau": 0.5}}
    monkeypatch.setattr(RandomWalksTask, "presets", presets)
    places = {"data": Path("x"), "out": Path("x")}
    cql, bcq, ilql = (kind.for_task(RandomWalksTask, **places) for kind in (CQL, BCQ, ILQL))
    assert (cql.tau, cql.steps, cql.beta) == (0.5, 7, 3.0)
    assert (bcq.tau, bcq.steps) == (0.25, 7)
    assert (ilql.tau, ilql.steps, ilql.beta) == (0.25, 7, 3.0)
    assert CQL.for_task(RandomWalksTask, **places, tau=0.75).tau == 0.75


@dataclass(frozen=True)
class LongWalks(RandomWalksTask):
    """A task of one's own."""

    name = "long_walks"


def test_a_task_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr("torchrl_lang.recipes.tasks.TASKS", dict(TASKS))
    notes = LongWalks(6, 2, 0, 9).notes(), Path("manifest.json")
    with pytest.raises(FileError, match="is about the task 'long_walks', the recipes have wordle"):
        task_from_notes(*notes)
    assert register(LongWalks) is register(LongWalks) is LongWalks
    assert task_from_notes(*notes) == LongWalks(6, 2, 0, 9)
    with pytest.raises(ValueError, match="There is a task 'long_walks' already: give Other another name"):
        register(type("Other", (LongWalks,), {}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_turns": 2}, "holds no task (max_turns must be above"),
        ({"out_degree": 50}, "holds no task (out_degree must"),
        ({"graph_seed": "a"}, "has 'a' as \"graph_seed\", expected a valid int"),
    ],
)
def test_damaged_notes_of_random_walks(change, message):
    with pytest.raises(FileError) as raised:
        from_own_notes(RandomWalksTask(), **change)
    assert message in str(raised.value)


def test_edge_probability_defines_the_graph():
    task = RandomWalksTask(nodes=21, edge_probability=0.1, graph_seed=1, max_turns=9)
    assert torch.equal(task.graph.edges, random_graph(21, edge_probability=0.1, seed=1).edges)
    assert from_own_notes(task) == task
    before = {name: value for name, value in RandomWalksTask().notes().items() if name != "edge_probability"}
    assert task_from_notes(before, Path("manifest.json")) == RandomWalksTask()


def test_recipes_in_python_take_the_preset_of_a_task(walks, tmp_path):
    options = BC.for_task(RandomWalksTask, data=walks / "data", out=tmp_path / "bc", steps=1, eval_games=4)
    assert (options.layers, options.width) == (2, 64)
    assert train(options) >= -7
    assert load_run(tmp_path / "bc").task == RandomWalksTask(10, max_turns=7)


def test_walking_oneself(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("z\nab\na\n"))
    assert main(["play", "random_walks", "--seed", "0", *GRAPH]) == 0
    out = capsys.readouterr().out
    assert "'z' at position 0" in out
    assert "An action has at most 1 tokens, 'ab' has 2" in out
    assert "> a  (-1)" in out
    assert main(["play", "random_walks", "--watch", "shortest", "--games", "1", *GRAPH]) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1] == "< a"  # the goal
    assert main(["play", "random_walks", "--watch", "nobody"]) == 2
    assert "player must be one of ['random', 'shortest'], got 'nobody'" in capsys.readouterr().err


def test_a_dataset_records_the_numbers_of_its_player(tmp_path, monkeypatch):
    options = WordleData(out=tmp_path / "data", player="habit", words="8", games=20)
    datasets.generate_once(options)
    monkeypatch.setattr("torchrl_lang.recipes.tasks.wordle.HABIT", (0.9, *HABIT[1:]))
    with pytest.raises(ValueError, match="holds a dataset of other options"):
        datasets.generate_once(options)
