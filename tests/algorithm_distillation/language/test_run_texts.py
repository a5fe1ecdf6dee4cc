"""Recorded runs as blocks: turns or episodes, packed as whole episodes, split without an episode in two parts."""

import random
from collections import Counter

import pytest

from torchrl_lang.algorithm_distillation import run_records
from torchrl_lang.algorithm_distillation.language import (
    Block,
    BlockTemplate,
    Levels,
    TextHistory,
    group_episodes,
    in_epoch_order,
    pack_blocks,
    read_blocks,
    read_text_history,
    run_texts,
    split_texts,
    write_text_history,
)
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows, word_tokenizer

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
                    records.append(TextHistory(query=name, response="x" * draw.randrange(9), rewards=(0.5,), **more))
    return records


def episode_of(record):
    return record.run, record.epoch, record.episode


# -- blocks of turns and of episodes -----------------------------------------------------------------------------------


def test_a_block_for_each_turn():
    texts = run_texts(recorded())
    expected = [("ab", "c", 1.0, 0), ("f", "ba", -0.5, 0), ("", "e", 0.25, 1)]
    assert [(each.query, each.response, each.reward, each.episode) for each in texts] == expected * 2
    assert [each.epoch for each in texts] == [1, 1, 1, 2, 2, 2]
    control = LETTERS.control
    assert texts[1].query_tokens == (5, control.end_of_state)
    assert texts[1].response_tokens == (1, 0, control.end_of_action)


def test_a_block_for_each_episode_has_its_return():
    texts = run_texts(recorded(), "episode")
    expected = [("ab\nc\nf", "ba", 0.5, 1), ("", "e", 0.25, 1), ("ab\nc\nf", "ba", 0.5, 2), ("", "e", 0.25, 2)]
    assert [(each.query, each.response, each.reward, each.epoch) for each in texts] == expected
    assert len(group_episodes(texts)) == 4
    with pytest.raises(ValueError, match="block_of='game' is unknown"):
        run_texts([], "game")


def test_a_return_has_the_fewest_digits():
    """A sum in float64 would be 0.30000000000000004, another answer than 0.3."""
    turns = [Turn("a"), Turn("b", reward=0.1), Turn("c"), Turn("d", reward=0.2)]
    whole = [Turn("a"), Turn("b", reward=0.3)]
    rows = to_rows([Episode(each, terminated=True) for each in (turns, whole)], LETTERS, 16)
    texts = run_texts(list(run_records(rows, LETTERS, epoch=1, run="ppo")), "episode")
    assert [each.reward for each in texts] == [0.3, 0.3]


def test_episodes_are_written_to_files_and_read(tmp_path):
    write_text_history(tmp_path / "history.jsonl", run_texts(recorded()))
    assert read_text_history(tmp_path / "history.jsonl") == (run_texts(recorded()), [])
    with pytest.raises(ValueError, match="episode=-1"):
        TextHistory(query="", response="", rewards=(0,), episode=-1)


def test_records_without_an_episode_are_one_each():
    records = [TextHistory(query="", response="", rewards=(0,))] * 3
    assert [len(episode) for episode in group_episodes(records)] == [1, 1, 1]
    assert sum(map(len, group_episodes(many()))) == len(many())


# -- packing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_length", [150, 200, 500])
def test_rows_hold_whole_episodes_in_the_order_of_epochs(row_length):
    records, template = many(), BlockTemplate()
    tokenizer = word_tokenizer([], symbols=template.vocabulary())
    length = {
        episode_of(episode[0]): sum(
            len(tokenizer.encode(piece.text))
            for each in episode
            for piece in template.segments(Block(each.query, each.response, each.reward))
        )
        for episode in group_episodes(records)
    }
    expected, used = [], 0  # a plain loop over episodes
    for run in in_epoch_order(records):
        used = row_length
        for episode in group_episodes(run):
            size = length[episode_of(episode[0])]
            if size + 1 > row_length:
                continue
            if used + size > row_length:
                expected, used = [*expected, []], 1
            expected[-1] += [each.query for each in episode]
            used += size
    if max(length.values()) >= row_length:
        with pytest.warns(UserWarning, match="blocks are of episodes longer than"):
            packed = pack_blocks(records, template, tokenizer, row_length)
    else:
        packed = pack_blocks(records, template, tokenizer, row_length)
    found = [[block.query for block in read_blocks(row, template, tokenizer)] for row in packed.rows]
    assert found == expected
    whole = Counter(map(episode_of, records))
    assert all(whole[episode_of(each)] == Counter(map(episode_of, packed.left_out))[episode_of(each)]
               for each in packed.left_out)  # fmt: skip
    assert sum(map(len, found)) + len(packed.left_out) == len(records)


