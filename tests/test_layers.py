"""Who may import whom: lower layers know nothing of higher ones, and importing a module has no effect."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.weight import parsed

ROOT = Path(__file__).parents[1] / "torchrl_lang"
LAYERS = {
    "_files": -2,
    "_checks": -1,
    "_random_stream": -1,
    "_http": 0,
    "schema": 0,
    "functional": 0,
    "text": 1,
    "data": 2,
    "envs": 3,
    "modules": 3,
    "transforms": 4,
    "objectives": 4,
    "evaluation": 5,
    "algorithm_distillation": 6,
    "training": 6,
    "recipes": 7,
    "__main__": 8,
}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


RECIPES_OF_TASKS = ("folder", "prepare", "task")
"""Files of a task's folder that rank with ``recipes``; ``recipes`` imports them lazily."""


def layer_of(path):
    if path.stem in RECIPES_OF_TASKS and path.relative_to(ROOT).parts[0] == "envs":
        return "recipes"
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported(path):
    """The dotted names that a file imports."""
    for node in ast.walk(parsed(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = node.module == "torchrl_lang"
            yield from (f"torchrl_lang.{a.name}" for a in node.names) if inside else [node.module]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_nothing_imports_from_above_or_from_a_neighbour():
    wrong = []
    for path in FILES:
        mine = layer_of(path)
        others = {name.split(".")[1] for name in imported(path) if name.startswith("torchrl_lang.")} & LAYERS.keys()
        wrong += [
            f"{path.relative_to(ROOT)} imports {other}"
            for other in others - {mine}
            if LAYERS[other] >= LAYERS[mine] and {mine, other} != {"schema", "functional"}
        ]
    assert not wrong


def test_optional_packages_are_imported_in_one_file_each():
    """Each names its extra where it is missing."""
    found = defaultdict(set)
    for path in FILES:
        for name in imported(path):
            found[name.split(".")[0]].add(path.name)
    expected = {
        "h5py": {"files.py"},
        "matplotlib": {"plots.py"},
        "peft": {"online.py"},
        "profanity_check": {"rewards.py"},
        "sklearn": {"upvotes.py"},
        "starlette": {"server.py"},
        "textarena": {"textarena.py"},
        "textworld": {"engine_process.py"},
        "uvicorn": {"server.py"},
        "vaderSentiment": {"rewards.py"},
        "wandb": set(),
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.slow
def test_importing_everything_leaves_the_random_stream_and_needs_no_extras():
    code = (
        "import sys, torch; sys.modules['matplotlib'] = None; before = torch.get_rng_state();"
        "import torchrl_lang.envs, torchrl_lang.modules, torchrl_lang.objectives, torchrl_lang.evaluation, "
        "torchrl_lang.training, torchrl_lang.data; assert torch.equal(before, torch.get_rng_state())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
