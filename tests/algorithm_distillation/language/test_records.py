"""Records of text tasks: of recorded runs and logs, of turns or episodes, and split without an episode in two parts."""

import json
import random
import shutil
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torchrl.collectors import Collector

from tests.algorithm_distillation.language.examples import LETTERS
from tests.data.chat_templates import EXACT, tokenizer_of
from tests.envs.helpers import PROMPTS, prompt_env
from tests.kills import kills
from torchrl_lang._files import FileError
from torchrl_lang.algorithm_distillation.language import RunRecorder, TextRecord, read_run, read_run_logs, split_texts
from torchrl_lang.algorithm_distillation.language.records import (
    episode_records,
    group_episodes,
    in_epoch_order,
    read_text_records,
    to_lines,
)
from torchrl_lang.algorithm_distillation.language.run_recorder import run_records
from torchrl_lang.data import EpisodeRows, rows_from_rollout
from torchrl_lang.envs import WordleEnv
from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor, row_log_prob
from torchrl_lang.text import ChatTokenizer, Episode, RowFormat, Turn, to_rows


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


def test_a_block_for_each_episode_has_its_return(rows):
    """With the fewest digits: a sum in float64 would be 0.30000000000000004, another answer than 0.3."""
    texts = episode_records([record for n in (1, 2) for record in run_records(rows, LETTERS, epoch=n, run="ppo")])
    expected = [("ab\nc\nf", "ba", 0.5, 1), ("", "e", 0.25, 1), ("ab\nc\nf", "ba", 0.5, 2), ("", "e", 0.25, 2)]
    assert [(each.query, each.response, each.reward, each.epoch) for each in texts] == expected
    assert len(group_episodes(texts)) == 4
    assert [len(episode) for episode in group_episodes([TextRecord(query="", response="", reward=0.0)] * 3)] == [1] * 3
    turns = [Turn("a"), Turn("b", reward=0.1), Turn("c"), Turn("d", reward=0.2)]
    whole = [Turn("a"), Turn("b", reward=0.3)]
    rows = to_rows([Episode(each, terminated=True) for each in (turns, whole)], LETTERS, 16)
    texts = episode_records(list(run_records(rows, LETTERS, epoch=1, run="ppo")))
    assert [each.reward for each in texts] == [0.3, 0.3]


@pytest.mark.parametrize("seed", range(5))
def test_no_episode_is_in_two_parts_and_none_is_lost(seed):
    records = many(seed)
    split = split_texts(records, validation=0.2, test=0.3, seed=seed)
    parts = [{(record.run, record.epoch, record.episode) for record in part} for part in split]
    assert sum(map(len, parts)) == len(set.union(*parts))
    assert sorted(each.query for part in split for each in part) == sorted(each.query for each in records)
    episodes = Counter(place[:2] for place in set.union(*parts))
    for run_and_epoch, number in episodes.items():
        held_out = [sum(place[:2] == run_and_epoch for place in part) for part in parts]
        assert held_out[0]
        for found, wanted in zip(held_out[1:], (0.2 * number, 0.3 * number), strict=True):
            assert found == round(wanted) if wanted >= 1 else found <= 1
    for part in split:
        assert [record for run in in_epoch_order(part) for record in run] == part
        turns = [int(record.query.split()[-1]) for record in part]
        assert all(turn == 0 or turn == before + 1 for before, turn in zip([-1, *turns], turns, strict=False))


def alone(sizes):
    """Episodes of one record, in epochs of these sizes."""
    places = [(epoch, number) for epoch, size in enumerate(sizes) for number in range(size)]
    return [
        TextRecord(query=f"{epoch} {number}", response="", reward=0.0, epoch=epoch, episode=number)
        for epoch, number in places
    ]


