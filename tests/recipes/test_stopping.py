"""Ctrl-C and SIGTERM, sent to real processes: the next step ends with a checkpoint, and the same command goes on."""

import os
import signal
import threading

import pytest

from tests.processes import Program
from tests.recipes.commands import assert_same_runs
from torchrl_lang.__main__ import main
from torchrl_lang.recipes.stopping import Stopped, stopping
from torchrl_lang.training import Checkpointer

SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--batch-size", "8", "--eval-games", "8", "--log-every", "1"]
OFFLINE = ["--steps", "4", "--eval-every", "3"]
ONLINE = ["--iterations", "3", "--games", "4", "--turns", "1", "--batch-size", "4", "--eval-games", "4"]
ONLINE += ["--eval-every", "3", "--kl-horizon", "16", "--lr", "0.01"]

# Runs the command and sends it a signal within a given call of a function, as a person would at some moment.
SIGNALLED = """
import importlib, os, sys
module, owner, name, call, number = sys.argv[1:6]
sys.argv = ["torchrl_lang", *sys.argv[6:]]
owner = getattr(importlib.import_module(module), owner)
real, calls = getattr(owner, name), 0

def signalled(*arguments, **options):
    global calls
    calls += 1
    if calls == int(call):
        os.kill(os.getpid(), int(number))
    return real(*arguments, **options)

setattr(owner, name, signalled)
from torchrl_lang.__main__ import _run
sys.exit(_run())
"""
IN_A_STEP = ("torchrl_lang.objectives", "BCLoss", "forward")
IN_A_DRAW = ("torchrl_lang.recipes.online_algorithms", "GroupLearner", "draw")
CRITIC = ["--value-steps", "4", "--draws", "8"]
IN_CRITIC = ("torchrl_lang.objectives", "ArCHerLoss", "forward")
IN_SELECTION = ("torchrl_lang.recipes.online_algorithms", "BestGames", "choose")


def train(home, recipe, out, *more):
    offline = recipe in ("bc", "ilql")
    source = ["--data", str(home / "data"), *SMALL, *OFFLINE] if offline else ["--start", str(home / "bc"), *ONLINE]
    return ["train", recipe, "--out", str(out), *source, *more]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "place", "call", "number", "step", "more"),
    [
        ("bc", IN_A_STEP, 1, signal.SIGINT, "step 1", ["--ema-decay", "0.5"]),
        ("grpo", IN_A_DRAW, 2, signal.SIGTERM, "iteration 2", ["--group-size", "2", "--curriculum", "4"]),
        ("rejection", IN_SELECTION, 2, signal.SIGTERM, "iteration 2", ["--best-so-far", "6", "--examples", "0.3"]),
        ("archer", IN_CRITIC, 7, signal.SIGTERM, "iteration 2", [*CRITIC, "--replay", "12"]),
    ],
)
def test_a_stopped_run_ends_with_the_numbers_of_one_that_was_not(
    recipe, place, call, number, step, more, wordle, tmp_path
):
    """One turn an iteration: games go on from iteration to iteration, and over the stop."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    program = Program("-c", SIGNALLED, *place, call, number, *train(wordle, recipe, run, *more))
    try:
        assert program.wait() == 128 + number, program.stderr
    finally:
        program.kill()
    assert "Traceback" not in program.stderr
    said = program.stderr.splitlines()[-1]
    (path,) = (run / "checkpoints").glob(f"step-*{step.split()[1]}")
    assert said == f"torchrl_lang: stopped after {step}, checkpoint {path}; the same command continues from it"
    assert main(train(wordle, recipe, run, *more)) == 0
    assert main(train(wordle, recipe, whole, *more)) == 0
    assert_same_runs(run, whole)


@pytest.mark.slow
def test_a_second_signal_stops_at_once(wordle, tmp_path):
    """The first waits for the end of the step, which does not come."""
    wait = "    print('waiting', flush=True)\n    import time; time.sleep(60)\n"
    waits = SIGNALLED.replace("    return real", f"{wait}    return real")
    program = Program("-c", waits, *IN_A_STEP, 1, signal.SIGINT, *train(wordle, "bc", tmp_path / "run"))
    try:
        program.wait_for("waiting")
        assert "stopping after this step; once more stops at once" in program.stderr
        os.kill(program.pid, signal.SIGINT)
        assert program.wait(30) == 130
    finally:
        program.kill()
    again = "the same command continues from its last checkpoint, or from the beginning"
    assert program.stderr.splitlines()[-1] == f"torchrl_lang: stopped; {again}"
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def ask_to_stop(folder):
    with stopping(Checkpointer(folder), "step") as asked:
        signal.raise_signal(signal.SIGTERM)
        assert not asked()
        signal.raise_signal(signal.SIGINT)
        assert asked()


def test_handlers_come_back_and_ignored_signals_stay_so(tmp_path):
    interrupt = signal.getsignal(signal.SIGINT)  # TorchRL's memory-mapped storages install one
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(Stopped) as stopped:
            ask_to_stop(tmp_path)
        assert stopped.value.number == signal.SIGINT
        assert signal.getsignal(signal.SIGINT) == interrupt
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_a_check_raises_ends_the_loop_at_once(tmp_path):
    def check():
        raise ChildProcessError("a worker has died")

    with stopping(Checkpointer(tmp_path), "step", check=check) as asked:
        with pytest.raises(ChildProcessError):
            signal.raise_signal(signal.SIGINT)
        assert not asked()


def test_other_threads_change_nothing(tmp_path):
    handlers = []

    def work():
        with stopping(Checkpointer(tmp_path), "step") as asked:
            handlers.extend([signal.getsignal(signal.SIGINT), asked()])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT), False]
