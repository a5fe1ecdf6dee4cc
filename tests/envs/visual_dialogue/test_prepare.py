"""Commands of visual dialogue: what `prepare` leaves, also when it is killed, reward caches, and the server."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import SMALL
from tests.recipes.commands import interrupted_at, words_of
from torchrl_lang.__main__ import main
from torchrl_lang._files import FileError
from torchrl_lang.envs import visual_dialogue as vd
from torchrl_lang.envs.visual_dialogue import models, prepare
from torchrl_lang.envs.visual_dialogue.files import SplitFiles, read_reward_cache
from torchrl_lang.envs.visual_dialogue.prepare import PreparedFolder, measured_tokens
from torchrl_lang.envs.visual_dialogue.scoring import RewardCaches
from torchrl_lang.recipes.datasets import open_dataset
from torchrl_lang.text import word_tokenizer

TINY = SMALL | {"train": 24, "guesser_epochs": 2, "answerer_epochs": 1, "width": 16}


def command(out, *more, sizes=SMALL):
    return main(["prepare", "visual_dialogue", "--out", str(out), *words_of(sizes), *map(str, more)])


def content(folder, *, without=("prepare.json",)):
    """All files, but not the record, which names the folder."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in without)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_rewards_are_those_of_the_models_round_by_round(prepared_dialogues):
    folder = PreparedFolder(str(prepared_dialogues))
    trained = folder.models()
    for split, many in (("val", 10), ("test", 13)):
        data = folder.data(split)
        distances = read_reward_cache(folder.files(split).distance_rewards, many)
        for number in range(0, many, 4):
            dialogue, image = data.dialogues[number], data.features.rows([number])
            parts = [dialogue._replace(rounds=dialogue.rounds[:end]) for end in range(11)]
            ranks = [float(trained.percentiles([part], image)) for part in parts]
            far = [float(trained.distances([part], image)) for part in parts]
            assert list(data.rewards[number]) == [ranks[0], *(after - before for before, after in pairwise(ranks))]
            assert list(distances[number]) == pytest.approx([far[0], *(a - b for a, b in pairwise(far))], abs=1e-6)


def test_figures_are_those_of_the_validation_split(prepared_dialogues):
    figures = json.loads((prepared_dialogues / "figures.json").read_text())
    rows = json.loads((prepared_dialogues / "val_rank_reward_cache1.json").read_text())
    by_round = [sum(sum(row[: end + 1]) for row in rows) / 10 for end in range(11)]
    assert figures["percentile_by_round"] == pytest.approx(by_round)
    ends = []
    for initial, *changes in rows:
        over = [end for end in range(1, 11) if sum(changes[:end]) >= 0.5 * (1 - initial)]
        ends.append(over[0] if over else 10)
    assert figures["rounds_to_cutoff"] == sum(ends) / 10
    folder = PreparedFolder(str(prepared_dialogues))
    data, right = folder.data("val"), []
    for number, dialogue in enumerate(data.dialogues):
        for end, asked in enumerate(dialogue.rounds):
            before = [dialogue._replace(rounds=dialogue.rounds[:end])]
            right += [folder.models().answers(before, [asked.question], data.features.rows([number])) == [asked.answer]]
    assert figures["answer_accuracy"] == sum(right) / 100
    assert figures["dialogues"] == {"train": 48, "val": 10, "test": 13}


def test_tokens_are_the_words_of_training_and_every_dialogue_fits(prepared_dialogues):
    folder = PreparedFolder(str(prepared_dialogues))
    train = folder.data("train").dialogues
    texts = [text for each in train for text in (each.caption, *(t for r in each.rounds for t in r))]
    tokens = folder.tokens()
    assert tokens.tokenizer.config() == word_tokenizer([*texts, "<stop>"]).config()
    every = [dialogue for split in ("train", "val", "test") for dialogue in folder.data(split).dialogues]
    assert tokens == measured_tokens(tokens.tokenizer, {prepared_dialogues: every})
    count = {text: len(tokens.tokenizer.encode(text)) for each in every for r in each.rounds for text in r}
    assert tokens.question == max(count[r.question] for each in every for r in each.rounds)
    assert tokens.answer == max(count[r.answer] for each in every for r in each.rounds)
    assert tokens.row_length == 1 + tokens.caption + 1 + 10 * (tokens.question + 1 + tokens.answer + 1) + 1