@pytest.mark.parametrize(("size", "epochs"), [(1, 60), (2, 60), (3, 40), (4, 40), (7, 20)])
@pytest.mark.parametrize(("validation", "test"), [(0, 0), (0.1, 0.1), (0.05, 0.2), (0.25, 0.25)])
def test_small_epochs_are_split_over_the_run(size, epochs, validation, test):
    records = alone([size] * epochs)
    parts = split_texts(records, validation=validation, test=test)
    assert sorted(each.query for part in parts for each in part) == sorted(each.query for each in records)
    for part, share in ((parts.validation, validation), (parts.test, test)):
        if share * size < 1:
            assert abs(len(part) - share * len(records)) <= 1
            quarters = Counter(4 * each.epoch // epochs for each in part)
            assert max(quarters.values()) - min(quarters[number] for number in range(4)) <= 1
    trained = Counter(each.epoch for each in parts.train)
    assert size == 1 or len(trained) == epochs


def test_held_out_episodes_are_from_anywhere_in_an_epoch():
    """Recorded runs have the episodes of an epoch by their beginning, so the last ones are short."""
    held_out = [record.episode for record in split_texts(alone([10] * 200)).test]
    assert len(held_out) == 200
    assert 3.5 < sum(held_out) / 200 < 5.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test_runs": ["c"]}, r"There is no run \['c'\]: the runs are \['a', 'b'\]"),
        ({"test_runs": ["a", "b"]}, "No episode is left for a part"),
        ({"validation": -0.1}, r"No episode is left for a part with validation=-0\.1"),
        ({"validation": 0.5, "test": 0.5}, r"No episode is left for a part with validation=0\.5, test=0\.5"),
    ],
)
def test_impossible_splits_raise(options, message):
    with pytest.raises(ValueError, match=message):
        split_texts(many(), **options)


@pytest.mark.parametrize("sizes", [[1, 1], [3], [1, 1, 1], [2, 2], [4]])
def test_a_short_run_has_an_episode_in_each_part(sizes):
    with pytest.raises(ValueError, match="No episode is left for a part") if sizes == [1, 1] else nullcontext():
        assert all(split_texts(alone(sizes)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": 3}, "query"),
        ({"reward": "a"}, "reward"),
        ({"epoch": -1}, "epoch"),
        ({"response_tokens": [1], "log_probs": [-1, -2]}, "2 log_probs for 1"),
        ({"rewards": [1]}, "rewards"),
    ],
)
def test_records_are_read_as_they_were_written_and_bad_ones_name_the_line(tmp_path, change, message):
    path = tmp_path / "records.jsonl"
    good = {"query": "é\u2028", "response": '"', "reward": 1 / 3, "response_tokens": (3,), "log_probs": (-0.1,)}
    path.write_text(to_lines([TextRecord(**good)] * 2), encoding="utf-8")
    assert read_text_records(path) == [TextRecord(**good)] * 2
    path.write_text("\n".join(json.dumps(each) for each in (good, {**good, **change})))
    with pytest.raises(FileError, match=rf"no record on line 2 \(.*{message}"):
        read_text_records(path)


def write_padded(folder, **change):
    """A rollout whose completion ended before the longest of its batch; 50 ends it and pads it."""
    padded = {"query_tensor": [10, 11], "response_tensor": [20, 21, 50, 50, 50, 50], "query_text": "q"}
    padded |= {"logprobs": [-0.1, -0.2, -0.3], "values": [0.0, 0.0, 0.0], "rewards": [-0.01, -0.02, 0.9]}
    write_run(folder, "run-a", {})
    (folder / "run-a" / "epoch-1.json").write_text(json.dumps([{**padded, **change}]))


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


def write_run(folder, name, epochs):
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps({"lr": 1e-4, "name": name}))
    for number, rollouts in epochs.items():
        one = {"response_tensor": [7, 8], "logprobs": [-1.0, -2.0], "values": [0.0, 0.0], "rewards": [-0.01, 0.5]}
        one |= {"response_text": f"{name} {number}"}
        content = [{**one, "query_tensor": [place], "query_text": f"q{place}"} for place in range(rollouts)]
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


def actor(env, **options):
    lm = causal_lm(vocab_size=env.tokenizer.vocab_size, layers=1, width=16, heads=2, max_length=env.row_length)
    return UtteranceActor(language_actor(lm), env.tokenizer.control, env.action_length, seed=0, **options)


def records_of(rows, tokenizer):
    return list(run_records(rows, tokenizer, epoch=3, run="ppo"))


def test_the_records_are_the_steps_of_the_rollout():
    torch.manual_seed(0)
    env = WordleEnv(["crane", "slate", "purge", "mouse"], batch_size=[6], seed=0)
    policy = actor(env)
    rollout = env.rollout(14, policy, break_when_any_done=False)
    rows = rows_from_rollout(rollout, unfinished="drop", carry=["token_log_prob"])
    records, end = records_of(rows, env.tokenizer), env.tokenizer.control.end_of_action
    expected, episode = [], 0
    for game in rollout.unbind(0):  # steps of the policy, in plain loops
        before, turn, waiting = 0, 0, []
        for step in game.unbind(0):
            action = step["action"].tolist()
            length = action.index(end) + 1 if end in action else len(action)
            begins = int(step["attention_mask"].sum())
            tokens = step["next", "tokens"].tolist()
            query, before = tokens[before:begins], begins + length
            log_probs = step["token_log_prob"][:length].tolist()
            waiting.append((query, action[:length], step["next", "reward"].item(), log_probs, episode, turn))
            turn += 1
            if step["next", "done"]:
                expected, waiting, before, turn, episode = expected + waiting, [], 0, 0, episode + 1
    assert episode == len(rows) > 6
    found = [
        (list(r.query_tokens), list(r.response_tokens), r.reward, list(r.log_probs), r.episode, r.turn) for r in records
    ]
    assert found == expected
    assert {(record.epoch, record.run) for record in records} == {(3, "ppo")}
    again = row_log_prob(policy, rows).detach()
    for number, row in enumerate(rows.unbind(0)):
        of_row = [record for record in records if record.episode == number]
        known = torch.tensor([value for record in of_row for value in record.log_probs])
        torch.testing.assert_close(known, again[number][row["agent_mask"]], atol=1e-5, rtol=1e-5)


