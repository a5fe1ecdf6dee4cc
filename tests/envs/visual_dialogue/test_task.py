"""Visual dialogue as a task of the recipes: rows by plain loops over the files, players, metrics, from end to end."""

import io
import json
import pickle
import re
import sys

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.recipes.commands import from_own_notes
from torchrl_lang.__main__ import main
from torchrl_lang._files import FileError
from torchrl_lang.data import load_dataset
from torchrl_lang.envs.visual_dialogue import DialogueRewards, DialogueServer, QuestionPlayer
from torchrl_lang.envs.visual_dialogue.task import VisualDialogueTask
from torchrl_lang.evaluation import GameRecords
from torchrl_lang.recipes import datasets
from torchrl_lang.recipes.datasets import open_dataset
from torchrl_lang.recipes.tasks.visual_dialogue import VisualDialogueData
from torchrl_lang.text import from_row

YES_NO = {
    "none": lambda answer: False,
    "conservative": lambda answer: any(part in answer for part in ("not", "n't", "yes", "no", "think so")),
}
"""Two definitions, as far as the generated answers need them."""


@pytest.fixture(scope="module")
def task(prepared_dialogues):
    return VisualDialogueTask(str(prepared_dialogues))


def generate(home, out, *more):
    return main(["generate", "visual_dialogue", "--folder", str(home), "--out", str(out), *map(str, more)])


def files_of(home, split="train", cache="rank_reward_cache1"):
    dialogues = json.loads((home / "data" / f"visdial_0.5_{split}.json").read_text())
    return dialogues, json.loads((home / f"{split}_{cache}.json").read_text())


def turns_of(item, rounds, stop=False):
    """The texts of a row."""
    texts = [item["caption"]]
    for each in item["dialog"][:rounds]:
        texts += [f"{each['question']}?", each["answer"]]
    return texts + ["<stop>"] * stop


def described(dataset):
    """The texts and the agent's rewards of each row."""
    episodes = [from_row(row, dataset.tokenizer) for row in dataset[:]]
    assert all(episode.terminated and not episode.truncated for episode in episodes)
    turns = [each.turns for each in episodes]
    return [([turn.text for turn in each], [turn.reward for turn in each if turn.by_agent]) for each in turns]


@pytest.mark.parametrize("penalty", ["none", "conservative"])
def test_rows_that_end_at_the_cutoff(prepared_dialogues, tmp_path, penalty):
    assert generate(prepared_dialogues, tmp_path / "data", "--penalty", penalty, "--penalty-value", -3) == 0
    expected = []
    for item, (initial, *changes) in zip(*files_of(prepared_dialogues), strict=True):
        over = [end for end in range(1, 11) if DialogueRewards().is_last(initial, changes[:end])]
        end = over[0] if over else 10
        replies = [each["answer"] for each in item["dialog"][:end]]
        rewards = [-1.0 - 3.0 * bool(YES_NO[penalty](reply)) for reply in replies]
        rewards[-1] += 1
        expected.append((turns_of(item, end), rewards))
    dataset = load_dataset(tmp_path / "data", verify=True)
    assert described(dataset) == expected
    penalized = sum(reward <= -3 for _, rewards in expected for reward in rewards)
    assert (penalized > 0) == (penalty != "none")
    features = torch.from_numpy(np.load(prepared_dialogues / "data" / "images_train.npy"))
    unit = features / features.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(dataset.rows["features"][:], unit[:, None])
    assert dataset.rows["features"].dtype == torch.float32
    assert dataset.rows["features_mask"].shape == (48, 1)
    assert bool(dataset.rows["features_mask"][:].all())


@pytest.mark.parametrize(("measure", "cache"), [("rank", "rank_reward_cache1"), ("distance", "reward_cache2")])
def test_rows_of_ten_rounds(prepared_dialogues, tmp_path, measure, cache):
    more = ("--mode", "10_stop", "--measure", measure, "--scale", 2, "--shift", 0.25)
    assert generate(prepared_dialogues, tmp_path / "data", *more) == 0
    found = described(load_dataset(tmp_path / "data", verify=True))
    for (texts, rewards), item, (_, *changes) in zip(found, *files_of(prepared_dialogues, cache=cache), strict=True):
        assert texts == turns_of(item, 10)
        assert rewards == pytest.approx([2 * change + 0.25 for change in changes])


def test_a_dataset_knows_its_task(prepared_dialogues, tmp_path):
    options = VisualDialogueData(folder=prepared_dialogues, out=tmp_path / "data", penalty="hard", penalty_value=-1.5)
    datasets.generate_once(options)
    dataset, task = open_dataset(tmp_path / "data")
    assert task == VisualDialogueTask(str(prepared_dialogues), penalty="hard", penalty_value=-1.5)
    assert dataset.rows["tokens"].shape == (48, task.prepared.tokens().row_length)


