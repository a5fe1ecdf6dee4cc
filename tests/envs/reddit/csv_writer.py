"""Writes CSV files in the layout of the real dataset, and damages them, without the code under test or ``csv``."""

import random
from pathlib import Path

COLUMNS = 12
HEADER = ",".join(f"column_{number}" for number in range(COLUMNS))
POSITIVE, NEGATIVE = "comments_positive.csv", "comments_negative.csv"


def field(text: str) -> str:
    if any(character in text for character in ',"\r\n'):
        return '"' + text.replace('"', '""') + '"'
    return text


def row(comment: str, score: object, parent: str) -> str:
    """A row without its line break: comment, score and parent in columns 4, 5 and 10."""
    texts = [f"f{number}" for number in range(COLUMNS)]
    texts[4], texts[5], texts[10] = comment, str(score), parent
    return ",".join(map(field, texts))


def write_csv(path: Path, rows, *, encoding="utf-8", bom=b"", end="\n") -> None:
    path.write_bytes(bom + "".join(line + end for line in [HEADER, *rows]).encode(encoding))


def write_folder(folder: Path, positive, negative, **options) -> Path:
    """``positive`` and ``negative`` are lists of (comment, score, parent)."""
    folder.mkdir(exist_ok=True)
    write_csv(folder / POSITIVE, [row(*each) for each in positive], **options)
    write_csv(folder / NEGATIVE, [row(*each) for each in negative], **options)
    return folder


def texts(source: random.Random) -> str:
    """A text with what CSV has to quote."""
    parts = ["some", "words", 'a "quote"', "a, comma", "a\nline", "é", "\N{GRINNING FACE}", '""', "don't", "\r\n"]
    return " ".join(source.choice(parts) for _ in range(source.randint(1, 8))) + " end"


# Each takes the bytes of a row and a source of randomness, and returns those of one malformed row.
DAMAGE = [
    lambda data, source: b",".join(data.split(b",")[1:]),
    lambda data, source: b"more," + data,
    lambda data, source: data.replace(b",SCORE,", source.choice([b",many,", b",1.5,", b",,", b",1e3,", b",nan,"])),
    lambda data, source: b"f0\xff" + data[2:],
    lambda data, source: b"\xe2\x82" + data[2:],
    lambda data, source: b"f0,f1",
]
