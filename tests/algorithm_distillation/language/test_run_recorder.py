"""Recorded runs: the records are what was played, no epoch is recorded twice, and damage is found."""

import json
import shutil

import pytest
import torch
from torchrl.collectors import Collector

from tests.data.chat_templates import EXACT, tokenizer_of
from tests.kills import kills
from torchrl_lang._files import FileError
from torchrl_lang.algorithm_distillation.language import RunRecorder, read_run
from torchrl_lang.algorithm_distillation.language.run_recorder import run_records
from torchrl_lang.data import EpisodeRows, rows_from_rollout
from torchrl_lang.envs import PromptEnv, WordleEnv
from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor, row_log_prob
from torchrl_lang.text import CharTokenizer, ChatTokenizer, Episode, RowFormat, Turn, to_rows

LETTERS = CharTokenizer.from_alphabet("abcdef")
PROMPTS = ["ab", "c", "", "fade"]


def actor(env, **options):
    lm = causal_lm(vocab_size=env.tokenizer.vocab_size, layers=1, width=16, heads=2, max_length=env.row_length)
    return UtteranceActor(language_actor(lm), env.tokenizer.control, env.action_length, seed=0, **options)


def prompt_env(tokenizer=LETTERS, **options):
    def reward(prompts, completions):
        return [len(prompt) + 0.5 * len(completion) for prompt, completion in zip(prompts, completions, strict=True)]

    options = {"row_length": 16, "action_length": 4, "batch_size": [5], "seed": 0, **options}
    return PromptEnv(PROMPTS, reward, tokenizer, **options)


def records_of(rows, tokenizer):
    return list(run_records(rows, tokenizer, epoch=3, run="ppo"))


@pytest.fixture
def rows():
    episodes = [
        Episode([Turn("ab"), Turn("c", reward=1.0), Turn("f"), Turn("ba", reward=-0.5), Turn("d")], terminated=True),
        Episode([Turn("e", reward=0.25)], terminated=True),
    ]
    return to_rows(episodes, LETTERS, 16)


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
    first, second, third = records_of(rows, LETTERS)
    assert (first.query, first.response, first.reward, first.episode, first.turn) == ("ab", "c", 1.0, 0, 0)
    assert first.query_tokens == (control.begin_state, 0, 1, control.end_of_state)
    assert first.response_tokens == (2, control.end_of_action)
    assert first.log_probs == ()  # the rows have none
    assert (second.query, second.response, second.reward, second.episode, second.turn) == ("f", "ba", -0.5, 0, 1)
    assert second.query_tokens == (5, control.end_of_state)
    assert (third.query, third.response, third.reward, third.episode, third.turn) == ("", "e", 0.25, 1, 0)
    assert third.query_tokens == (control.begin_action,)


def test_turns_of_another_player_have_no_log_probs(rows):
    rows["token_log_prob"] = torch.where(rows["agent_mask"], torch.arange(16.0) - 20, 0.0)
    rows["train_mask"] = rows["agent_mask"].clone()
    rows["train_mask"][0, 4:6] = False  # the first response
    assert [record.log_probs for record in records_of(rows, LETTERS)] == [(), (-12.0, -11.0, -10.0), (-19.0, -18.0)]


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_and_completions(chat):
    torch.manual_seed(0)
    tokenizer = LETTERS
    if chat:
        source = tokenizer_of(EXACT["chatml"])
        tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source, system="Complete."))
    env = prompt_env(tokenizer, row_length=80 if chat else 16)
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
    env = prompt_env(action_length=2)
    td = env.reset(game_seed=torch.tensor([0, 1, 2, 3, 3]))
    steps = env.step(td.set("action", torch.tensor([[0, 1]]).expand(5, 2)))
    rows = rows_from_rollout(steps.unsqueeze(1), unfinished="drop")
    records = records_of(rows, LETTERS)
    assert [(record.query, record.response, record.response_tokens) for record in records] == [
        (prompt, "ab", (0, 1)) for prompt in ["ab", "c", "", "fade", "fade"]
    ]


