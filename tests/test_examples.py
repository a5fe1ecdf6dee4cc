"""Every example runs and ends by showing something; those that learn for long learn for three steps here."""

from pathlib import Path

import pytest

from . import processes

pytestmark = pytest.mark.slow

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
SHORTER = {
    "asymmetric_critic.py": {
        "steps=200": "steps=3",
        "ITERATIONS, GAMES, TRIES = 30, 128, 4": "ITERATIONS, GAMES, TRIES = 2, 16, 4",
        "ITERATIONS, 10)": "ITERATIONS, 1)",
        "first + 10]": "first + 1]",
    },
    "chat_model.py": {
        "words=150_000": "words=17_000",  # tied values all the same
        "tokenizer, 64, seed=0": "tokenizer, 8, seed=0",
        "), 12)": "), 2)",
        "steps=150": "steps=2",
        "32, seed=1": "4, seed=1",
        "games=64": "games=4",
        "policy, 15)": "policy, 1)",
        "tokenizer, 32, seed=2": "tokenizer, 4, seed=2",
        "steps=4,": "steps=1,",
        "row_buffer(rows, 16": "row_buffer(rows, 4",
        # In the same process: importing everything anew takes seconds.
        'subprocess.run([sys.executable, __file__, "online"], check=True)': "sys.argv.append('online')\n"
        "        __import__('runpy').run_path(__file__, run_name='__main__')",
    },
    "collector_loop.py": {"64 * 12": "8 * 12", "64 * 36": "8 * 36", "batch_size=[64]": "batch_size=[8]"},
    "grpo_wordle.py": {"steps=150": "steps=3", "range(19)": "range(3)", "% 6": "% 1"},
    "gymnasium_histories.py": {"LIMIT = 4000": "LIMIT = 300", "skip_episodes=5, ": "", "steps=100": "steps=3"},
    "ilql_corridor.py": {"batch_size=[256]": "batch_size=[16]", "steps=500": "steps=3", "games=256": "games=16"},
    "kl_own_env.py": {"* 50 * 40": "* 50 * 3", "% 10": "% 1"},
    "kl_pendulum.py": {"rollout(200": "rollout(5"},
    "kl_wordle_rows.py": {"steps=150": "steps=3", "range(61)": "range(3)", "% 10": "% 1"},
    "offline_trainer.py": {
        "[256]": "[32]",
        "[:1000]": "[:100]",
        "len(rows) * 10": "len(rows)",
        "games=256": "games=16",
    },
    "ppo_wordle.py": {"steps=200": "steps=3", "frames * 60": "frames * 3", "% 10": "% 1"},
    "query_response_reward.py": {"range(16)": "range(2)", "% 5": "% 1"},
    "search_optuna.py": {
        '"steps": 120, "eval_every": 40, "eval_games": 256': '"steps": 4, "eval_every": 2, "eval_games": 8',
        "games=500": "games=60",
        "trials=12": "trials=3",
        '"forkserver"': '"spawn"',  # which is a fork here
    },
}
NEEDS = {
    "search_optuna.py": ("optuna", "make test installs it, or pip install 'torchrl-lang[search]'"),
    "trl_wordle.py": ("trl", "make test-suites runs it"),
}
"""Examples with packages that are not among those of development, and where these are."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path, tmp_path):
    if path.name in NEEDS:
        package, where = NEEDS[path.name]
        pytest.importorskip(package, reason=f"{package} is missing: {where}")
    source = path.read_text()
    for long, short in SHORTER.get(path.name, {}).items():
        assert long in source, f"{path.name} no longer has {long!r}: shorten it here in another way"
        source = source.replace(long, short)
    (tmp_path / path.name).write_text(source)
    done = processes.run(tmp_path / path.name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3
