"""Reddit comments as a task of the recipes: splits, rows and metrics by plain loops over the files, commands."""

import csv
import json
import pickle
import re
import shutil
import sqlite3

import pytest
import torch
from tokenizers import Tokenizer as Vocabulary
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.envs.reddit.csv_writer import write_folder
from tests.envs.scripted_server import Scripted
from tests.recipes.commands import from_own_notes
from tests.sealed import reseal
from torchrl_lang.__main__ import main
from torchrl_lang._files import FileError
from torchrl_lang.data import load_dataset
from torchrl_lang.envs.reddit import RedditComments, generate_reddit_comments
from torchrl_lang.envs.reddit.folder import SPLITS, CommentFolder, RedditReward
from torchrl_lang.envs.reddit.task import RedditData, RedditTask, comments_of
from torchrl_lang.envs.reddit.upvotes import UpvoteModel
from torchrl_lang.evaluation import GameRecords
from torchrl_lang.recipes.datasets import open_dataset
from torchrl_lang.text import from_row


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder of 400 generated comments; only rewards are written into it."""
    folder = tmp_path_factory.mktemp("reddit") / "comments"
    generate_reddit_comments(folder, 400)
    return folder


@pytest.fixture(scope="module")
def task(home):
    """By the scores of the data: it needs no package."""
    return RedditTask.of(CommentFolder(str(home)), RedditReward("score"), scale=1.0)


@pytest.fixture(scope="module")
def profane(home):
    pytest.importorskip("profanity_check", reason="needs the extra reddit")
    return RedditTask.of(CommentFolder(str(home)), RedditReward())


def generate(out, *more):
    return main(["generate", "reddit", "--out", str(out), *map(str, more)])


def rows_of(home):
    """Parent, comment and score of each row of the files."""
    found = []
    for name in ("comments_positive.csv", "comments_negative.csv"):
        with (home / name).open(newline="") as file:
            found += [(row[10], row[4], int(row[5])) for row in list(csv.reader(file))[1:]]
    return found


def described(dataset):
    """Parent, comment and reward of each row, sorted."""
    episodes = [from_row(row, dataset.tokenizer) for row in dataset[:]]
    assert all(each.terminated and not each.truncated for each in episodes)
    return sorted((*[turn.text for turn in each.turns], each.turns[-1].reward) for each in episodes)


@pytest.fixture(scope="module")
def unicode_home(tmp_path_factory):
    """Accents of two characters, curly quotes, line breaks of other systems, and an emoji in one comment only."""
    comments = [
        (f"don\u2019t cafe\u0301 {n}\r\nso \r{chr(0x1F300 + n)}", n % 3 - 1, f"\u201cwhy\u201d {n % 5}\r\n?")
        for n in range(60)
    ]
    return write_folder(tmp_path_factory.mktemp("unicode"), comments[:30], comments[30:])


def test_rows_of_any_text(unicode_home, tmp_path):
    assert generate(tmp_path / "data", "--folder", unicode_home, "--reward", "score") == 0
    dataset, task = open_dataset(tmp_path / "data")
    expected = [
        (f"\u201cwhy\u201d {n % 5}\n?", f"don\u2019t caf\xe9 {n}\nso \n{chr(0x1F300 + n)}", 1.0 if n % 3 == 2 else -1.0)
        for n in range(60)
    ]
    rows = described(dataset)
    assert set(rows) < set(expected)
    assert len(rows) == len(task.data("train")) == len(set(rows))
    unseen = {text[-1] for text in task.data("val").comments}
    assert unseen.isdisjoint(task.tokenizer().symbols)
    _, records = task.evaluate(task.player("data", seed=0).policy, games=8, seed=0)
    played = {text for _, text in comments_of(records, task.tokenizer())}
    without_last = {text[:-1] for _, text, _ in expected}
    assert all(text in without_last or text[:-1] in without_last for text in played)
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in played)


def test_a_text_that_a_tokenizer_lacks_is_named(unicode_home, tmp_path, capsys):
    words = Vocabulary(WordLevel({"why": 0, "so": 1}))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "words")
    assert generate(tmp_path / "data", "--folder", unicode_home, "--tokenizer", tmp_path / "words") == 2
    error = capsys.readouterr().err
    assert re.search(r"has a text that cannot be encoded .*: comments_(positive|negative)\.csv line \d+", error)
    assert "give a tokenizer that can, as `--tokenizer NAME`" in error


def test_no_comment_is_in_two_splits(home, task):
    parts = {split: task.data(split) for split in SPLITS}
    texts = {split: set(part.comments) for split, part in parts.items()}
    for one in SPLITS:
        assert all(not texts[one] & texts[other] for other in SPLITS if other != one)
    together = [row for part in parts.values() for row in zip(part.parents, part.comments, part.scores, strict=True)]
    assert sorted(together) == sorted(rows_of(home))
    assert 0.7 < len(parts["train"]) / 400 < 0.9
    other = CommentFolder(str(home), seed=1)
    assert set(other.split("test").comments) != texts["test"]


def test_splits_by_index_files(home, tmp_path):
    found = RedditData(folder=home, out=tmp_path / "data", reward="score", index_files=True).task()
    for split, name in (("train", "train"), ("val", "eval"), ("test", "test")):
        expected = [rows_of(home)[row] for row in json.loads((home / f"{name}_idxs.json").read_text())]
        part = found.data(split)
        assert list(zip(part.parents, part.comments, part.scores, strict=True)) == expected
    assert generate(tmp_path / "data", "--folder", home, "--reward", "score", "--index-files") == 0
    assert open_dataset(tmp_path / "data")[1] == found
    folder = shutil.copytree(home, tmp_path / "copy")
    row = json.loads((folder / "test_idxs.json").read_text())[0]
    (folder / "train_idxs.json").write_text(json.dumps([row]))
    with pytest.raises(FileError, match=f"train_idxs.json has the row {row}, which test_idxs.json has, too"):
        CommentFolder(str(folder), index_files=True).split("train")


def test_every_comment_fits(home, task):
    encode = task.tokenizer().encode
    rows = rows_of(home)
    comment, parent = (max(len(encode(row[column])) for row in rows) for column in (1, 0))
    assert task.action_length == comment + 1
    assert task.row_length == 1 + parent + 1 + comment + 1 + 1
    without = RedditTask.of(CommentFolder(str(home)), RedditReward("score"), include_parent=False)
    assert without.row_length == 2 + comment + 2
    assert task.tokenizer() is task.tokenizer()


def test_rows_by_a_plain_loop(home, task, tmp_path):
    assert generate(tmp_path / "data", "--folder", home, "--reward", "score", "--scale", 2, "--shift", 0.5) == 0
    dataset = load_dataset(tmp_path / "data", verify=True)
    train = set(task.data("train").comments)
    total = {}
    for _, text, score in rows_of(home):
        total[text] = total.get(text, 0) + score
    expected = [(p, c, 2.5 if total[c] > 0 else -1.5) for p, c, _ in rows_of(home) if c in train]
    assert described(dataset) == sorted(expected)
    rewards = [each[2] for each in described(dataset)]
    assert {2.5, -1.5} == set(rewards)
    order = [float(row["token_reward"].sum()) > 0 for row in dataset[:]]
    assert 0 < sum(order[: len(order) // 4]) < len(order) // 4  # not in the order of the files


@pytest.mark.parametrize("option", [("--upvote-quantile", 0.9), ("--min-upvotes", 3)])
def test_the_most_upvotes(home, task, tmp_path, option):
    words = ("--folder", home, "--reward", "score", "--no-include-parent", *option)
    assert generate(tmp_path / "data", *words) == 0
    data = task.data("train")
    cutoff = sorted(data.scores)[-(-9 * (len(data) - 1) // 10)] if "--upvote-quantile" in option else 3
    kept = [text for text, score in zip(data.comments, data.scores, strict=True) if score >= cutoff]
    assert [text for text, _ in described(load_dataset(tmp_path / "data"))] == sorted(kept)
    assert 0.09 * len(data) < len(kept) < 0.6 * len(data)


def test_a_cutoff_is_of_the_reward_in_use(profane, home, tmp_path):
    """Levels 0 and 1, however many upvotes the comments have."""
    least = -5.0
    assert generate(tmp_path / "data", "--folder", home, "--cutoff", least) == 0
    data = profane.data("train")
    level = profane.clean_reward()(list(data.comments)).tolist()
    kept = [(text, -5 * value) for text, value in zip(data.comments, level, strict=True) if -5 * value >= least]
    dataset = load_dataset(tmp_path / "data")
    assert sorted((text, reward) for _, text, reward in described(dataset)) == sorted(kept)
    assert 0 < len(kept) < len(data)
    assert dataset.manifest["notes"]["cutoff"] == least


def test_other_rudeness_is_another_corpus(tmp_path):
    rude = ("--sentences", 3, "--rude-when-calm", 1, "--rude-when-provoked", 1)
    for words in ((), rude):
        assert generate(tmp_path / "data", "--pairs", 100, "--reward", "score", "--overwrite", *words) == 0
    mild, hostile = (RedditComments.read(tmp_path / f"data-comments-100-{name}-0") for name in ("1-0.1-0.7", "3-1-1"))
    assert {len(sentences(text)) for text in mild.comments} == {1, 2}  # half of them have a closing
    assert {len(sentences(text)) for text in hostile.comments} == {3, 4}
    assert {text for _, text, _ in described(load_dataset(tmp_path / "data"))} <= set(hostile.comments)


def test_games_of_a_player(home, tmp_path, capsys):
    words = ("--folder", home, "--reward", "score", "--player", "data", "--games", 20, "--batch", 8)
    assert generate(tmp_path / "data", *words) == 0
    pairs = {(parent, text) for parent, text, _ in rows_of(home)}
    found = described(load_dataset(tmp_path / "data"))
    assert len(found) == 20
    assert {(parent, text) for parent, text, _ in found} <= pairs
    capsys.readouterr()
    words = ["play", "reddit", "--folder", str(home), "--reward", "score", "--seed", "0"]
    assert main([*words, "--watch", "data", "--games", "2"]) == 0
    assert len(capsys.readouterr().out.strip().split("\n\n")) == 2


def levels(texts):
    """Of the worst sentence; the package scores them in one call."""
    from profanity_check import predict_prob

    texts = list(texts)
    score = iter(predict_prob([sentence for text in texts for sentence in sentences(text)]))
    worst = [max(next(score) for _ in sentences(text)) for text in texts]
    return [0 if p < 1 / 3 else 1 if p < 2 / 3 else 2 for p in worst]


def sentences(text):
    return re.split(r"(?<=[.!?])\s+", text)


def test_profanity_by_a_plain_loop(home, profane, tmp_path):
    assert generate(tmp_path / "data", "--folder", home) == 0
    data = profane.data("train")
    columns = zip(data.parents, data.comments, levels(data.comments), strict=True)
    expected = [(parent, text, -5.0 * level) for parent, text, level in columns]
    assert described(load_dataset(tmp_path / "data")) == sorted(expected)
    assert {0.0, -10.0} <= {reward for *_, reward in expected}
    with sqlite3.connect(home / "rewards.sqlite") as file:
        rows = file.execute("SELECT model, text FROM rewards").fetchall()
    assert {bytes(text).decode() for _, text in rows} >= {each for text in data.comments for each in sentences(text)}
    assert all(model.startswith("profanity profanity ") for model, _ in rows)


def test_noise_of_the_rows_and_of_the_environment(home, profane, tmp_path):
    assert generate(tmp_path / "data", "--folder", home, "--reward", "profanity_noised") == 0
    dataset, noised = open_dataset(tmp_path / "data")
    found = described(dataset)
    clean = levels(text for _, text, _ in found)
    assert {reward for *_, reward in found} == {0.0, -10.0}
    assert all(reward == -5.0 * level for (*_, reward), level in zip(found, clean, strict=True) if level != 1)
    assert clean.count(1) > 5
    games, again = (noised.evaluate(noised.player("random", 0).policy, games=20, seed=3)[1] for _ in range(2))
    assert torch.equal(games.returns, again.returns)
    played = levels(text for _, text in comments_of(games, noised.tokenizer()))
    assert noised.won(games).tolist() == [level == 0 for level in played]


def test_metrics_worked_out_by_hand(profane):
    from torchrl_lang.text import Episode, Turn, to_rows

    texts = ["thank you so much", "what a load of crap", "you are an idiot you are", ""]
    episodes = [Episode([Turn("any tips for kites at night?"), Turn(text, -1.0)], True) for text in texts]
    tokenizer = profane.tokenizer()
    rows = to_rows(episodes, tokenizer, profane.row_length)
    records = GameRecords.from_rows(rows, tokenizer.control)
    assert comments_of(records, tokenizer) == [("any tips for kites at night?", text) for text in texts]
    summary = profane.summary(records, "by hand")
    assert profane.won(records).tolist() == [True, False, False, True]
    assert summary.win_rate == 0.5
    # Of the words "you" occurs three times, "are" and "you are" twice.
    expected = {"profanity": 0.5, "distinct_1": 12 / 15, "distinct_2": 11 / 12, "words": 15 / 4}
    assert summary.metrics == pytest.approx(expected)


def test_upvotes_of_any_text(home):
    task = RedditTask.of(CommentFolder(str(home)), RedditReward("upvotes"), scale=1.0)
    polite = "hey, thanks, this helps me with kites in winter. have a nice day"
    texts = [polite, "hey, what the hell is this crap about kites. get lost"]
    liked, disliked = task.clean_reward().probabilities(texts)
    assert liked > disliked + 0.1
    assert task.is_harmful(texts).tolist() == (task.clean_reward()(texts) == 0).tolist()
    assert task.clean_reward() is task.clean_reward()


def test_a_model_that_was_trained_again_has_its_own_stored_rewards(tmp_path, monkeypatch):
    """Under the same name; the file of values stays where it is."""
    folder, found = tmp_path / "up", []
    folder.mkdir()

    def load(model):
        value = float((folder / "weights").read_text())
        return lambda texts: [value] * len(texts)

    monkeypatch.setattr(UpvoteModel, "load", load)
    nothing = RedditComments([], [], [])
    for value in (0.0, 1.0):
        (folder / "weights").write_text(str(value))
        found += RedditReward("upvotes", str(folder)).clean(tmp_path, nothing, nothing)(["well done"]).tolist()
    assert found == [0.0, 1.0]
    assert len(list(tmp_path.glob("rewards.sqlite"))) == 1


def test_the_task_travels(task):
    labels = (("neutral", 0.0), ("toxic", -1.0))
    sizes = {"row_length": 30, "action_length": 10, "scale": 2.0, "include_parent": False}
    other = RedditTask(CommentFolder("folder", seed=3), RedditReward("classifier", "model", labels), **sizes)
    for each in (task, other):
        assert from_own_notes(each) == each
        assert pickle.loads(pickle.dumps(each)) == each  # noqa: S301


@pytest.mark.slow
def test_a_run_does_not_choose_where_the_key_goes(home, tmp_path, monkeypatch, capsys):
    """Neither does its dataset: an address is given with the command, or in the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", "a-key-of-tests")
    good = {"results": [{"category_scores": {"hate": 0.5}}] * 32}

    class Endless(list):
        def pop(self, place):
            return 200, {"results": good["results"][: len(json.loads(server.seen[-1][-1])["input"])]}

    folder = shutil.copytree(home, tmp_path / "comments")
    words = ("--folder", folder, "--reward", "moderation", "--model", "m")
    with Scripted() as server, Scripted() as thief:
        server.script = Endless()
        assert generate(tmp_path / "data", *words, "--url", f"{server.url}/v1") == 0
        sizes = ["--steps", "1", "--eval-every", "1", "--layers", "1", "--width", "16", "--eval-games", "4"]
        train = ["train", "bc", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "run"), *sizes]
        CommentFolder.reward.cache_clear()
        assert main(train) == 2
        assert "set OPENAI_BASE_URL" in capsys.readouterr().err
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        assert main(train) == 0
        assert server.url not in (tmp_path / "run" / "config.json").read_text()
        stolen = {"url": f"{thief.url}/v1"}
        reseal(tmp_path / "run" / "config.json", lambda config: config["notes"]["reward"].update(stolen))
        (folder / "rewards.sqlite").unlink()
        CommentFolder.reward.cache_clear()
        asked = len(server.seen)
        assert main(["evaluate", "--run", str(tmp_path / "run"), "--games", "4"]) == 0
        assert len(server.seen) > asked
        monkeypatch.delenv("OPENAI_BASE_URL")
        CommentFolder.reward.cache_clear()
        assert main(["evaluate", "--run", str(tmp_path / "run"), "--games", "4", "--seed", "9"]) == 2
    assert thief.seen == []


