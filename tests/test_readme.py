"""The README's Python code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)


def test_there_is_code_to_run():
    assert len(BLOCKS) >= 2


# What must be true after each block.
CHECKS = [
    lambda space: space["returns"].mean() > -2.5,  # it learned
    lambda space: space["rows"]["tokens"].shape[-1] == space["base"].row_length and len(space["rows"]) > 0,
    lambda space: (
        space["steps"]["next", "kl"].abs().median() < 1e-3  # nothing has trained yet
        and space["near"].coef < 0.1
        and "raw_reward" in space["steps"]["next"].keys()
    ),
    lambda space: (
        space["rows"]["terminated"].all()
        and space["rows"]["advantage"].isfinite().all()
        and (space["rows"]["kl"] != 0).any()  # the policy has moved, and pays for it
    ),
]


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_code_runs(index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "readme"}
    exec(compile(BLOCKS[index], f"README block {index}", "exec"), space)
    assert CHECKS[index](space)