def test_a_finished_folder_is_left_as_it_is_and_other_options_are_refused(prepared_dialogues, tmp_path, capsys):
    before = content(prepared_dialogues, without=())
    assert command(prepared_dialogues) == 0
    out = capsys.readouterr().out
    assert "held-out percentile by round: 0." in out
    assert "epoch" not in out
    assert content(prepared_dialogues, without=()) == before

    assert command(prepared_dialogues, "--seed", 3) == 2
    assert "seed was 0 and is 3" in capsys.readouterr().err
    (tmp_path / "mine.txt").write_text("something else")
    assert command(tmp_path) == 2
    assert "is not empty and was not made by `prepare`" in capsys.readouterr().err


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an uninterrupted call leaves."""
    out = tmp_path_factory.mktemp("whole") / "prepared"
    assert command(out, sizes=TINY) == 0
    return content(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [(models.TrainedModels, "save", 1), (vd.LocalDialogueModels, "by_round", 4), (RewardCaches, "save", 2)],
    ids=["models", "rewards", "save rewards"],
)
def test_a_killed_call_continues(whole, tmp_path, monkeypatch, capsys, owner, name, calls):
    monkeypatch.setattr(prepare, "_BATCH", 9)
    with interrupted_at(owner, name, calls):
        assert command(tmp_path / "cut", sizes=TINY) == 130
    assert "the same command continues" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="There is no finished visual dialogue in"):
        PreparedFolder(str(tmp_path / "cut")).tokens()
    trained = (tmp_path / "cut" / "models").exists()
    assert command(tmp_path / "cut", sizes=TINY) == 0
    assert ("epoch" in capsys.readouterr().out) == (not trained)
    assert content(tmp_path / "cut") == whole


def test_features_that_cannot_be_read_are_found_before_the_training(prepared_dialogues, tmp_path, capsys):
    shutil.copytree(prepared_dialogues / "data", tmp_path / "files")
    features = np.load(tmp_path / "files" / "images_val.npy")
    features[7] = np.nan
    np.save(tmp_path / "files" / "images_val.npy", features)
    assert command(tmp_path / "out", "--files", tmp_path / "files", sizes=TINY) == 2
    shown = capsys.readouterr()
    assert "images_val.npy has a row 7" in shown.err
    assert "epoch" not in shown.out


def test_a_text_that_the_tokenizer_lacks():
    dialogues = [vd.Dialogue("caf\N{LATIN SMALL LETTER E WITH ACUTE}").then("is it red?", "no")]
    message = r"a.json has a text that cannot be encoded \('\xe9' at position 3.*item 1\.caption: .*--tokenizer NAME"
    with pytest.raises(FileError, match=message):
        measured_tokens(word_tokenizer(["cafe"]), {Path("a.json"): [vd.Dialogue("", ()), *dialogues]})


@pytest.mark.slow
def test_files_as_people_write_them(prepared_dialogues, tmp_path, monkeypatch):
    """Accents of two characters, curly quotes, line breaks of other systems; each split has an emoji of its own."""
    shutil.copytree(prepared_dialogues / "data", tmp_path / "files")
    for place, split in enumerate(("train", "val", "test")):
        path = tmp_path / "files" / f"visdial_0.5_{split}.json"
        content = json.loads(path.read_text())
        for item in content:
            item["caption"] += f" it\u2019s a cafe\u0301\r\n{chr(0x1F600 + place)}"
            item["dialog"][3]["question"] = f"is it \u201cred\u201d {chr(0x1F600 + place)}"
            item["dialog"][3]["answer"] = "d\xe9j\xe0 vu"
        path.write_text(json.dumps(content))
    assert command(tmp_path / "out", "--files", tmp_path / "files", sizes=TINY) == 0
    folder, out = str(tmp_path / "out"), str(tmp_path / "data")
    assert main(["generate", "visual_dialogue", "--folder", folder, "--out", out]) == 0
    dataset, task = open_dataset(tmp_path / "data")
    unknown = "\N{REPLACEMENT CHARACTER}"
    for turns in (dataset.episode(number).turns for number in range(len(dataset))):
        assert turns[0].text.endswith(" it\u2019s a caf\xe9\n\U0001f600")
        assert len(turns) < 8 or turns[7].text == "is it \u201cred\u201d \U0001f600?"
    _, records = task.evaluate(task.player("data", seed=0).policy, games=4, seed=0)
    shown = [task.tokenizer().decode(row["tokens"][row["attention_mask"]].tolist()) for row in records.rows]
    assert all(f" it\u2019s a caf\xe9\n{unknown}</s>" in text and text.count(unknown) == 1 for text in shown)


@pytest.mark.slow
def test_caches_of_models_in_process_and_behind_http(prepared_dialogues, tmp_path, capsys):
    pytest.importorskip("uvicorn")
    files = SplitFiles.in_folder(prepared_dialogues / "data", "val")
    words = ["rewards", "visual_dialogue", "--dialogues", str(files.dialogues), "--features", str(files.features)]
    words += ["--split", "val", "--batch-size", "4"]
    local, http = tmp_path / "local", tmp_path / "http"
    assert main([*words, "--out", str(local), "--models", str(prepared_dialogues / "models")]) == 0
    assert "10 of 10 dialogues" in capsys.readouterr().out
    with vd.DialogueServer(PreparedFolder(str(prepared_dialogues)).models()) as server:
        assert main([*words, "--out", str(http), "--server", server.url]) == 0
    assert sorted(path.name for path in local.iterdir()) == ["val_rank_reward_cache1.json", "val_reward_cache2.json"]
    for path, start in zip(SplitFiles.in_folder(local, "val")[2:], (1.0, 10.0), strict=True):
        rows = read_reward_cache(path, 10)
        assert rows == read_reward_cache(http / path.name, 10)
        assert {len(row) for row in rows} == {11}
        assert all(0 <= row[0] <= start for row in rows)


@pytest.mark.parametrize("host", ["", "\xe9..x"])
def test_a_host_that_cannot_be_used_is_an_error_of_one_line(prepared_dialogues, host, capsys):
    files = SplitFiles.in_folder(prepared_dialogues / "data", "val")
    given = ["--models", str(prepared_dialogues / "models"), "--features", str(files.features), "--host", host]
    assert main(["serve", "visual_dialogue", *given]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
