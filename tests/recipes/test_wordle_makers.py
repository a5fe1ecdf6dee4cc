"""Datasets of makers on the command line: their kinds and task, their options, and a run on each."""

from dataclasses import replace

import pytest
import torch

from torchrl_lang.__main__ import main
from torchrl_lang.data import load_dataset
from torchrl_lang.envs.wordle.human import example_tweets
from torchrl_lang.envs.wordle.task import WordleData
from torchrl_lang.recipes.datasets import generate_once, open_dataset

SMALL = ["--games", "40", "--batch", "16", "--words", "30"]


def generate(folder, *more):
    return main(["generate", "wordle", "--out", str(folder), *SMALL, *more])


def test_mixtures(tmp_path, capsys):
    assert generate(tmp_path / "data", "--make", "adversarial", "--rules", "ilql") == 0
    dataset, task = open_dataset(tmp_path / "data")
    assert (len(task.words), task.rules) == (30, "ilql")
    assert torch.bincount(dataset.rows["kind"])[0] == 40
    assert dataset.manifest["notes"]["kinds"][:1] == ["expert"]
    assert "player" not in dataset.manifest["notes"]
    assert f"{len(dataset)} games, mean return" in capsys.readouterr().out


def test_tweets(tmp_path, capsys):
    """No guess gets four greens and a yellow, so such games are never drawn."""
    path = tmp_path / "tweets.csv"
    path.write_text('210,"🟩🟩🟩🟩🟨\n🟩🟩🟩🟩🟩"\n211,🟩🟩🟩🟩🟩\n', encoding="utf-8")
    for tweets, said in ((example_tweets(), "48 games, 9 tweets left out"), (path, "1 of 2 games fit no hidden word")):
        out = tmp_path / tweets.name.replace(".", "-")
        assert generate(out, "--make", "human", "--tweets", str(tweets)) == 0
        assert len(load_dataset(out)) == 40
        assert said in capsys.readouterr().out


def test_a_makers_dataset_is_made_once(tmp_path, capsys):
    options = WordleData(out=tmp_path / "data", make="adversarial", words="10", games=8, batch=8)
    assert generate_once(options) == generate_once(options)
    assert "using the dataset" in capsys.readouterr().out
    for other in (replace(options, games=9), replace(options, make="branched"), replace(options, seed=1)):
        with pytest.raises(ValueError, match="holds a dataset of other options"):
            generate_once(other)
