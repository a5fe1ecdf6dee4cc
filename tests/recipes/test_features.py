"""The recipes on rows with features: a game whose answer no text tells, from the command line and by name."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from torchrl_lang.__main__ import main
from torchrl_lang.data import load_dataset, write_dataset
from torchrl_lang.evaluation import read_columns
from torchrl_lang.modules import PrefixEmbedding
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.tasks import find_task

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--eval-games", "8", "--batch-size", "16", "--steps", "4"]
FROM_SCRATCH = ("bc", "percent-bc", "ilql", "single-step", "monte-carlo", "paper-ilql", "awac", "cql", "bcq", "psi", "utterance-ilql", "dt")
FROM_BC = ("chai", "qsft", "oreo")
GAME = """
import torch

from torchrl_lang.data import CharTokenizer
from torchrl_lang.envs import TextGameEnv


class Shown:
    '''Shows the answer as one of three unit vectors, and every other time a second vector beside it.'''

    def reset(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.answer = int(torch.randint(3, (), generator=generator))
        self.features = torch.eye(3)[[self.answer, 2 - self.answer]][: 1 + seed % 2]
        return "?"

    def step(self, text):
        return "", float(text == str(self.answer)), True


def make_env(batch_size, *, seed=None, device=None, features=True):
    tokenizer = CharTokenizer.from_alphabet("012?")
    size = (2, 3) if features else None
    options = {"batch_size": batch_size, "seed": seed, "device": device, "features": size}
    return TextGameEnv(Shown, tokenizer, row_length=8, action_length=2, **options)
"""
NAME = "shown_game:make_env"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A dataset of 400 random games, without and with features, in a folder with the module of the game."""
    folder = tmp_path_factory.mktemp("features")
    (folder / "shown_game.py").write_text(GAME)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        generate = ["generate", NAME, "--games", "400", "--batch", "50"]
        assert main([*generate, "--out", str(folder / "data")]) == 0
        assert main([*generate, "--out", str(folder / "texts"), "--option", "features=false"]) == 0
        assert train(folder, "bc", "bc") == 0
        yield folder
    sys.modules.pop("shown_game")


def train(home, recipe, out, *more, data="data"):
    places = ["--data", str(home / data), "--out", str(home / out), "--task", NAME]
    return main(["train", recipe, *places, *TINY, *map(str, more)])


def refused(home, capsys, *arguments, **more):
    capsys.readouterr()
    assert train(home, *arguments, **more) == 2
    return capsys.readouterr().err


def opened(home, name):
    return load_run(home / name, find_task(NAME))


def policies(run):
    """Every way in which a run plays: without its values, guided by them, by those of whole utterances."""
    found = [run.policy(method="greedy")]
    found += [run.policy(run.betas[0], method="greedy")] if run.has_values else []
    return found + [run.policy(method="best_of", candidates=2, seed=0)]


def test_the_dataset_has_the_features_of_its_games(home):
    dataset = load_dataset(home / "data", verify=True)
    prefix, mask = dataset.rows["prefix"], dataset.rows["prefix_mask"]
    assert (prefix.dtype, tuple(prefix.shape), mask.dtype, tuple(mask.shape)) == (
        torch.float32,
        (400, 2, 3),
        torch.bool,
        (400, 2),
    )
    assert (home / "data" / "rows" / "prefix.memmap").stat().st_size == 400 * 2 * 3 * 4
    assert type(prefix).__name__ == "MemoryMappedTensor"
    assert {1, 2} == set(mask.sum(-1).tolist())
    guess = dataset.tokenizer.encode("012")
    right = dataset.rows["token_reward"].sum(-1) == 1
    shown = prefix[:, 0].argmax(-1)
    played = (dataset.rows["tokens"][:, :, None] == torch.tensor(guess)) & dataset.rows["action_mask"][:, :, None]
    assert torch.equal(right, played.any(1)[torch.arange(400), shown])
    assert not {"prefix", "prefix_mask"} & set(load_dataset(home / "texts").rows.keys())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*FROM_SCRATCH, *FROM_BC])
def test_every_offline_recipe_reads_features(home, recipe):
    start = ["--start", home / "bc"] if recipe in FROM_BC else ["--prefix-hidden", "5"]
    if recipe == "psi":
        start += ["--prior", home / "bc"]
    assert train(home, recipe, f"all/{recipe}", *start) == 0
    run = opened(home, f"all/{recipe}")
    assert run.model.heads["prefix"].config()["hidden"] == (0 if recipe in FROM_BC else 5)
    rows = run.task.env(6, seed=3).reset()
    for policy in policies(run):
        assert "prefix" in policy.in_keys
        inner = getattr(policy, "policy", policy)  # of a decision transformer and CHAI
        torch.manual_seed(0)
        changed = rows.clone().set("prefix", rows["prefix"] + 1.0)
        first, same, other = (inner.get_dist(given).log_prob(guesses(run, given)) for given in (rows, rows, changed))
        assert torch.equal(first, same)
        assert not torch.isclose(first, other, rtol=1e-5).any()
    assert main(["evaluate", "--run", str(home / f"all/{recipe}"), "--task", NAME, "--games", "4"]) == 0


def guesses(run, rows):
    """The action "1" of each row."""
    control = run.tokenizer.control
    action = torch.tensor([*run.tokenizer.encode("1"), control.end_of_action])
    return action.expand(*rows.batch_size, 2)