def test_turns_by_hand(rows):
    control = LETTERS.control
    begin, end = control.begin_state, control.end_of_state
    found = [(r.query, r.response, r.reward, r.episode, r.turn, r.query_tokens) for r in records_of(rows, LETTERS)]
    assert found == [
        ("ab", "c", 1.0, 0, 0, (begin, 0, 1, end)),
        ("f", "ba", -0.5, 0, 1, (5, end)),
        ("", "e", 0.25, 1, 0, (control.begin_action,)),
    ]
    first = records_of(rows, LETTERS)[0]
    assert (first.response_tokens, first.log_probs) == ((2, control.end_of_action), ())  # the rows have none


def test_turns_of_another_player_have_no_log_probs(rows):
    rows["token_log_prob"] = torch.where(rows["agent_mask"], torch.arange(16.0) - 20, 0.0)
    rows["train_mask"] = rows["agent_mask"].clone()
    rows["train_mask"][0, 4:6] = False  # the first response
    assert [record.log_probs for record in records_of(rows, LETTERS)] == [(), (-12.0, -11.0, -10.0), (-19.0, -18.0)]


def test_prompts_and_completions_of_a_chat():
    torch.manual_seed(0)
    source = tokenizer_of(EXACT["chatml"])
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source, system="Complete."))
    env = prompt_env([5], tokenizer=tokenizer, row_length=80)
    collector = Collector(env, actor(env), frames_per_batch=40, total_frames=40, auto_register_policy_transforms=False)
    rows_of = EpisodeRows(["token_log_prob"])
    rows = torch.cat([rows_of(steps) for steps in collector])
    records = records_of(rows, tokenizer)
    assert [record.episode for record in records] == list(range(40))
    assert {record.turn for record in records} == {0}
    assert {record.query.removeprefix("Complete.\n") for record in records} == set(PROMPTS)
    for record, row in zip(records, rows.unbind(0), strict=True):
        prompt = record.query.removeprefix("Complete.\n")
        assert record.reward == row["token_reward"].sum() == len(prompt) + 0.5 * len(record.response)
        tokens = record.query_tokens + record.response_tokens
        assert row["tokens"][: len(tokens)].tolist() == list(tokens)
        assert row["agent_mask"].nonzero().flatten().tolist() == list(range(len(record.query_tokens), len(tokens)))
        assert len(record.log_probs) == len(record.response_tokens)


def test_responses_that_were_cut_off():
    """The environment ends them: its token is not the agent's."""
    env = prompt_env([5], tokenizer=LETTERS, action_length=2)
    td = env.reset(game_seed=torch.tensor([0, 1, 2, 3, 3]))
    steps = env.step(td.set("action", torch.tensor([[0, 1]]).expand(5, 2)))
    rows = rows_from_rollout(steps.unsqueeze(1), unfinished="drop")
    records = records_of(rows, LETTERS)
    assert [(record.query, record.response, record.response_tokens) for record in records] == [
        (prompt, "ab", (0, 1)) for prompt in ["ab", "c", "", "fade", "fade"]
    ]


EPOCHS = ["epoch-000001.jsonl", "epoch-000002.jsonl"]


def write(home, rows, epochs=(1, 2), **options):
    with RunRecorder(home, "ppo", LETTERS, **{"config": {"seed": 0, "out": home}, **options}) as recorder:
        recorder.rewind(epochs[0] - 1)
        for epoch in epochs:
            recorder.record(epoch, rows[: 3 - epoch])
    return home / "run-ppo"