def test_records_of_several_environments_by_turns_are_whole_episodes():
    """Which step together, so that the episodes of a log take turns."""
    records, template = many(), BlockTemplate()
    tokenizer = word_tokenizer([], symbols=template.vocabulary())
    mixed = sorted(records, key=lambda record: int(record.query.split()[-1]))
    found = pack_blocks(mixed, template, tokenizer, 500)
    assert (found.rows == pack_blocks(records, template, tokenizer, 500).rows).all()
    assert split_texts(mixed) == split_texts(records)


def test_episodes_with_lines_of_the_template_are_left_out_whole():
    template = BlockTemplate()
    tokenizer = word_tokenizer([], symbols=[*template.vocabulary(), "\n"])
    records = many(epochs=2)
    forged = TextHistory(query="q\nCompletion: r", response="x", rewards=(0.5,), run="a", epoch=1, episode=99)
    beside = TextHistory(query="before", response="x", rewards=(0.5,), run="a", epoch=1, episode=99)
    message = rf"2 of {len(records) + 2} blocks .* lines of the template.* the first is that of the prompt 'before'"
    with pytest.warns(UserWarning, match=message):
        rows, left_out = pack_blocks([*records, beside, forged], template, tokenizer, 500)
    assert left_out == [beside, forged]
    assert (rows == pack_blocks(records, template, tokenizer, 500).rows).all()
    with pytest.raises(ValueError, match=r"No episode of 1 blocks .* lines of the template"):
        pack_blocks([forged], template, tokenizer, 500)
    with pytest.raises(ValueError, match=r"has no word for 0\.5"):  # no reason to leave an episode out
        pack_blocks([forged], BlockTemplate(Levels([0, 1])), tokenizer, 500)


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
        TextHistory(query=f"{epoch} {number}", response="", rewards=(0,), epoch=epoch)
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
        records = [TextHistory(query=f"{number}", response="", rewards=(0,), epoch=epoch) for epoch, number in places]
        assert all(split_texts(records))


def test_the_split_is_that_of_its_seed():
    assert split_texts(many(), seed=1) == split_texts(many(), seed=1)
    assert split_texts(many(), seed=1).test != split_texts(many(), seed=2).test


def test_held_out_episodes_are_from_anywhere_in_an_epoch():
    """Recorded runs have the episodes of an epoch by their beginning, so the last ones are short."""
    records = [
        TextHistory(query="", response="", rewards=(0,), epoch=epoch, run="a", episode=number)
        for epoch in range(200)
        for number in range(10)
    ]
    held_out = [record.episode for record in split_texts(records).test]
    assert len(held_out) == 200
    assert 3.5 < sum(held_out) / 200 < 5.5


def test_whole_runs_are_held_out():
    records = many(runs=("a", "b", "c"))
    split = split_texts(records, test_runs=["b"])
    assert {record.run for record in split.test} == {"b"}
    assert {record.run for record in [*split.train, *split.validation]} == {"a", "c"}
    assert sorted(each.query for part in split for each in part) == sorted(each.query for each in records)


def test_impossible_splits_raise():
    records = many()
    with pytest.raises(ValueError, match=r"There is no run \['c'\]: the runs are \['a', 'b'\]"):
        split_texts(records, test_runs=["c"])
    with pytest.raises(ValueError, match=r"validation must lie in \[0, 1\], got 2"):
        split_texts(records, validation=2)
    with pytest.raises(ValueError, match="No episode is left for train"):
        split_texts(records, test_runs=["a", "b"])
    with pytest.raises(ValueError, match=r"No episode is left for train with validation=0\.5, test=0\.5"):
        split_texts(records, validation=0.5, test=0.5)
    two = [TextHistory(query="", response="", rewards=(0,), epoch=epoch) for epoch in range(2)]
    with pytest.raises(ValueError, match="No episode is left for train"):
        split_texts(two)
