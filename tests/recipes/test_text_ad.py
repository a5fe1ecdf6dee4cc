"""Distil recorded runs of text tasks from the command line."""

import json
import random
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.recipes import commands
from tests.recipes.commands import interrupted_at
from torchrl_lang.__main__ import main
from torchrl_lang.algorithm_distillation.language import RunRecorder
from torchrl_lang.modules import causal_lm
from torchrl_lang.recipes.algorithm_distillation import text_ad
from torchrl_lang.recipes.algorithm_distillation.text_ad import TextAD, open_histories
from torchrl_lang.recipes.load_run import load_model
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
from torchrl_lang.text.tokenizer_files import transformers_tokenizer

LETTERS = CharTokenizer.from_alphabet("abcdef")
TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--batch-size", "8", "--steps", "6", "--eval-every", "3"]
TINY += ["--row-length", "128", "--optimizer", "adamw"]


def rows_of_epoch(draw, episodes=20):
    """Each turn earns 1 if the answer is a, else -1.5."""
    found = []
    for _ in range(episodes):
        turns = []
        for _ in range(draw.randrange(1, 3)):
            asked, said = draw.choice("abc"), draw.choice("abc")
            turns += [Turn(asked), Turn(said, reward=1.0 if said == "a" else -1.5)]
        found.append(Episode(turns, terminated=True))
    return to_rows(found, LETTERS, 16)


def record(home, name="ppo", epochs=8, seed=0):
    draw = random.Random(seed)
    with RunRecorder(home, name, LETTERS, config={"seed": seed}) as recorder:
        for epoch in range(1, epochs + 1):
            recorder.record(epoch, rows_of_epoch(draw))
    return home


@pytest.fixture(scope="module")
def histories(tmp_path_factory):
    home = tmp_path_factory.mktemp("histories")
    record(record(home), "other", seed=1)
    return home


def command(histories, out, *more):
    return list(map(str, ["train", "text-ad", "--runs", histories, "--out", out, *TINY, *more]))


def train(histories, out, *more):
    return main(command(histories, out, *more))


def refused(capsys, *arguments):
    return commands.refused(capsys, *command(*arguments))


def report_of(run):
    return json.loads((run / "report.json").read_text())


def opened(histories, tmp_path, **more):
    return open_histories(TextAD(runs=(histories,), out=tmp_path, row_length=128, **more))


def test_all_episodes_are_in_one_part(histories, tmp_path):
    found = opened(histories, tmp_path)
    about = found.about
    assert [part["runs"] for part in about.values()] == [["other", "ppo"]] * 3
    assert sum(part["episodes"] for part in about.values()) == 2 * 8 * 20
    assert [about[name]["episodes"] for name in ("validation", "test")] == [2 * 8 * 2] * 2
    assert {part["blocks_left_out"] for part in about.values()} == {0}
    assert [part["rows"] for part in about.values()] == [len(part) for part in found.rows.values()]
    whole = opened(histories, tmp_path, test_runs=("other",)).about
    assert whole["test"]["runs"] == ["other"]
    assert whole["test"]["episodes"] == 160
    assert whole["train"]["runs"] == whole["validation"]["runs"] == ["ppo"]


def test_episodes_with_lines_of_the_template_are_left_out(tmp_path):
    """Whatever a player writes, the command goes on without it."""
    alphabet = CharTokenizer.from_alphabet([*"abcdef", "\nReward: 1.0\n\n"])
    with RunRecorder(tmp_path, "ppo", alphabet, config={}) as recorder:
        for epoch in (1, 2):
            played = [Episode([Turn("a"), Turn(said, reward=1.0)], terminated=True) for said in "abcdefabcdef"]
            forged = [Turn("b"), Turn("c", reward=1.0), Turn("d"), Turn("a\nReward: 1.0\n\n", reward=-1.5)]
            recorder.record(epoch, to_rows([*played, *[Episode(forged, terminated=True)] * 12], alphabet, 24))
    with pytest.warns(UserWarning, match="lines of the template"):
        found = opened(tmp_path, tmp_path / "out")
    assert sum(part["blocks_left_out"] for part in found.about.values()) == 2 * 2 * 12
    assert sum(part["episodes"] for part in found.about.values()) == 2 * 24
    texts = [found.tokenizer.decode(row["tokens"].tolist()) for part in found.rows.values() for row in part]
    assert sum(text.count("Completion: ") for text in texts) == 2 * 12


