"""Who may import whom: lower layers know nothing of higher ones, and importing a module has no effect."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

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
    """Layers of this package that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "torchrl_lang" else [f"torchrl_lang.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "torchrl_lang" and len(parts) > 1 and parts[1] in LAYERS:
                yield parts[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_imports_from_above_or_from_a_neighbour(path):
    mine = layer_of(path)
    for other in imported(path):
        assert other == mine or LAYERS[other] < LAYERS[mine] or {mine, other} == {"schema", "functional"}, other


def test_optional_packages_are_imported_in_one_file_each():
    """Each names its extra where it is missing."""
    names = ("h5py", "matplotlib", "peft", "profanity_check", "starlette", "textarena", "textworld", "uvicorn")
    names += ("sklearn", "vaderSentiment", "wandb")
    users = {name: set() for name in names}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            module = getattr(node, "module", None) if isinstance(node, ast.ImportFrom) else None
            names = [module or ""] if module else [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.split(".")[0] in users:
                    users[name.split(".")[0]].add(path.name)
    found = {
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
    assert users == found


@pytest.mark.slow
def test_importing_everything_leaves_the_random_stream_and_needs_no_extras():
    code = (
        "import sys, torch; sys.modules['matplotlib'] = None; before = torch.get_rng_state();"
        "import torchrl_lang.envs, torchrl_lang.modules, torchrl_lang.objectives, torchrl_lang.evaluation, "
        "torchrl_lang.training, torchrl_lang.data; assert torch.equal(before, torch.get_rng_state())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