def test_the_data_player_does_not_repeat_itself(task):
    questions = ["a", *"bcdefghij" * 30]
    tokenizer = task.tokenizer()
    control = tokenizer.control
    asked = [*"bcdefghij"]
    row = [control.begin_state, control.end_of_state]
    agent = [False, False]
    for number, text in enumerate(asked):
        closed = number % 2 == 0  # the environment ends every second question
        row += [*tokenizer.encode(text), control.end_of_action, control.end_of_state]
        agent += [True, closed, False]
    td = TensorDict(
        tokens=torch.tensor([row, row]), agent_mask=torch.tensor([agent, [False] * len(agent)]), batch_size=[2]
    )
    player = QuestionPlayer(questions, tokenizer, 2, seed=0)
    for _ in range(5):
        assert player(td)["action"][0].tolist() == [*tokenizer.encode("a"), control.end_of_action]
    free = QuestionPlayer(questions, tokenizer, 4, repeat=True, seed=0)
    drawn = [tokenizer.decode(free(td)["action"][0].tolist()) for _ in range(300)]
    assert all(text.endswith("</a><|pad|><|pad|>") for text in drawn)
    assert len({text[0] for text in drawn}) >= 9
    assert sum(text[0] == "a" for text in drawn) < 10  # one of 271 questions
    again = QuestionPlayer(questions, tokenizer, 4, repeat=True, seed=0)
    assert [tokenizer.decode(again(td)["action"][0].tolist()) for _ in range(300)] == drawn


def test_the_task_travels(task):
    other = VisualDialogueTask(task.folder, "10_stop", scale=2.0, measure="distance", image=False, server="http://x:1")
    for each in (task, other):
        assert from_own_notes(each) == each
        assert pickle.loads(pickle.dumps(each)) == each  # noqa: S301


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"measure": "distance"}, "holds no task (mode 'env_stops' needs measure='rank'"),
        ({"mode": "10_stop", "penalty": "hard"}, "holds no task (penalty='hard' and cutoff=None are options of mode"),
        ({"image": 1}, 'has 1 as "image", expected a valid bool'),
    ],
)
def test_damaged_notes(task, change, message):
    with pytest.raises(FileError, match=re.escape(message)):
        from_own_notes(task, **change)


def made_records(task, dialogues, progress, terminated):
    """Records of games from their texts."""
    from torchrl_lang.text import Episode, Turn, to_rows

    episodes = [
        Episode([Turn(text, -1.0 if place % 2 else None) for place, text in enumerate(texts)], ended, not ended)
        for texts, ended in zip(dialogues, terminated, strict=True)
    ]
    rows = to_rows(episodes, task.tokenizer(), task.prepared.tokens().row_length)
    records = GameRecords.from_rows(rows, task.tokenizer().control)
    padded = torch.tensor([each + [0.0] * (11 - len(each)) for each in progress])
    records.kept["progress"] = padded
    return records


def test_metrics_worked_out_by_hand(task):
    dialogues = [
        ["a dog", "is it true that the animal is white?", "no", "where is it?", "at the beach"],
        ["a dog", *["do you think that it is old?", "i think so"] * 10],
        ["a dog", "is it old?", "yes, i would"],
    ]
    progress = [[0.5, 0.125, 0.25], [0.5, *[0.03125] * 10], [0.75, 0.125]]
    records = made_records(task, dialogues, progress, [True, True, False])
    assert task.won(records).tolist() == [True, False, False]  # the second had ten rounds, the third was cut off
    expected = {"rounds": 13 / 3, "percentile": (0.875 + 0.8125 + 0.875) / 3, "yes_no_hard": 0.5 / 3}
    expected |= {"yes_no_soft": (0.5 + 0 + 1) / 3, "yes_no_conservative": (0.5 + 1 + 1) / 3}
    assert task.summary(records, "by hand").metrics == pytest.approx(expected)
    progress = [[0.5, 0.25, -0.125], [0.5, -0.25, 0.125], [0.5, 0.25, -0.25]]
    for measure, won, name in (("rank", 0, "percentile"), ("distance", 1, "distance")):
        other = VisualDialogueTask(task.folder, "10_stop", measure=measure)  # it has no cutoff
        records = made_records(other, [["a dog", "old?", "no", "new?", "yes"]] * 3, progress, [True] * 3)
        assert other.won(records).tolist() == [row == won for row in range(3)]
        assert name in other.summary(records, "x").metrics


@pytest.mark.slow
def test_games_with_a_server_are_those_with_models_in_process(task):
    pytest.importorskip("uvicorn")
    with DialogueServer(task.models()) as server:
        remote = VisualDialogueTask(task.folder, server=server.url)
        games = [each.evaluate(each.player("data", 0).policy, games=10, seed=0)[1] for each in (task, remote)]
    assert torch.equal(games[0].rows["tokens"], games[1].rows["tokens"])
    assert torch.equal(games[0].returns, games[1].returns)
    torch.testing.assert_close(games[0].kept["progress"], games[1].kept["progress"], rtol=0, atol=1e-6)


def test_watching_and_playing(prepared_dialogues, tmp_path, monkeypatch, capsys):
    folder = ["--folder", str(prepared_dialogues), "--seed", "0"]
    assert main(["play", "visual_dialogue", *folder, "--watch", "data", "--games", "2"]) == 0
    games = capsys.readouterr().out.strip().split("\n\n")
    assert len(games) == 2
    assert all("?" in game for game in games)
    monkeypatch.setattr(sys, "stdin", io.StringIO("what animal is it?\nq\n"))
    assert main(["play", "visual_dialogue", *folder]) == 0
    assert "> what animal is it?  (-1)" in capsys.readouterr().out
    assert main(["play", "visual_dialogue", *folder, "--watch", "nobody"]) == 2
    assert "player must be one of ['random', 'data'], got 'nobody'" in capsys.readouterr().err
    assert generate(tmp_path, tmp_path / "data") == 2
    assert "There is no finished visual dialogue in" in capsys.readouterr().err
