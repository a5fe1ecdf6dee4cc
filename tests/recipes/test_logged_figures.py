"""The page of logged figures: each figure that a recipe logs or writes as JSON is described, and no other."""

import csv
import json
import re
from pathlib import Path

import pytest

from tests.recipes.algorithm_distillation.test_ad import train as train_ad
from tests.recipes.test_text_ad import record
from tests.recipes.test_text_ad import train as train_text_ad
from tests.recipes.walks import ALGORITHMS, ARCHER
from torchrl_lang.__main__ import main
from torchrl_lang.evaluation import Summary
from torchrl_lang.recipes.tasks import TASKS, task_class

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "logged_figures.md"
TINY = ["--batch-size", "16", "--eval-games", "8", "--eval-every", "1", "--log-every", "1"]
OFFLINE = ["--steps", "1", "--layers", "1", "--width", "16", "--heads", "2"]
ONLINE = ["--iterations", "2", "--games", "8", "--turns", "3"]
DIALOGUES = [[{"role": "user", "text": "hi"}, {"role": "assistant", "text": "yo", "reward": 1.0}]] * 20


def described():
    """The names in the first cells of the page's tables."""
    rows = re.findall(r"^\| (`.*?) \|", PAGE.read_text(), flags=re.M)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def keys_of(content):
    """The keys of nested objects, without those of options and of tables by number."""
    for key, value in content.items():
        yield key
        if isinstance(value, dict) and key not in ("options", "guesses", "metrics"):
            yield from keys_of(value)
        for item in value if isinstance(value, list) else ():
            yield from keys_of(item) if isinstance(item, dict) else ()


@pytest.fixture(scope="module")
def logged(tmp_path_factory, walks):
    """The names of all figures, without the prefix of the evaluations of online runs."""
    home = tmp_path_factory.mktemp("logged")
    (home / "said.jsonl").write_text("".join(f"{json.dumps({'turns': turns})}\n" for turns in DIALOGUES))
    said = ["--data", str(home / "said.jsonl"), "--out", str(home / "said"), *TINY, *OFFLINE]
    assert main(["train", "bc", *said]) == 0
    for recipe in ("ppo", "rejection", "grpo", "archer"):
        more = ["--value-warmup", "0"] if recipe in ("ppo", "archer") else []
        more += {"ppo": ["--clip-heads"], "grpo": ["--engine", "transformers"], "archer": ARCHER}.get(recipe, [])
        begun = ["--start", str(walks / "bc"), "--out", str(home / recipe), *TINY, *ONLINE, *more]
        assert main(["train", recipe, *begun]) == 0
    assert train_ad(home / "ad", "--steps", 2, "--reward-weight", 1, "--observation-weight", 1) == 0
    assert train_text_ad(record(home / "histories", epochs=3), home / "text-ad", "--steps", 1) == 0
    assert main(["evaluate", "--run", str(walks / "ilql"), "--games", "4"]) == 0
    found = set()
    for log in (*home.glob("*/log.csv"), *(walks / name / "log.csv" for name in ALGORITHMS)):
        with open(log, newline="") as file:
            found |= {name.removeprefix("eval_") for name in next(csv.reader(file))}
    for name in ("evaluation.json", "values.json"):
        found |= set(keys_of(json.loads((walks / "ilql" / name).read_text())))
    some = dict.fromkeys(("invalid_rate", "kl_per_token", "kl_per_game", "entropy"), 0.0)  # of some policies
    found |= Summary("", 1, 0.0, 0.0, 0.0, 0.0, 0.0, **some).scalars().keys()
    return found | {name for task in TASKS for name in task_class(task).metric_meanings}


@pytest.mark.slow
def test_each_figure_is_described_and_each_described_one_exists(logged):
    assert sorted(logged - described()) == []
    assert sorted(described() - logged) == []
