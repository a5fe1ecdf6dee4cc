"""The command line from end to end on a tiny scale: generate, train, resume, evaluate, watch, demo."""

import json
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.processes import Forked
from torchrl_lang.__main__ import main
from torchrl_lang.envs.random_walks.task import RandomWalksTask
from torchrl_lang.envs.wordle.task import WordleTask
from torchrl_lang.envs.wordle.tree import DecisionTree
from torchrl_lang.evaluation import Summary
from torchrl_lang.modules import causal_lm, load_causal_lm
from torchrl_lang.recipes import compare as parallel
from torchrl_lang.recipes import demo
from torchrl_lang.recipes.load_run import load_run

SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--batch-size", "8", "--eval-games", "8", "--log-every", "2"]


def train(recipe, data, out, *more):
    return main(["train", recipe, "--data", str(data), "--out", str(out), *SMALL, *more])


def test_list_names_every_recipe(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    named = ("generate wordle", "train bc", "train ilql", "play wordle", "demo", "textworld", "visual_dialogue: Visual")
    assert all(name in out for name in named)


def test_train_evaluate_and_watch(wordle, tmp_path, capsys):
    run = tmp_path / "ilql"
    assert train("ilql", wordle / "data", run, "--steps", "6", "--eval-every", "3") == 0
    assert (run / "log.csv").read_text().startswith("step,")
    capsys.readouterr()
    assert main(["evaluate", "--run", str(run), "--games", "8", "--beta", "0", "4"]) == 0
    said = capsys.readouterr().out
    assert "ilql beta 4" in said
    assert "mean number of guesses of a game" in said
    assert "best" not in said  # these games have chosen nothing
    assert "KL/token" not in said  # of no sampled policy with values
    assert (run / "guesses.png").stat().st_size > 1000
    figures = json.loads((run / "evaluation.json").read_text())
    assert figures["task"] == "wordle"
    assert [player["name"] for player in figures["players"]] == ["ilql sample", "ilql greedy", "ilql beta 4 greedy"]
    assert "game" in (run / "transcripts.txt").read_text().lower()
    first = (run / "evaluation.json").read_bytes()
    assert main(["evaluate", "--run", str(run), "--device", "nowhere"]) == 2
    assert "--device nowhere cannot be used" in capsys.readouterr().err
    again = ["--games", "8", "--beta", "0", "4", "--method", "sample", "--seed", "1", "--device", "auto"]
    assert main(["evaluate", "--run", str(run), *again]) == 0
    assert "KL/token" in capsys.readouterr().out
    assert (run / "evaluation.json").read_bytes() == first
    second = json.loads((run / "evaluation-2.json").read_text())
    assert second["options"]["seed"] == 1
    kls = {player["name"]: player["kl_per_token"] for player in second["players"]}
    assert kls["ilql sample"] is None
    assert kls["ilql beta 4 sample"]  # an estimate, not zero
    for name in ("table-2.txt", "transcripts-2.txt", "guesses-2.png"):
        assert (run / name).stat().st_size > 100
    assert main(["play", "wordle", "--watch", str(run), "--games", "1", "--seed", "0"]) == 0
    # The card of an agent has the last evaluation in which it played, its own row first.
    text = (load_run(run).save_agent(tmp_path / "agent", beta=4) / "README.md").read_text()
    (found,) = (player for player in figures["players"] if player["name"] == "ilql beta 4 greedy")
    value = f"{found['mean_return']:.3f} {{}} {found['return_error']:.3f}"
    table = [line for line in text.splitlines() if line.startswith("| ilql")]
    assert len(table) == 3
    assert table[0].startswith(f"| ilql beta 4 greedy | 8 | {value.format('±')} | ")
    assert table[0].endswith(" | 2000000 |")
    (result,) = yaml.safe_load(text.split("---\n")[1])["model-index"][0]["results"]
    assert result["dataset"]["name"] == "wordle"
    assert {m["type"]: m["value"] for m in result["metrics"]}["return"] == value.format("+/-")
    assert "| policy |" not in (load_run(run).save_agent(tmp_path / "agent", beta=3) / "README.md").read_text()


def test_the_best_model_by_return_is_saved_not_the_last(wordle, tmp_path, monkeypatch):
    """Evaluations are rigged so that the second of three is best."""
    returns = iter([-5.0, -1.0, -4.0])
    weights = {}
    run = tmp_path / "bc"

    def evaluate(self, policy, **_):
        weights[len(weights)] = {key: value.clone() for key, value in policy.state_dict().items()}
        return Summary("", 8, next(returns), 0.1, 0.5, 0.1, 3.0), None

    monkeypatch.setattr(WordleTask, "evaluate", evaluate)
    assert train("bc", wordle / "data", run, "--steps", "6", "--eval-every", "2") == 0
    saved = load_file(run / "model" / "model.safetensors")["transformer.wpe.weight"]
    name = next(key for key in weights[0] if key.endswith("wpe.weight"))
    assert torch.equal(saved, weights[1][name])
    assert not torch.equal(saved, weights[2][name])


def test_a_run_is_not_continued_with_other_options_or_on_other_games(wordle, tmp_path, capsys):
    """Not even where the other data set stands at the same place. A start that failed does not spoil the folder."""
    other, once = tmp_path / "data", ["--steps", "1", "--eval-every", "1"]
    for wrong in (["--fraction", "2"], ["--eval-every", "0"], ["--width", "15"]):
        assert train("bc", wordle / "data", tmp_path / "run", *wrong) == 2
    assert main(["generate", "wordle", "--out", str(other), "--games", "64", "--words", "20", "--batch", "32"]) == 0
    assert train("bc", wordle / "data", tmp_path / "run", *once) == 0
    assert train("bc", wordle / "data", tmp_path / "run", *once, "--lr", "0.5") == 2
    assert "--lr was 0.002 and is 0.5" in capsys.readouterr().err
    assert train("percent-bc", wordle / "data", tmp_path / "run", *once, "--fraction", "1") == 2
    assert "other options: algorithm. Give another --out" in capsys.readouterr().err
    assert train("bc", other, tmp_path / "run", *once) == 2
    assert "other options: notes, dataset" in capsys.readouterr().err


def test_only_the_top_of_a_pretrained_model_trains(wordle, tmp_path):
    """A folder as Hugging Face writes it, with another vocabulary."""
    folder, run = tmp_path / "pretrained", tmp_path / "run"
    causal_lm("llama", vocab_size=100, layers=2, width=16, heads=2, max_length=128).save_pretrained(folder)
    options = ["--pretrained", str(folder), "--top-layers", "1", "--checkpointing", "--length-groups", "2"]
    assert train("ilql", wordle / "data", run, "--steps", "4", "--eval-every", "4", *options) == 0
    before, after = (load_causal_lm(path).model.layers for path in (folder, run / "model"))
    for layer, same in ((0, True), (1, False)):
        pairs = zip(before[layer].parameters(), after[layer].parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs if a.ndim == 2) == same
    assert main(["evaluate", "--run", str(run), "--games", "4", "--beta", "2", "--no-plots"]) == 0


def test_demo_writes_all_it_promises(tmp_path, capsys, monkeypatch):
    popen = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(parallel, "subprocess", popen)  # its twelve trainings would import everything anew
    model = {"layers": 1, "width": 16, "heads": 2, "batch_size": 8, "eval_games": 8}
    for task in (RandomWalksTask, WordleTask):
        presets = {recipe: preset | (model if recipe != "evaluate" else {}) for recipe, preset in task.presets.items()}
        monkeypatch.setattr(task, "presets", presets)
    monkeypatch.setattr(demo, "decodings", partial(demo.decodings, temperatures=(1.0,)))
    out = tmp_path / "demo"
    small = ["--walks", "20", "--graph-steps", "1", "--words", "12", "--games", "20", "--wordle-steps", "1"]
    small += ["--eval-games", "4"]
    assert main(["demo", "--out", str(out), *small, "--betas", "2", "8"]) == 0
    text = capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())
    imitations = {
        f"{name}, {how}" for name in ("BC", "BC best 30 %", "BC best 10 %") for how in ("greedy", "sampled at 1")
    }
    learned = {f"ILQL, greedy, beta {beta}" for beta in (0, 2, 8)}
    for part, optimum in {"graph": "shortest path", "wordle": "optimal (exact)"}.items():
        players = results[part]["players"]
        assert {"data", optimum} | imitations | learned <= set(players)
        assert list(players)[-1] == optimum
        assert sum(name.startswith("perfect copy") for name in players) == 2
        assert players[optimum]["mean_return"] > players["BC, greedy"]["mean_return"]
        assert all(len(player) > 5 and player["return_error"] >= 0 for player in players.values())
        assert results[part]["chosen_beta"] in (2, 8)
        assert results[part]["bc_held_out_loss"] > results[part]["data_entropy"] > 0
        assert results[part]["values"] in text
        assert (out / part / "table.txt").read_text() in text
        for name in ("pictures.png", "transcripts/BC_greedy.txt", "transcripts/ILQL_greedy_beta_8.txt"):
            assert (out / part / name).stat().st_size > 100
    planned = []
    monkeypatch.setattr(demo, "train_missing", planned.extend)
    monkeypatch.setattr(demo, "load_run", lambda folder: sys.exit(folder.name))  # the games would be the same
    with pytest.raises(SystemExit, match=r"^bc$"):
        main(["demo", "--out", str(out), *small, "--betas", "2", "--parts", "graph"])
    assert "using the dataset" in capsys.readouterr().out
    assert [run.finished for run in planned] == [True] * 4


def test_solve_wordle(tmp_path, capsys):
    tree = tmp_path / "tree.json"
    arguments = ["solve", "wordle", "--words", "50", "--rules", "ilql", "--out", str(tree)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines() == [
        "50 words: 2.3400 guesses expected (117 in total), first guess learn",
        "     1      1 word",
        "     2     31 words",
        "     3     18 words",
        f"wrote {tree}",
    ]
    assert DecisionTree.load(tree).rules == "ilql"
    assert main(arguments) == 2
    assert "exists: delete it" in capsys.readouterr().err
    assert main(["solve", "wordle", "--words", "50", "--max-tries", "2", "--guesses", "all", "--opener", "fuzzy"]) == 0
    assert "  lost     43 words" in capsys.readouterr().out
    assert main(["solve", "wordle", "--words", "50", "--opener", "fuzzy"]) == 2
    assert "opener='fuzzy' is not one of the 50 valid guesses" in capsys.readouterr().err