def write(home, rows, epochs=(1, 2), **options):
    with RunRecorder(home, "ppo", LETTERS, **{"config": {"seed": 0, "out": home}, **options}) as recorder:
        recorder.rewind(epochs[0] - 1)
        for epoch in epochs:
            recorder.record(epoch, rows[: 3 - epoch])
    return home / "run-ppo"


def test_a_recorded_run_is_read_again(tmp_path, rows):
    folder = write(tmp_path, rows)
    assert sorted(path.name for path in folder.iterdir()) == [
        "epoch-000001.jsonl",
        "epoch-000002.jsonl",
        "manifest.json",
    ]
    assert json.loads((folder / "manifest.json").read_text())["config"] == {"seed": 0, "out": str(tmp_path)}
    expected = [*run_records(rows, LETTERS, epoch=1, run="ppo"), *run_records(rows[:1], LETTERS, epoch=2, run="ppo")]
    assert read_run(folder) == expected


def test_a_resumed_run_records_nothing_twice(tmp_path, rows):
    folder = write(tmp_path / "a", rows, (1, 2))
    write(tmp_path / "a", rows, (2,))  # its checkpoint was that of epoch 1
    other = write(tmp_path / "b", rows, (1, 2))
    for path in folder.glob("epoch-*"):
        assert path.read_bytes() == (other / path.name).read_bytes()
    assert read_run(folder) == read_run(other)
    with RunRecorder(tmp_path / "a", "ppo", LETTERS, config={"seed": 0, "out": "c"}, free=["out"]) as recorder:
        recorder.rewind(1)
    assert [record.epoch for record in read_run(folder)] == [1, 1, 1]
    assert not (folder / "epoch-000002.jsonl").exists()


def test_a_run_in_another_folder_may_continue_but_not_begin_again(tmp_path, rows):
    home, folder = tmp_path / "home", write(tmp_path / "home", rows, config={}, out=tmp_path / "x" / "ppo")
    before, moved = read_run(folder), tmp_path / "y" / "ppo"
    with RunRecorder(home, "ppo", LETTERS, config={}, out=moved) as recorder:
        message = rf"{folder} has epochs 1 to 2 of the run in {tmp_path / 'x' / 'ppo'}, .* --out or --record-history"
        with pytest.raises(ValueError, match=message):
            recorder.rewind(0)
        assert read_run(folder) == before
        recorder.rewind(1)
    with (
        RunRecorder(home, "ppo", LETTERS, config={}, out=tmp_path / "x" / "ppo") as recorder,
        pytest.raises(ValueError, match=f"epochs 1 to 1 of the run in {moved}"),
    ):
        recorder.rewind(0)
    with RunRecorder(home, "ppo", LETTERS, config={}, out=tmp_path / "x" / ".." / "y" / "ppo") as recorder:
        recorder.rewind(0)
    with RunRecorder(home, "ppo", LETTERS, config={}, out=tmp_path / "z") as recorder:
        recorder.rewind(0)  # nothing was recorded
        recorder.record(1, rows)
    assert {record.epoch for record in read_run(folder)} == {1}


@pytest.mark.slow
def test_a_recorder_that_is_killed_at_any_step_can_be_resumed(tmp_path, rows):
    expected, found = read_run(write(tmp_path / "whole", rows, (1, 2), config={})), set()
    for _ in kills(lambda: write(tmp_path / "killed", rows, (1, 2), config={})):
        folder = tmp_path / "killed" / "run-ppo"
        if (folder / "manifest.json").exists():
            partial = read_run(folder)
            found.add(len(partial))
            assert partial == expected[: len(partial)]
        assert read_run(write(tmp_path / "killed", rows, (1, 2), config={})) == expected
        shutil.rmtree(tmp_path / "killed")
    assert found == {0, 3, 5}


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


def test_missing_files(tmp_path, rows):
    folder = write(tmp_path, rows)
    for name in ("epoch-000001.jsonl", "manifest.json"):
        (folder / name).unlink()
        with pytest.raises(FileError, match=f"{name} is missing"):
            read_run(folder)