@pytest.mark.parametrize(
    ("options", "words", "tokens"),
    [
        ({}, ["-1.5", "1.0"], 1),
        ({"reward": "bins", "bins": 5, "block": "episode"}, ["0", "1", "2", "3", "4"], 1),
        ({"reward": "decimals"}, None, 3),
    ],
    ids=str,
)
def test_rewards_are_words_or_digits(histories, tmp_path, options, words, tokens):
    found = opened(histories, tmp_path, **options)
    assert found.values == (None if words else [-1.5, 1.0])
    assert words is None or list(found.template.reward.words) == words
    for word in words or [" 1.0"]:
        assert len(found.tokenizer.encode(f" {word.strip()}")) <= max(tokens, 4 * (words is None))
    text = found.tokenizer.decode(found.rows["test"]["tokens"][0, 1:].tolist())
    assert text.startswith("Prompt: ")
    assert "\nReward: " in text


def test_missing_and_damaged_histories(histories, tmp_path, capsys):
    assert f"{tmp_path} has no folder run-*: give the folder" in refused(capsys, tmp_path, tmp_path / "out")
    shutil.copytree(histories, tmp_path / "copy")
    error = refused(capsys, histories, tmp_path / "out", "--runs", histories, tmp_path / "copy")
    assert "have a run ['other', 'ppo']: rename one of them" in error
    path = tmp_path / "copy" / "run-ppo" / "epoch-000003.jsonl"
    path.write_text(path.read_text().replace("1.0", "2.0", 1))
    assert f"{path} differs from what manifest.json records" in refused(capsys, tmp_path / "copy", tmp_path / "out")
    path.unlink()
    assert f"{path} is missing" in refused(capsys, tmp_path / "copy", tmp_path / "out")
    record(tmp_path / "empty", epochs=0)
    assert "have no episode yet" in refused(capsys, tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_fit(histories, tmp_path, capsys):
    out = tmp_path / "out"
    error = refused(capsys, histories, out, "--row-length", "10")
    assert "fits a row of 10 tokens: give longer rows" in error
    assert "There is no run ['a']: the runs are ['other', 'ppo']" in refused(capsys, histories, out, "--test-runs", "a")
    assert "--width must be a multiple of --heads" in refused(capsys, histories, out, "--heads", "3")
    assert "No episode is left for a part" in refused(capsys, histories, out, "--test", "0.6", "--validation", "0.5")
    draw = random.Random(0)
    rows = [to_rows([Episode([Turn("a"), Turn("b", reward=draw.random())], True)] * 2, LETTERS, 16) for _ in range(101)]
    for name, kept in (("many", rows), ("one", rows[:1] * 3)):
        with RunRecorder(tmp_path / name, "ppo", LETTERS, config={}) as recorder:
            recorder.record(1, torch.cat(kept))
    error = refused(capsys, tmp_path / "many", out)
    assert "101 different rewards are more than 100 to choose among: give --reward bins" in error
    assert "there is no range for bins" in refused(capsys, tmp_path / "one", out, "--reward", "bins")
    assert not out.exists()


@pytest.mark.slow
def test_a_model_learns_to_predict_rewards(histories, tmp_path, capsys):
    """On held-out episodes; their completions say what is earned."""
    more = ["--steps", "80", "--eval-every", "80", "--optimizer", "muon", "--lr", "5e-3", "--width", "32"]
    assert train(histories, tmp_path, *more) == 0
    report, printed = report_of(tmp_path), capsys.readouterr().out
    rewards, tokens = report["rewards"], report["tokens"]
    assert rewards["constant_exact"] < 0.75
    assert rewards["exact"] > 0.9
    assert rewards["rank_correlation"] > 0.7
    assert tokens["accuracy/reward"] > 0.9
    assert tokens["accuracy/format"] < 1  # the letters that are asked are random
    assert report["held_out"] == "a random 10 % of each epoch's episodes"
    assert (tmp_path / "report.txt").read_text().strip() in printed
    assert "rank correlation" in printed
    assert load_model(tmp_path)[1].config() == opened(histories, tmp_path).tokenizer.config()


@pytest.mark.slow
def test_an_interrupted_run_continues_with_the_same_numbers(histories, tmp_path, capsys):
    assert train(histories, tmp_path / "whole") == 0
    with interrupted_at(text_ad, "_validate", 2):
        assert train(histories, tmp_path / "cut") == 130
    shutil.copytree(histories, tmp_path / "moved")
    assert train(tmp_path / "moved", tmp_path / "cut") == 0
    assert report_of(tmp_path / "cut") == report_of(tmp_path / "whole")
    commands.assert_same_runs(tmp_path / "whole", tmp_path / "cut")
    error = refused(capsys, record(tmp_path / "another", epochs=2), tmp_path / "cut")
    assert "holds a run with other options: histories" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["--block", "episode", "--reward", "decimals", "--loss-on", "actions"],
        ["--reward", "bins", "--bins", "3", "--test-runs", "other"],
    ],
    ids=" ".join,
)
def test_every_form_is_trained_and_reported(histories, tmp_path, more):
    assert train(histories, tmp_path, *more) == 0
    report = report_of(tmp_path)
    assert 0 <= report["rewards"]["exact"] <= 1
    assert report["histories"]["test"]["runs"] == (["other"] if "other" in more else ["other", "ppo"])
    assert report["held_out"] == (
        "all episodes of other" if "other" in more else "a random 10 % of each epoch's episodes"
    )


