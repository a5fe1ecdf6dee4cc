"""Records of text tasks: on disk, in logs, of turns or episodes, and split without an episode in two parts."""

import json
import random
from collections import Counter

import pytest

from torchrl_lang._files import FileError
from torchrl_lang.algorithm_distillation.language import TextRecord, read_run_logs, split_texts
from torchrl_lang.algorithm_distillation.language.records import (
    episode_records,
    group_episodes,
    in_epoch_order,
    read_text_records,
    to_lines,
)
from torchrl_lang.algorithm_distillation.language.run_recorder import run_records
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows

LETTERS = CharTokenizer.from_alphabet("abcdef")


def recorded():
    """Two episodes of two turns and one."""
    first = [Turn("ab"), Turn("c", reward=1.0), Turn("f"), Turn("ba", reward=-0.5), Turn("d")]
    rows = to_rows([Episode(first, terminated=True), Episode([Turn("e", reward=0.25)], terminated=True)], LETTERS, 16)
    return [*run_records(rows, LETTERS, epoch=1, run="ppo"), *run_records(rows, LETTERS, epoch=2, run="ppo")]


def many(seed=0, runs=("a", "b"), epochs=6):
    """Records of episodes of one to four blocks; each text is that of no other."""
    draw, records = random.Random(seed), []
    for run in runs:
        for epoch in range(1, epochs + 1):
            for episode in range(draw.randrange(3, 20)):
                for turn in range(draw.randrange(1, 5)):
                    name = f"{run} {epoch} {episode} {turn}"
                    more = {"epoch": epoch, "run": run, "episode": episode}
                    records.append(TextRecord(query=name, response="x" * draw.randrange(9), reward=0.5, **more))
    return records


def episode_of(record):
    return record.run, record.epoch, record.episode


# -- blocks of turns and of episodes -----------------------------------------------------------------------------------


def test_a_block_for_each_episode_has_its_return():
    texts = episode_records(recorded())
    expected = [("ab\nc\nf", "ba", 0.5, 1), ("", "e", 0.25, 1), ("ab\nc\nf", "ba", 0.5, 2), ("", "e", 0.25, 2)]
    assert [(each.query, each.response, each.reward, each.epoch) for each in texts] == expected
    assert len(group_episodes(texts)) == 4


def test_a_return_has_the_fewest_digits():
    """A sum in float64 would be 0.30000000000000004, another answer than 0.3."""
    turns = [Turn("a"), Turn("b", reward=0.1), Turn("c"), Turn("d", reward=0.2)]
    whole = [Turn("a"), Turn("b", reward=0.3)]
    rows = to_rows([Episode(each, terminated=True) for each in (turns, whole)], LETTERS, 16)
    texts = episode_records(list(run_records(rows, LETTERS, epoch=1, run="ppo")))
    assert [each.reward for each in texts] == [0.3, 0.3]


def test_records_without_an_episode_are_one_each():
    records = [TextRecord(query="", response="", reward=0.0)] * 3
    assert [len(episode) for episode in group_episodes(records)] == [1, 1, 1]
    assert sum(map(len, group_episodes(many()))) == len(many())


# -- splitting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_no_episode_is_in_two_parts_and_none_is_lost(seed):
    records = many(seed)
    split = split_texts(records, validation=0.2, test=0.3, seed=seed)
    parts = [{episode_of(record) for record in part} for part in split]
    assert not parts[0] & parts[1]
    assert not parts[1] & parts[2]
    assert not parts[0] & parts[2]
    assert sorted(each.query for part in split for each in part) == sorted(each.query for each in records)
    episodes = Counter(place[:2] for place in set(map(episode_of, records)))
    for run_and_epoch, number in episodes.items():
        held_out = [sum(place[:2] == run_and_epoch for place in part) for part in parts]
        assert held_out[0]
        for found, wanted in zip(held_out[1:], (0.2 * number, 0.3 * number), strict=True):
            assert found == round(wanted) if wanted >= 1 else found <= 1
    for part in split:
        assert [record for run in in_epoch_order(part) for record in run] == part
        turns = [int(record.query.split()[-1]) for record in part]
        assert all(turn == 0 or turn == before + 1 for before, turn in zip([-1, *turns], turns, strict=False))


