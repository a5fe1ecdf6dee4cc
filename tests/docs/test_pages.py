"""The Python code of every documentation page runs, from top to bottom, and does what the page claims."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    str(path.relative_to(DOCS)): blocks
    for path in sorted(DOCS.rglob("*.md"))
    if (blocks := re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.S))
}


def check_row(space, printed):
    page = (DOCS / "concepts" / "row.md").read_text(encoding="utf-8")
    assert printed.rstrip() in page  # the page shows what its code prints


def check_decisions(space, printed):
    assert printed.splitlines() == ["tensor([2, 3, 6, 7])", "tensor([2, 3, 6, 7, 8])"]


def check_tokens(space, printed):
    assert printed == "[0, 2, 3, 4, 5] False\n"


def check_files_and_errors(space, printed):
    assert "token_reward.memmap" in space["dataset_error"]
    assert "lacks the weights transformer.h.1." in space["model_error"]
    assert all("\n" not in space[name] for name in ("dataset_error", "model_error"))


def check_random_walks(space, printed):
    optimality = {name: value for name, (_, value) in space["results"].items()}
    copying = max(value for name, value in optimality.items() if name.startswith("BC"))
    assert max(value for name, value in optimality.items() if name.startswith("ILQL")) > copying + 0.1
    assert optimality["ILQL, beta 2"] > 0.95


CHECKS = {
    "concepts/row.md": check_row,
    "concepts/decisions.md": check_decisions,
    "concepts/tokens.md": check_tokens,
    "guides/files_and_errors.md": check_files_and_errors,
    "tutorials/random_walks.md": check_random_walks,
}


def test_every_page_with_code_is_checked():
    assert PAGES.keys() == CHECKS.keys()


@pytest.mark.parametrize("page", CHECKS)
def test_page(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    space: dict = {"__name__": "page"}
    for index, block in enumerate(PAGES[page]):
        exec(compile(block, f"{page}, block {index}", "exec"), space)
    CHECKS[page](space, capsys.readouterr().out)
