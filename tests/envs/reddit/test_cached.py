"""Rewards in a file: by model and text, shared by processes."""

from __future__ import annotations

import math
import multiprocessing
import pickle
import sqlite3
from contextlib import closing

import pytest
import torch

from torchrl_lang._files import FileError
from torchrl_lang.envs.reddit.rewards import CachedReward


class Lengths:
    """Scores texts by their lengths times a factor, and counts them."""

    def __init__(self, factor=1.0):
        self.factor, self.scored = factor, []

    def __call__(self, texts):
        self.scored += texts
        return torch.tensor([self.factor * len(text) for text in texts])


def test_each_text_is_scored_once(tmp_path):
    inner = Lengths(1 / 3)
    reward = CachedReward(inner, tmp_path / "new" / "rewards.sqlite", model="lengths", batch_size=2)
    texts = ["a", "bb", "a", "", "ccc", "bb"]
    direct = Lengths(1 / 3)(texts)
    assert torch.equal(reward(texts), direct)
    assert inner.scored == ["a", "bb", "", "ccc"]
    assert torch.equal(reward(texts[::-1]), direct.flip(0))  # float32 comes back as it was
    again = CachedReward(inner, tmp_path / "new" / "rewards.sqlite", model="lengths")
    assert torch.equal(again(texts), direct)
    assert len(inner.scored) == 4
    assert reward([]).shape == (0,)
    assert reward([]).dtype == torch.float32


def test_models_have_their_own_values(tmp_path):
    path = tmp_path / "rewards.sqlite"
    assert CachedReward(Lengths(1.0), path, model="one")(["ab"]).item() == 2.0
    assert CachedReward(Lengths(2.0), path, model="two")(["ab"]).item() == 4.0
    assert CachedReward(Lengths(9.0), path, model="one")(["ab"]).item() == 2.0


def test_any_text(tmp_path):
    texts = ["\0", "a\0b", "\ud800", "é", "é", "' OR 1=1; --", "\N{GRINNING FACE}" * 3, "a", "A"]
    inner = Lengths()
    reward = CachedReward(inner, tmp_path / "rewards.sqlite", model="lengths")
    assert torch.equal(reward(texts), Lengths()(texts))
    assert torch.equal(reward(texts), Lengths()(texts))
    assert len(inner.scored) == len(set(texts))


def test_more_texts_than_sqlite_takes_parameters(tmp_path):
    texts = [str(number) for number in range(5000)]
    reward = CachedReward(Lengths(), tmp_path / "rewards.sqlite", model="lengths")
    assert torch.equal(reward(texts), Lengths()(texts))


def test_what_was_stored_before_an_error_is_kept(tmp_path):
    inner = Lengths()

    def fails_at_ccc(texts):
        if "ccc" in texts:
            raise ConnectionError
        return inner(texts)

    reward = CachedReward(fails_at_ccc, tmp_path / "rewards.sqlite", model="m", batch_size=1)
    with pytest.raises(ConnectionError):
        reward(["a", "bb", "ccc", "dddd"])
    assert reward(["bb", "a"]).tolist() == [2.0, 1.0]
    assert inner.scored == ["a", "bb"]


def _work(path, barrier, factor, found):
    reward = CachedReward(Lengths(factor), path, model="m", batch_size=7)
    barrier.wait(30)
    found.put(reward([f"text {number}" for number in range(300)]).tolist())


@pytest.mark.slow
def test_two_processes_agree_on_what_was_stored_first(tmp_path):
    """They score differently, so that a value of which the other returned another would show."""
    context = multiprocessing.get_context()
    barrier, found = context.Barrier(3), context.Queue()
    path = tmp_path / "rewards.sqlite"
    workers = [context.Process(target=_work, args=(path, barrier, factor, found)) for factor in (1.0, 2.0, 3.0)]
    for worker in workers:
        worker.start()
    results = [found.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(30)
    assert results[0] == results[1] == results[2]
    with sqlite3.connect(path) as file:
        assert file.execute("SELECT COUNT(*) FROM rewards").fetchone() == (300,)


def test_a_copy_in_another_process_would_open_the_file_itself(tmp_path):
    reward = CachedReward(Lengths(), tmp_path / "rewards.sqlite", model="m")
    assert pickle.loads(pickle.dumps(reward))(["ab"]).item() == 2.0  # noqa: S301


@pytest.mark.parametrize("content", [b"no database " * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_of_something_else(tmp_path, content):
    path = tmp_path / "rewards.sqlite"
    path.write_bytes(content)
    with pytest.raises(FileError, match="is no cache of rewards"):
        CachedReward(Lengths(), path, model="m")(["a"])
    assert path.read_bytes() == content


def test_another_table_and_a_folder(tmp_path):
    with sqlite3.connect(tmp_path / "other.sqlite") as file:
        file.execute("CREATE TABLE rewards (name TEXT)")
    with pytest.raises(FileError, match="is no cache of rewards"):
        CachedReward(Lengths(), tmp_path / "other.sqlite", model="m")(["a"])
    for path in (tmp_path, tmp_path / "other.sqlite" / "below"):
        with pytest.raises(FileError, match=r"cannot be used .*: try again, or give another file\.$"):
            CachedReward(Lengths(), path, model="m")


def test_a_file_that_is_deleted_in_use(tmp_path):
    reward = CachedReward(Lengths(), tmp_path / "rewards.sqlite", model="m")
    reward(["a"])
    (tmp_path / "rewards.sqlite").unlink()
    assert reward(["a", "bc"]).tolist() == [1.0, 2.0]
    assert CachedReward(None, tmp_path / "rewards.sqlite", model="m")(["bc"]).tolist() == [2.0]


@pytest.mark.parametrize("value", ["abc", b"\x01", math.inf])
def test_stored_values_that_are_no_rewards(tmp_path, value):
    path = tmp_path / "rewards.sqlite"
    reward = CachedReward(Lengths(), path, model="m")
    reward(["a"])
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE rewards SET value = ?", (value,))
    with pytest.raises(FileError, match=r"rewards.sqlite has .* as the reward of 'a', expected a finite number"):
        reward(["a"])


def test_a_file_that_another_process_locks_is_not_to_be_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr("torchrl_lang.envs.reddit.rewards.cached._PATIENCE", 0.01)
    path = tmp_path / "rewards.sqlite"
    reward = CachedReward(Lengths(), path, model="m")
    with sqlite3.connect(path) as file:
        file.execute("BEGIN EXCLUSIVE")
        with pytest.raises(
            FileError, match=r"cannot be used \(database is locked\): try again, or give another file\.$"
        ):
            reward(["a"])
    assert reward(["a"]).item() == 1.0


def test_wrong_rewards_are_not_stored(tmp_path):
    path = tmp_path / "rewards.sqlite"
    with pytest.raises(ValueError, match="must be finite"):
        CachedReward(Lengths(float("nan")), path, model="m")(["a"])
    assert CachedReward(Lengths(), path, model="m")(["a"]).item() == 1.0
    with pytest.raises(ValueError, match="needs a name"):
        CachedReward(Lengths(), path, model="")
    with pytest.raises(ValueError, match="batch_size"):
        CachedReward(Lengths(), path, model="m", batch_size=0)