@pytest.mark.parametrize(("size", "epochs"), [(1, 60), (2, 60), (3, 40), (4, 40), (7, 20)])
@pytest.mark.parametrize(("validation", "test"), [(0.1, 0.1), (0.05, 0.2), (0.25, 0.25)])
def test_small_epochs_are_split_over_the_run(size, epochs, validation, test):
    records = [
        TextRecord(query=f"{epoch} {number}", response="", reward=0.0, epoch=epoch)
        for epoch in range(epochs)
        for number in range(size)
    ]
    parts = split_texts(records, validation=validation, test=test)
    assert sorted(each.query for part in parts for each in part) == sorted(each.query for each in records)
    for part, share in ((parts.validation, validation), (parts.test, test)):
        if share * size < 1:
            assert abs(len(part) - share * len(records)) <= 1
            quarters = Counter(4 * each.epoch // epochs for each in part)
            assert max(quarters.values()) - min(quarters[number] for number in range(4)) <= 1
    trained = Counter(each.epoch for each in parts.train)
    assert size == 1 or len(trained) == epochs


def test_a_short_run_has_an_episode_in_each_part():
    for sizes in ([3], [1, 1, 1], [2, 2], [4]):
        places = [(epoch, number) for epoch, size in enumerate(sizes) for number in range(size)]
        records = [TextRecord(query=f"{number}", response="", reward=0.0, epoch=epoch) for epoch, number in places]
        assert all(split_texts(records))


def test_held_out_episodes_are_from_anywhere_in_an_epoch():
    """Recorded runs have the episodes of an epoch by their beginning, so the last ones are short."""
    records = [
        TextRecord(query="", response="", reward=0.0, epoch=epoch, run="a", episode=number)
        for epoch in range(200)
        for number in range(10)
    ]
    held_out = [record.episode for record in split_texts(records).test]
    assert len(held_out) == 200
    assert 3.5 < sum(held_out) / 200 < 5.5


def test_impossible_splits_raise():
    records = many()
    with pytest.raises(ValueError, match=r"There is no run \['c'\]: the runs are \['a', 'b'\]"):
        split_texts(records, test_runs=["c"])
    with pytest.raises(ValueError, match=r"No episode is left for a part with validation=-0\.1"):
        split_texts(records, validation=-0.1)
    with pytest.raises(ValueError, match="No episode is left for a part"):
        split_texts(records, test_runs=["a", "b"])
    with pytest.raises(ValueError, match=r"No episode is left for a part with validation=0\.5, test=0\.5"):
        split_texts(records, validation=0.5, test=0.5)
    two = [TextRecord(query="", response="", reward=0.0, epoch=epoch) for epoch in range(2)]
    with pytest.raises(ValueError, match="No episode is left for a part"):
        split_texts(two)


# -- files and logs ----------------------------------------------------------------------------------------------------


def test_records_are_read_as_they_were_written(tmp_path):
    every = [*many(), *recorded(), TextRecord(query="é\u2028", response='"', reward=1 / 3, log_probs=(-0.1,), run="x")]
    (tmp_path / "records.jsonl").write_text(to_lines(every), encoding="utf-8")
    assert read_text_records(tmp_path / "records.jsonl") == every


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": 3}, "query"),
        ({"reward": "a"}, "reward"),
        ({"reward": None}, "reward"),
        ({"epoch": -1}, "epoch"),
        ({"epoch": True}, "epoch"),
        ({"response_tokens": [1.5]}, "response_tokens"),
        ({"response_tokens": [1], "log_probs": [-1, -2]}, "2 log_probs for 1"),
        ({"rewards": [1]}, "rewards"),
    ],
)
def test_bad_records_name_the_line(tmp_path, change, message):
    path = tmp_path / "records.jsonl"
    good = {"query": "q", "response": "r", "reward": 0.5}
    path.write_text("\n".join(json.dumps(each) for each in (good, {**good, **change})))
    with pytest.raises(FileError, match=rf"no record on line 2 \(.*{message}"):
        read_text_records(path)


