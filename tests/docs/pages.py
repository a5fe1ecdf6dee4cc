"""Documentation pages as programs: their Python blocks, what these print, and the pictures that they draw.

A fenced ``text`` block that follows a ``python`` block shows what that block prints. To record the outputs and pictures
of pages anew::

    python -m tests.docs.pages tutorials/random_walks.md

The outputs of some pages are those of a pretrained model, which tests replace by a tiny one, see :data:`PRETRAINED`. To
record them with a copy of that model in a folder::

    python -m tests.docs.pages tutorials/chat_agent.md --model FOLDER
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^```(python|text)\n(.*?)^```", flags=re.S | re.M)
PICTURE = re.compile(r"!\[[^]]*\]\((\w+\.svg)\)")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


PRETRAINED = {
    "tutorials/chat_agent.md": (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        {
            '"steps": 48, "batch_size": 4': '"steps": 80, "batch_size": 8',
            '"lr": 1e-3, "top_layers": 4': '"lr": 5e-3',
            "import subprocess": "from tests.docs.test_pages import forked",
            "subprocess.run(": "forked(",
        },
    )
}
"""Pages with the outputs of a model of the hub: its name, and what tests, which have a tiny one there, replace."""


class Block(NamedTuple):
    """A block of Python code and, where the page shows it, what it prints."""

    code: str
    output: re.Match[str] | None


def blocks(text: str) -> list[Block]:
    """The Python blocks of a page, in order."""
    found: list[Block] = []
    for fence in FENCE.finditer(text):
        if fence[1] == "python":
            found.append(Block(fence[2], None))
        elif found:
            found[-1] = Block(found[-1].code, fence)
    return found


def run(text: str, name: str) -> tuple[dict, list[str]]:
    """Run all blocks of a page in one namespace; that namespace, and what each block printed."""
    space: dict = {"__name__": "page"}
    printed = []
    for number, block in enumerate(blocks(text), start=1):
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            exec(compile(block.code, f"{name}, block {number}", "exec"), space)
        printed.append(stream.getvalue())
    return space, printed


def differences(shown: str, printed: str, tolerance: float) -> list[str]:
    """Lines in which two outputs differ, numbers by more than ``tolerance`` (absolute below 1, else relative)."""
    left, right = shown.splitlines(), printed.splitlines()
    if len(left) != len(right):
        return [f"{len(left)} lines are shown, {len(right)} were printed:\n{printed}"]
    return [f"shown {a!r}, printed {b!r}" for a, b in zip(left, right, strict=True) if not _alike(a, b, tolerance)]


def _alike(shown: str, printed: str, tolerance: float) -> bool:
    if tolerance == 0 or shown == printed:
        return shown == printed
    if NUMBER.sub("", shown).split() != NUMBER.sub("", printed).split():
        return False
    pairs = zip(map(float, NUMBER.findall(shown)), map(float, NUMBER.findall(printed)), strict=True)
    return all(abs(a - b) <= tolerance * max(abs(a), abs(b), 1.0) for a, b in pairs)


def record(name: str, model: str | None = None) -> None:
    """Run a page, with its pretrained model in a folder, and write what it printed and drew into it."""
    path = DOCS / name
    text = path.read_text(encoding="utf-8")
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if model is not None:
            place = Path(PRETRAINED[name][0])
            place.parent.mkdir()
            place.symlink_to(Path(before, model))
        try:
            _, printed = run(text, name)
        finally:
            os.chdir(before)
        for picture in PICTURE.findall(text):
            shutil.copy(Path(folder, picture), path.parent / picture)
    for block, output in reversed(list(zip(blocks(text), printed, strict=True))):
        if block.output is not None:
            text = text[: block.output.start(2)] + output + text[block.output.end(2) :]
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("pages", nargs="+")
    parser.add_argument("--model")
    given = parser.parse_args()
    for page in given.pages:
        record(page, given.model)
