"""Formulas of docstrings in LaTeX: one by hand, and those of all losses."""

import inspect
import re

import pytest

from docs.formulas import typeset
from torchrl_lang import objectives

LOSSES = [getattr(objectives, name) for name in objectives.__all__ if name.endswith("Loss")]


def test_by_hand():
    formula = "    loss_actor = -mean_j clip(rho_j, 1 - eps, 1)     (arXiv 1707.06347, eq. 7)"
    lines = ["PPO::", "", formula, "", "End::", "", "  x"]
    typed = r"    \mathrm{loss\_actor} &= -\operatorname{mean}_j \operatorname{clip}(\rho_j, 1 - \epsilon, 1)"
    typed += r"\qquad\text{(arXiv 1707.06347, eq. 7)}"
    equations = ["", r"    \begin{aligned}", typed, r"    \end{aligned}", ""]
    assert typeset(lines) == ["PPO:", "", ".. math::", *equations, *lines[4:]]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_no_formula_of_a_loss_stays_plain(loss):
    lines = typeset(inspect.getdoc(loss).splitlines())
    for line in (line for line in lines if "&=" in line):
        plain = re.sub(r"\\(?:text|mathrm)\{(?:[^{}\\]|\\_)*\}|\\operatorname\{\w+\}|\\[a-zA-Z]+", "", line)
        assert not re.findall(r"[A-Za-z]{2,}|[<>!]=", plain), line
    assert not any(re.match(r" +(?:loss_\w+|y_\w) += ", line) for line in lines)
