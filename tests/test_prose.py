"""Docstrings, comments, messages and documentation use the terms of the field.

To cover more, add paths to ``COVERED``; to rule out a word, add it to ``INSTEAD_OF``; where a word is meant literally,
add the line to ``LITERAL`` with the reason.
"""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]

COVERED = ["README.md", "benchmarks", "docs", "examples", "torchrl_lang"]
"""Files, and folders with the Python and Markdown files below them, relative to the repository."""

INSTEAD_OF = {
    r"(?:say|says|said|saying)": "generate, write, describe, mean",
    r"(?:tell|tells|told|telling)": "encode, report, show, determine, distinguish",
    r"(?:mend|mends|mended|mending)": "fix",
    r"(?:judge|judges|judged|judging)": "evaluate, score",
    r"(?:speak|speaks|speaking|spoke|spoken)": "generate, write, take a turn",
    r"(?:knows|forget|forgets|forgotten|remember|remembers|remembered)": "has, drops, stores",
    r"(?:somebody|somebody's|nobody|nobody's|whoever|whatever it is|one's own)": "name who does it",
    r"for a while": "inside a `with` block",
    r"(?:anew|in vain|in silence|begins well|ends well)": "again, uselessly, silently, succeeds",
    r"(?:in the midst|behind the face|for the sake|close ranks|goes on|go on|went on|going on)": "continue, or a term",
    r"(?:a piece|piece by piece)": "per chunk, chunk by chunk",
    r"what is (?:there|known|learned|kept|over|left|carried|new|read|meant)": "a noun",
    r"so many": "that many, or the number",
    r"data sets?": "dataset",
    r"keeps? near": "penalize divergence from",
    r"takes? account": "account for",
    r"shall": "must, will",
}
"""Patterns of words that are ruled out (whole words, any case) and the words to use instead."""

LITERAL: dict[tuple[str, str], str] = {
    ("torchrl_lang/envs/visual_dialogue/rewards.py", "looks, appears, tell"): "a word that replies are searched for",
    ("torchrl_lang/_http.py", "what is left"): "the rest of the seconds",
    ("torchrl_lang/envs/visual_dialogue/rewards.py", '"tell"'): "the same word in the list",
}
"""``(file, part of the line): reason`` where a word is meant literally, such as what a character of a game says."""

_PATTERNS = {re.compile(rf"(?<![\w`.]){words}(?![\w`(])", re.IGNORECASE): use for words, use in INSTEAD_OF.items()}
_ANY = re.compile("|".join(pattern.pattern for pattern in _PATTERNS), re.IGNORECASE)
_STRINGS = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def covered_files():
    for name in COVERED:
        path = ROOT / name
        assert path.exists()
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (file for file in files if file.suffix in (".py", ".md") and "_build" not in file.parts)


def prose_lines(path):
    """Line number and text of comments and strings in Python, of all in Markdown; nothing if no word is ruled out."""
    text = path.read_text(encoding="utf-8")
    if not _ANY.search(text):  # tokenizing takes longer
        return
    if path.suffix == ".md":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _STRINGS:
            yield from enumerate(token.string.splitlines(), token.start[0])


def ruled_out(line):
    """The words of a line that are ruled out, with the words to use instead."""
    return [(found.group(), use) for pattern, use in _PATTERNS.items() if (found := pattern.search(line))]


def test_prose_uses_the_terms_of_the_field():
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {word!r} -> {use}"
        for path in covered_files()
        for number, line in prose_lines(path)
        for word, use in ruled_out(line)
        if not any(path == ROOT / file and part in line for file, part in LITERAL)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_exception_is_needed():
    for file, part in LITERAL:
        assert any(part in line and ruled_out(line) for _, line in prose_lines(ROOT / file)), (file, part)


def test_words_are_found_in_docstrings_comments_and_messages(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('"""The policy\n\nsays a word."""\nraise E(f"{x} was told {y}")  # nobody mends it\n')
    words = [(number, word) for number, line in prose_lines(path) for word, _ in ruled_out(line)]
    assert words == [(3, "says"), (4, "told"), (4, "mends"), (4, "nobody")]
    assert not ruled_out("``tell`` and pool.tell and a storyteller")
