"""Processes of the engine: killed, hung, forked, forgotten. None of it goes unnoticed, and none is left behind."""

import os
import pickle
import shutil
import signal
import time

import pytest
import torch

from tests.engines import forked
from tests.processes import Program, is_running, wait_until
from torchrl_lang._files import FileError
from torchrl_lang.envs.textworld import TextWorldEnv, TextWorldSpec, build_games
from torchrl_lang.envs.textworld import env as text_env
from torchrl_lang.envs.textworld.engine import EnginePool, EngineProcess

from ..helpers import last_words, say
from .conftest import COIN, SPECS, engines, gone, pids_of

pytest.importorskip("textworld", reason="the extra 'textworld' is not installed")


def test_processes_start_late_and_end_on_close(make_env):
    env = make_env(batch_size=[3], workers=2)
    assert pids_of(env.pool) == engines() == []
    env.reset()
    pids = pids_of(env.pool)
    assert sorted(pids) == sorted(engines())
    assert len(pids) == 2
    env.close()
    assert gone(pids, within=0.0)
    env.close()


def test_a_killed_process_is_replaced_and_its_games_go_on(make_env):
    """Killed between turns and before the last one, a game ends as the one that was left alone."""
    calm, env = (make_env(batch_size=[3], workers=2) for _ in range(2))
    calm.reset(), env.reset()
    for turn, command in enumerate(COIN):
        expected = say(calm, *[command] * 3)
        if turn:
            os.kill(pids_of(env.pool)[0], signal.SIGKILL)
            with pytest.warns(UserWarning, match="has died: a new process replaces it"):
                got = say(env, *[command] * 3)
        else:
            got = say(env, *[command] * 3)
        for key in ("tokens", "reward", "done", "terminated", "truncated", "won", "engine_failed"):
            assert torch.equal(got[key], expected[key]), key
    assert got["won"].all()


def test_a_row_whose_command_hangs_is_truncated_and_says_so(make_env, monkeypatch):
    env = make_env(batch_size=[2], workers=1, time_limit=0.5, offers=("invalid", "was_admissible"))
    env.reset()
    with monkeypatch.context() as patch:
        # As if a NUL got past the cleaning.
        patch.setattr(text_env, "clean_command", lambda text: "\x00" if text == "look" else text)
        with pytest.warns(UserWarning, match="did not answer for"):
            td = say(env, "look", "go south")
    assert not any(td[key][0] for key in ("invalid", "was_admissible", "points"))  # of the engine's failure
    assert td["was_admissible"][1]
    assert td["engine_failed"].flatten().tolist() == [True, False]
    assert td["truncated"].flatten().tolist() == [True, False]
    assert not td["terminated"].any()
    assert "The game has stopped answering." in last_words(env, td)
    later = say(env, "go south", "go east")
    assert torch.equal(later["tokens"][0], td["tokens"][0])
    assert "Studio" in last_words(env, later, 1)
    fresh = env.reset(td.select("tokens").set("_reset", torch.tensor([[True], [False]])))
    assert not fresh["engine_failed"].any()
    assert "Spare Room" in last_words(env, say(env, "go south", "look"))