PADDED = {
    "query_tensor": [10, 11],
    "response_tensor": [20, 21, 50, 50, 50, 50],
    "logprobs": [-0.1, -0.2, -0.3],
    "values": [0.0, 0.0, 0.0],
    "rewards": [-0.01, -0.02, 0.9],
    "query_text": "q",
}
"""A rollout whose completion ended before the longest of its batch; 50 ends it and pads it."""


def write_padded(folder, **change):
    write_run(folder, "run-a", {})
    (folder / "run-a" / "epoch-1.json").write_text(json.dumps([{**PADDED, **change}]))


def test_padding_of_a_log_is_cut(tmp_path):
    write_padded(tmp_path)
    (record,) = read_run_logs(tmp_path, lambda ids: "-".join(map(str, ids)))
    assert (record.response, record.response_tokens) == ("20-21-50", (20, 21, 50))
    assert record.log_probs == (-0.1, -0.2, -0.3)
    assert record.reward == 0.9


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"response_tensor": [20, 21, 50, 50, 50, 51]}, "3 log_probs for 6"),
        ({"rewards": [0.0, 0.9]}, "3 log_probs for 6"),
        ({"response_tensor": [20, 21]}, "3 log_probs for 2"),
    ],
)
def test_logs_that_are_not_padded_but_wrong(tmp_path, change, found):
    write_padded(tmp_path, response_text="r", **change)
    with pytest.raises(FileError, match=rf"bad rollout 0 \(.*{found}"):
        read_run_logs(tmp_path)


def write_run(folder, name, epochs, texts=True):
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps({"lr": 1e-4, "name": name}))
    for number, rollouts in epochs.items():
        content = []
        for place in range(rollouts):
            one = {"query_tensor": [place], "response_tensor": [7, 8], "logprobs": [-1.0, -2.0], "values": [0.0, 0.0]}
            one |= {"rewards": [-0.01, 0.5]}
            one |= {"query_text": f"q{place}", "response_text": f"{name} {number}"} if texts else {}
            content.append(one)
        (folder / name / f"epoch-{number}.json").write_text(json.dumps(content, indent=2))


def test_logs_are_read_in_the_order_of_numbers(tmp_path):
    """The names 9, 10 and 100.5 sort differently as texts."""
    write_run(tmp_path, "run-b", {"100.5": 1, "9": 2, "10": 1})
    write_run(tmp_path, "run-a", {"1": 1})
    (tmp_path / "notes.txt").write_text("not a run")
    logs = read_run_logs(tmp_path)
    found = [(each.run, each.epoch, each.response, each.query) for each in logs]
    assert found == [
        ("run-a", 0, "run-a 1", "q0"),
        ("run-b", 0, "run-b 9", "q0"),
        ("run-b", 0, "run-b 9", "q1"),
        ("run-b", 1, "run-b 10", "q0"),
        ("run-b", 2, "run-b 100.5", "q0"),
    ]
    first = logs[0]
    assert (first.reward, first.log_probs) == (0.5, (-1.0, -2.0))
    assert (first.query_tokens, first.response_tokens) == ((0,), (7, 8))


def test_damaged_logs_raise(tmp_path):
    with pytest.raises(FileError, match="no folder run-"):
        read_run_logs(tmp_path)
    write_run(tmp_path, "run-a", {"1": 1})
    (tmp_path / "run-a" / "epoch.json").write_text("[]")
    with pytest.raises(FileError, match="has no number at the end of its name"):
        read_run_logs(tmp_path)
    (tmp_path / "run-a" / "epoch.json").rename(tmp_path / "run-a" / "epoch-2.json")
    assert len(read_run_logs(tmp_path)) == 1
    (tmp_path / "run-a" / "epoch-2.json").write_text('[{"query_text": "q", "response_text": "r"}]')
    with pytest.raises(FileError, match=r"epoch-2.json holds a bad rollout 0 \('rewards'"):
        read_run_logs(tmp_path)