def test_a_recorded_run_is_read_again_and_records_nothing_twice_when_resumed(tmp_path, rows):
    folder = write(tmp_path, rows)
    for _ in range(2):
        assert {path.name for path in folder.iterdir()} == {*EPOCHS, "manifest.json"}
        assert json.loads((folder / "manifest.json").read_text())["config"] == {"seed": 0, "out": str(tmp_path)}
        first, second = (run_records(rows[: 3 - n], LETTERS, epoch=n, run="ppo") for n in (1, 2))
        assert read_run(folder) == [*first, *second]
        write(tmp_path, rows, (2,))  # its checkpoint was that of epoch 1
    with RunRecorder(tmp_path, "ppo", LETTERS, config={"seed": 0, "out": "c"}, free=["out"]) as recorder:
        recorder.rewind(1)
    assert [record.epoch for record in read_run(folder)] == [1, 1, 1]
    assert not (folder / "epoch-000002.jsonl").exists()


def test_a_run_in_another_folder_may_continue_but_not_begin_again(tmp_path, rows):
    def recorder_of(out):
        return RunRecorder(tmp_path / "home", "ppo", LETTERS, config={}, out=tmp_path / out)

    folder = write(tmp_path / "home", rows, config={}, out=tmp_path / "x")
    before = read_run(folder)
    with recorder_of("y") as recorder:
        message = rf"{folder} has epochs 1 to 2 of the run in {tmp_path / 'x'}, .* --out or --record-history"
        with pytest.raises(ValueError, match=message):
            recorder.rewind(0)
        assert read_run(folder) == before
        recorder.rewind(1)
    with recorder_of("x") as recorder, pytest.raises(ValueError, match=f"epochs 1 to 1 of the run in {tmp_path / 'y'}"):
        recorder.rewind(0)
    with recorder_of("x/../y") as recorder:
        recorder.rewind(0)
    with recorder_of("z") as recorder:
        recorder.rewind(0)  # nothing was recorded
        recorder.record(1, rows)
    assert {record.epoch for record in read_run(folder)} == {1}


@pytest.mark.slow
def test_a_recorder_that_is_killed_at_any_step_can_be_resumed(tmp_path, rows):
    expected, found = read_run(write(tmp_path / "whole", rows, (1,), config={})), set()
    for _ in kills(lambda: write(tmp_path / "killed", rows, (1,), config={})):
        folder = tmp_path / "killed" / "run-ppo"
        if (folder / "manifest.json").exists():
            partial = read_run(folder)
            found.add(len(partial))
            assert partial == expected[: len(partial)]
        assert read_run(write(tmp_path / "killed", rows, (1,), config={})) == expected
        shutil.rmtree(tmp_path / "killed")
    assert found == {0, 3}


def test_other_runs_and_epochs_are_refused(tmp_path, rows):
    folder = write(tmp_path, rows)
    with (
        pytest.raises(ValueError, match=r"run-ppo holds the history of a run with other \['seed'\]"),
        RunRecorder(tmp_path, "ppo", LETTERS, config={"seed": 1, "out": tmp_path}),
    ):
        pass
    with RunRecorder(tmp_path, "ppo", LETTERS, config={"seed": 0, "out": tmp_path}) as recorder:
        with pytest.raises(ValueError, match=r"Epoch 3 of .* is the next, got 2: call rewind\(\)"):
            recorder.record(2, rows)
        with pytest.raises(ValueError, match=r"continues after epoch 3, but .* up to epoch 2 only"):
            recorder.rewind(3)
        with pytest.raises(FileExistsError, match="Another process records in"), recorder:
            pass
    assert len(read_run(folder)) == 5
    (tmp_path / "run-notes").mkdir()
    (tmp_path / "run-notes" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty"), RunRecorder(tmp_path, "notes", LETTERS, config={}):
        pass
    with pytest.raises(ValueError, match="one part of a path, got 'a/b'"):
        RunRecorder(tmp_path, "a/b", LETTERS, config={})


@pytest.mark.parametrize("name", ["epoch-000001.jsonl", "manifest.json"])
def test_changed_files_are_found(tmp_path, rows, name):
    path = write(tmp_path, rows) / name
    text = path.read_text()
    place = next(at for at, letter in enumerate(text) if letter.isdigit() and letter != "9")
    path.write_text(text[:place] + str(int(text[place]) + 1) + text[place + 1 :])
    with pytest.raises(FileError, match=r"differs from what|was changed after|this release reads"):
        read_run(path.parent)
    path.write_text(text[: text.rindex("\n", 0, -1) + 1])
    with pytest.raises(FileError, match=r"differs from what|is not valid JSON"):
        read_run(path.parent)
    path.unlink()
    with pytest.raises(FileError, match=f"{name} is missing"):
        read_run(path.parent)