def test_a_file_that_is_no_game_is_an_error(make_env, games, tmp_path):
    broken = tmp_path / "broken.z8"
    broken.write_bytes(b"no game")
    env = make_env()
    env.games = (str(broken),)
    with (
        pytest.warns(UserWarning, match="has died"),
        pytest.raises(FileError, match=r"broken\.z8 cannot be begun by the engine \(its process has died\): delete it"),
    ):
        env.reset()
    env.games = (str(games["coin"]),)
    assert not env.reset()["done"].any()


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "cut": (lambda path: os.truncate(path, 100_000), r"\.z8 is no game"),
    "text": (lambda path: path.write_text("once upon a time " * 9), r"\.z8 is no game"),
    "flipped": (flip_a_bit, r"\.z8 is no game"),
    "no json": (lambda path: path.with_suffix(".json").unlink(), r"\.json is missing"),
    "half json": (lambda path: os.truncate(path.with_suffix(".json"), 1000), r"\.json"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_games_are_refused_before_the_engine_opens_them(damage, games, tokenizer, tmp_path):
    change, message = DAMAGE[damage]
    copy = tmp_path / games["coin"].name
    for path in (games["coin"], games["coin"].with_suffix(".json")):
        shutil.copy(path, tmp_path)
    change(copy)
    with pytest.raises(FileError, match=message):
        TextWorldEnv([games["simple"], copy], tokenizer, row_length=100, action_length=5)


def test_copies_have_processes_of_their_own_and_stand_where_the_game_stands(make_env):
    env = make_env()
    env.reset()
    say(env, "go south")
    copy = pickle.loads(pickle.dumps(env))  # noqa: S301
    assert pids_of(copy.pool) == []
    one, other = say(env, "go east"), say(copy, "go east")
    assert torch.equal(one["tokens"], other["tokens"])
    assert not set(pids_of(env.pool)) & set(pids_of(copy.pool))
    copy.close()
    assert all(map(is_running, pids_of(env.pool)))


def test_a_fork_leaves_the_engines_of_its_parent_alone(make_env):
    env = make_env()
    env.reset()
    before = pids_of(env.pool)
    child = os.fork()
    if child == 0:  # only os._exit from here: the child must not run pytest's or torch's endings
        try:
            moved = "Spare Room" in last_words(env, say(env, "go south"))
            own = not set(pids_of(env.pool)) & set(before)
            env.close()
            os._exit(0 if moved and own else 3)
        except BaseException:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pids_of(env.pool) == before
    assert "Spare Room" in last_words(env, say(env, "go south"))


PLAYS = """
import sys, time
from torchrl_lang.envs.textworld.engine import EnginePool
pool = EnginePool(1)
pool.begin({0: sys.argv[1]})
print(pool._processes[0].process.pid, pool._processes[0].folder)
print("begun", flush=True)
time.sleep(60)
"""


def test_a_process_ends_when_its_parent_is_killed(games):
    parent = Program("-c", PLAYS, games["coin"])
    try:
        parent.wait_for("begun")
        pid, folder, _ = parent.stdout.split()
        assert is_running(int(pid))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert gone([int(pid)])
    wait_until(lambda: not os.path.exists(folder), 5)


def test_rows_are_spread_over_processes_and_answer_as_one_would(games):
    answers = []
    for workers in (1, 2):
        pool = EnginePool(workers, ["admissible_commands"])
        said = [pool.begin({row: str(games["coin" if row % 2 else "simple"]) for row in range(5)})]
        said += [pool.step(dict.fromkeys(range(5), command)) for command in COIN[:2]]
        pool.close()
        answers.append(said)
    assert answers[0] == answers[1]
    assert [answers[0][2][row]["feedback"] for row in (1, 3)] == [answers[0][2][1]["feedback"]] * 2


def test_what_is_there_is_not_built_again(games):
    before = {path: path.stat().st_mtime_ns for path in games.values()}
    start = time.monotonic()
    again = build_games(list(SPECS.values()), games["coin"].parent)
    assert time.monotonic() - start < 0.5
    assert again == list(games.values())
    assert {path: path.stat().st_mtime_ns for path in again} == before
    assert engines() == []


def test_a_game_that_cannot_be_built_is_named(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)not build TextWorldSpec\('coin_collector', seed=0, level=0\).*1-300"):
        build_games([TextWorldSpec("coin_collector", level=0)], tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]
    assert engines() == []


def test_two_build_one_game_in_one_folder_after_one_that_was_killed(games, tmp_path):
    """Where the game can be seen it is whole; nothing half-built is left for those who come later."""
    spec = SPECS["coin"]
    path = tmp_path / f"{spec.name}.z8"
    job = {"path": str(path), "kind": spec.kind, "seed": spec.seed, "options": dict(spec.options)}
    with forked():
        killed, *both = (EngineProcess() for _ in range(3))
    killed.ask([job])
    wait_until(lambda: list(tmp_path.glob(".building-*/*.ni")), 60)
    killed.end()
    assert list(tmp_path.glob(".building-*"))
    assert not path.exists()
    for process in both:
        process.ask([job])
    told = [process.answers(60.0)[0] for process in both]
    for process in both:
        process.end()
    assert sorted(each["built"] for each in told) == [False, True]
    assert build_games([spec, spec], tmp_path) == [path] * 2
    assert path.with_suffix(".json").exists()
    assert not list(tmp_path.glob(".building-*"))
    assert engines() == []
    # The same specification gives the same file, but for the day on which it was compiled, the "serial" of its header.
    assert len({file[:18] + file[24:] for file in (path.read_bytes(), games["coin"].read_bytes())}) == 1
