"""Evolutionary search over the options of ``train ilql`` with Optuna (extra ``search``); bad runs are stopped early.

Each trial is a run of the recipe in a process of its own, which logs its evaluations to ``log.csv``. This process reads
them, reports them to Optuna, and ends the run if Optuna prunes it: a run may be killed at any time. A genetic algorithm
(NSGA-II) makes the next generation by crossing and mutating the options of the best trials; exchange the sampler for
``TPESampler``, or ``CmaEsSampler`` with the package cmaes. A run that fails ends the search, unless
``study.optimize(catch=RuntimeError)`` continues with the next one.

Population-based training (arXiv 1711.09846), which also changes options during a run, would need more than this:

- all members train at the same time, in turns of some steps, instead of one after the other to the end;
- a bad member continues from the checkpoint of a good one. Checkpoints have all state of a run, the target networks and
  the optimizer included, so copying the folder is enough;
- the copy trains on with changed options. Resuming a run refuses other options than it began with, so that a resumed
  run computes the same numbers. A loop of your own over ``train_steps`` may change them between its steps: the learning
  rate in ``optimizer.param_groups``, and attributes of the loss such as ``loss.expectile``. A learning rate schedule
  that ends after a fixed number of steps must go;
- a change of the model's size, one of AgileRL's mutations, must map the weights and the optimizer's state to the new
  size, which nothing here does.
"""

import csv
import multiprocessing
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import optuna

from torchrl_lang.envs.random_walks.task import RandomWalksData
from torchrl_lang.recipes import algorithms, datasets
from torchrl_lang.recipes.algorithms import ILQL

PROCESSES = multiprocessing.get_context("forkserver")  # imports once, then forks for each run
PROCESSES.set_forkserver_preload(["optuna", "torchrl_lang.recipes.token_values"])
STEPS = {"steps": 120, "eval_every": 40, "eval_games": 256}
SIZES = {"layers": 1, "width": 32, "heads": 2, "batch_size": 32}


def train(options):
    """Train in another process; what the run prints goes to a file beside its folder."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # ends with what a process does at its end
    with options.out.with_suffix(".txt").open("w") as file, redirect_stdout(file), redirect_stderr(file):
        algorithms.train(options)


def evaluations(run, log):
    """Step and mean return of each evaluation, as the log gets them."""
    seen, is_running = 0, True
    while is_running:
        run.join(0.1)
        is_running = run.is_alive()  # before the log is read, so that nothing is missed
        text = log.read_text() if log.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()  # the last line may not be complete
        found = [row for row in csv.DictReader(whole) if row.get("return")]
        for row in found[seen:]:
            yield int(row["step"]), float(row["return"])
        seen = len(found)
    if run.exitcode:
        raise RuntimeError(f"The run of {log.parent} failed: read {log.parent.with_suffix('.txt')}.")


def run_trial(options, trial=None):
    """Mean return of the last evaluation of a run, if the trial is not pruned before."""
    run = PROCESSES.Process(target=train, args=(options,))
    run.start()
    try:
        for step, value in evaluations(run, options.out / "log.csv"):
            if trial is not None:
                trial.report(value, step)
                if trial.should_prune():
                    raise optuna.TrialPruned
    finally:
        run.terminate()
        run.join()
    return value


def search(folder, trials=12):
    """Search, print all trials and the best options, and train with these options and another seed."""
    data = RandomWalksData(out=folder / "data", games=500, nodes=12, max_turns=8)
    task = data.task()
    datasets.main(data)
    shortest, _ = task.evaluate(task.player("shortest").policy, games=256, seed=1)

    def objective(trial):
        chosen = {
            "lr": trial.suggest_float("lr", 2e-4, 2e-2, log=True),
            "expectile": trial.suggest_float("expectile", 0.5, 0.98),
            "cql_weight": trial.suggest_float("cql_weight", 1e-3, 1.0, log=True),
            "beta": trial.suggest_float("beta", 0.1, 16.0, log=True),
        }
        out = folder / f"trial_{trial.number}"
        return run_trial(ILQL.for_task(task, data=data.out, out=out, **STEPS, **SIZES, **chosen), trial)

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.NSGAIISampler(population_size=4, mutation_prob=0.5, seed=0)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=4)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    study.optimize(objective, n_trials=trials)

    print("trial  state     step  return  options")
    for trial in study.trials:
        step = trial.last_step
        options = ", ".join(f"{name}={value:.2g}" for name, value in trial.params.items())
        print(f"{trial.number:5d}  {trial.state.name:8}  {step:4d}  {trial.intermediate_values[step]:6.2f}  {options}")
    found = f"best: trial {study.best_trial.number}, return {study.best_value:.2f}"
    print(f"{found}; shortest paths {shortest.mean_return:.2f}")
    # The best of many noisy numbers is too high: a run with another seed shows what the options are worth.
    again = ILQL.for_task(task, data=data.out, out=folder / "again", seed=1, **STEPS, **SIZES, **study.best_params)
    print(f"the same options with another seed: return {run_trial(again):.2f}")


if __name__ == "__main__":  # the runs' processes import this file
    with TemporaryDirectory() as folder:
        search(Path(folder))