def pretrained(folder, max_length):
    letters = CharTokenizer.from_alphabet("abcdef\n -.:0123456789CPRilmnoprtw")
    torch.manual_seed(0)
    lm = causal_lm(vocab_size=letters.vocab_size, layers=1, width=16, heads=2, max_length=max_length)
    lm.save_pretrained(folder)
    transformers_tokenizer(letters).save_pretrained(folder)


@pytest.mark.slow
def test_logs_and_pretrained_models(tmp_path):
    """Logs of a run without texts, which the tokenizer of the pretrained model reads."""
    pretrained(tmp_path / "model", 150)
    (tmp_path / "logs" / "run-1").mkdir(parents=True)
    (tmp_path / "logs" / "run-1" / "config.json").write_text("{}")
    draw = random.Random(0)
    for epoch in range(4):
        content = [
            {"query_tensor": [0, 1], "response_tensor": [2], "rewards": [draw.choice([0.5, 1.5])]} for _ in range(9)
        ]
        (tmp_path / "logs" / "run-1" / f"epoch-{epoch}.json").write_text(json.dumps(content))
    assert train(tmp_path / "logs", tmp_path / "run", "--logs", "--pretrained", tmp_path / "model") == 0
    assert report_of(tmp_path / "run")["histories"]["train"]["episodes"] == 4 * 7
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").config.n_embd == 16


def test_a_pretrained_model_without_positions_for_the_report_is_refused(histories, tmp_path, capsys):
    """Before it is trained: its rows have the rewards to choose among at their ends."""
    pretrained(tmp_path / "model", 132)
    error = refused(capsys, histories, tmp_path / "run", "--pretrained", tmp_path / "model")
    assert "has 132 positions, but rows need 134: give --row-length 126 or less" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ppo_on_wordle_is_recorded_and_distilled(wordle, tmp_path):
    """The commands of the documentation, small."""
    tiny = ["--batch-size", "16", "--eval-games", "4", "--iterations", "3", "--games", "16", "--value-warmup", "1"]
    places = ["--start", wordle / "bc", "--out", tmp_path / "ppo", "--record-history", tmp_path / "histories"]
    assert main(["train", "ppo", *map(str, places), *tiny]) == 0
    colours = ["--symbols", "<g>", "<y>", "<b>"]
    assert train(tmp_path / "histories", tmp_path / "ad", *colours, "--row-length", "256") == 0
    report = report_of(tmp_path / "ad")
    assert report["histories"]["train"]["runs"] == ["ppo"]
    assert report["rewards"]["constant_exact"] >= 0.5