def test_players_reply_to_the_same_parents(home, task):
    pairs = {(parent, text) for parent, text, _ in rows_of(home)}
    train = set(task.data("train").comments)
    found = {}
    for name in task.baselines:
        _, records = task.evaluate(task.player(name, 0).policy, games=30, seed=4, batch=7, split="test")
        found[name] = comments_of(records, task.tokenizer())
    assert [parent for parent, _ in found["random"]] == [parent for parent, _ in found["data"]]
    assert {parent for parent, _ in found["data"]} <= set(task.data("test").parents)
    assert set(found["data"]) <= pairs
    assert task.clean_reward()(list(task.data("test").comments)).abs().min() == 1.0  # known, as all of the data
    assert {text for _, text in found["random"]} <= train


@pytest.mark.parametrize(
    ("options", "values", "harmful"),
    [
        (("profanity",), [0.0, 1.0, 2.0], [False, True, True]),
        (("moderation", "m"), [0.0, 1.0, 2.0], [False, True, True]),
        (("classifier", "m", (("toxic", -1.0),)), [-1.0, 0.0, 1.0], [True, False, False]),
        (("upvotes",), [0.49, 0.5, 1.0], [True, False, False]),
    ],
)
def test_harmful_rewards(options, values, harmful):
    reward = RedditReward(*options)
    assert (reward.paper_scale == -5.0) == (values[-1] == 2.0)
    assert reward.harmful(torch.tensor(values)).tolist() == harmful


@pytest.mark.parametrize(
    ("call", "error", "noun"),
    [
        (lambda task: RedditReward("kindness"), ValueError, "kindness"),
        (lambda task: RedditReward("classifier"), ValueError, "'classifier' needs labels and model, got none"),
        (lambda task: RedditReward("profanity", "m"), ValueError, "needs none of model, labels and url, got model"),
        (lambda task: task.data("dev"), ValueError, r"split must be one of .*, got 'dev'"),
        (lambda task: task.player("nobody"), ValueError, r"player must be one of .*, got 'nobody'"),
        (lambda task: from_own_notes(task, reward={"name": "kindness"}), FileError, "reward"),
        (lambda task: from_own_notes(task, comments={"folder": "a", "on_bad_rows": "ignore"}), FileError, "on_bad"),
    ],
)
def test_refusals(task, call, error, noun):
    with pytest.raises(error, match=noun):
        call(task)
