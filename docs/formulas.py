"""Typesets the formulas of docstrings: literal blocks in which every line is ``name = ...`` become LaTeX.

Docstrings are read in editors, so their formulas are plain text in the letters of the code. The pages show LaTeX.
"""

from __future__ import annotations

import re

__all__ = ["typeset"]

_EQUATION = re.compile(r"^ *[\w'^{}+|, ]+ += .+$")
_REFERENCE = re.compile(r" +\((arXiv [^)]*)\)$")
_OPERATORS = ("max", "min", "sum", "log", "exp")
_FUNCTIONS = (*_OPERATORS, "argmax", "clip", "mean")
_CONNECTIVES = ("over", "with", "of")
_LETTERS = ("alpha", "beta", "eps", "gamma", "kappa", "lambda", "pi", "rho", "sigma", "tau")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+0?(?:_[A-Za-z]{2,})*")


def typeset(lines: list[str]) -> list[str]:
    r"""The lines of a docstring with its blocks of formulas as ``math`` directives.

    Examples:
        >>> print(*typeset(["The target::", "", "    y_j = r_j + gamma max_a Qt(s_{j+1}, a)", ""])[4:-1], sep="\n")
        \begin{aligned}
        y_j &= r_j + \gamma \max_a \mathrm{Qt}(s_{j+1}, a)
        \end{aligned}
    """
    out: list[str] = []
    index = 0
    while index < len(lines):
        line, block = lines[index], _block(lines, index + 1)
        if line.endswith("::") and block and all(map(_EQUATION.match, block)):
            indent = " " * (len(line) - len(line.lstrip()))
            rows = [_row(each) for each in block]
            joined = [row + r" \\" * (row is not rows[-1]) for row in rows]
            math = [r"\begin{aligned}", *joined, r"\end{aligned}"]
            out += [line[:-1], "", f"{indent}.. math::", "", *(f"{indent}    {each}" for each in math)]
            index += 2 + len(block)
        else:
            out.append(line)
            index += 1
    return out


def _block(lines: list[str], start: int) -> list[str]:
    """The lines of the literal block after the empty line at ``start``."""
    found = []
    for line in lines[start + 1 :]:
        if not line.strip():
            break
        found.append(line)
    return found


def _row(line: str) -> str:
    """One equation in LaTeX."""
    note = _REFERENCE.search(line)
    text = re.sub(r",  +", r",\\quad ", _REFERENCE.sub("", line.strip()))
    text = _WORDS.sub(_word, text)
    text = re.sub(r"_<=(\w+)", r"_{\\le \1}", text).replace(">= ", r"\ge ").replace("!= ", r"\ne ")
    text = re.sub(r" +\* ", r"\\,", text).replace("(. ", r"(\cdot ").replace(", .)", r", \cdot)").replace("||", r"\|")
    left, right = re.split(r" *= ", text, maxsplit=1)
    return f"{left.strip()} &= {right.strip()}" + (rf"\qquad\text{{({note[1]})}}" if note else "")


def _word(found: re.Match[str]) -> str:
    head, _, index = found[0].partition("_")
    letter = head.removesuffix("0")
    if letter in _LETTERS:
        below = "0" if head.endswith("0") else rf"\text{{{index}}}" if index else ""
        return rf"\{letter.replace('eps', 'epsilon')}" + (f"_{{{below}}}" if below else "")
    if found[0] in _FUNCTIONS:
        return rf"\{head}" if head in _OPERATORS else rf"\operatorname{{{head}}}"
    if found[0] in _CONNECTIVES:
        return rf"\ \text{{{head}}}\ "
    # MathJax 3 shows the backslash of \text{a\_b}, all versions show \mathrm{a\_b} as it should be.
    return head if len(found[0]) == 1 else rf"\mathrm{{{found[0]}}}".replace("_", r"\_")
