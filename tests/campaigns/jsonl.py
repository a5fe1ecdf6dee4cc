"""Damaged lines of dialogues: each is refused by its number, or becomes exactly the row that it states."""

from __future__ import annotations

import json
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from tests.campaigns.jsonl_reader import Bad, Stated, read_line
from tests.campaigns.mutators import HUGE, NAMES, WORDS, fields, is_number, other_type, places, shown
from tests.campaigns.report import Outcome, outcomes
from torchrl_lang.data import dataset_from_jsonl
from torchrl_lang.text import CharTokenizer, HFTokenizer, Tokenizer

ALPHABET = "abcdefghijklmnopqrstuvwxyz ?<>/|"
ROW_LENGTH = 256
TEXTS = (
    "",
    "</a>",
    "<s>is it</s>",
    "<|pad|>",
    "ab" * 200,
    "é",
    "\ud800",
    "\0",
    "a\u2028b",
    "</eod>",
    *WORDS,
    *NAMES[:4],
)
ROLES = ("user", "environment", "assistant", "agent")


def good_line(random: Random) -> dict[str, Any]:
    """A dialogue."""
    turns = []
    for _ in range(random.randint(1, 5)):
        role = random.choice(ROLES)
        turn: dict[str, Any] = {"role": role, "text": "".join(random.choices(ALPHABET, k=random.randrange(12)))}
        if role in ("assistant", "agent") and random.random() < 0.7:
            turn["reward"] = random.choice([0, 1, -1.5, 0.1, 3e8, 1e-40])
        turns.append(turn)
    line: dict[str, Any] = {"turns": turns}
    if random.random() < 0.3:
        line["truncated"] = random.random() < 0.5
    if random.random() < 0.3:
        line["terminated"] = random.random() < 0.5
    if random.random() < 0.3 and any(turn["role"] == "assistant" for turn in turns):
        line["reward"] = random.choice([2, 0.5])
    return line


def _at(choose: Callable[[Any], bool], new: Callable[[Random, Any], Any], line: Any, random: Random) -> bytes:
    found = places(line, choose)
    if found:
        container, key = random.choice(found)
        container[key] = new(random, container[key])
    return json.dumps(line).encode()


def _drop(line: Any, random: Random) -> bytes:
    container, key = random.choice(places(line))
    del container[key]
    return json.dumps(line).encode()


def _rename(line: Any, random: Random) -> bytes:
    container, key = random.choice(fields(line))
    container[random.choice(["Role", "content", "text ", "reward", "truncated", "text"])] = container.pop(key)
    return json.dumps(line).encode()


def _twice(line: Any, random: Random) -> bytes:
    container, key = random.choice(fields(line))
    container["<again>"] = container[key]
    return json.dumps(line).replace('"<again>"', json.dumps(key)).encode()


def _bytes(line: Any, random: Random) -> bytes:
    """One byte flipped, left out or put in."""
    text = bytearray(json.dumps(line, ensure_ascii=False).encode())
    where, byte = random.randrange(len(text)), random.randrange(256)
    text[where : where + random.randint(0, 1)] = random.choice([b"", bytes([byte]), bytes([text[where] ^ 1])])
    return bytes(text)


def _long(random: Random) -> bytes:
    """A line of megabytes, whose error message must not repeat it."""
    much = "É" * 1_000_000
    turns = [{"role": much, "text": ""}, {"role": "user", "text": much}, {"role": "user", "text": "a", much: 1}]
    turn = random.choice(turns)
    return json.dumps(random.choice([{"turns": [turn]}, {"turns": [turn], "reward": [much]}, {"turns": much}])).encode()


MUTATIONS: dict[str, Callable[[Any, Random], bytes]] = {
    "none": lambda line, random: json.dumps(line).encode(),
    "bytes": _bytes,
    "cut": lambda line, random: (text := json.dumps(line).encode())[: random.randrange(len(text))],
    "drop": _drop,
    "rename": _rename,
    "twice": _twice,
    "type": partial(_at, lambda value: True, other_type),
    "null": partial(_at, lambda value: True, lambda random, value: None),
    "text": partial(_at, lambda value: isinstance(value, str), lambda random, value: random.choice(TEXTS)),
    "huge": partial(_at, is_number, lambda random, value: random.choice([*HUGE, 3.5e38, -(10**38), 1e39])),
    "nan": partial(_at, is_number, lambda random, value: random.choice([float("nan"), float("inf")])),
    "wrapped": lambda line, random: json.dumps(random.choice([[line], "x", 3, None, {"line": line}])).encode(),
    "nested": lambda line, random: b"[" * 100_000,
    "two": lambda line, random: json.dumps(line).encode() * 2,
    "long": lambda line, random: _long(random),
    "utf16": lambda line, random: json.dumps(line).encode("utf-16-le"),
    "space": lambda line, random: b" \t" + json.dumps(line, indent=1).encode().replace(b"\n", b"\t") + b"\r",
}


def tokenizers() -> dict[str, Tokenizer]:
    """One of each kind; both give text back as it was."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return {
        "characters": CharTokenizer.from_alphabet(ALPHABET),
        "bytes": HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend)),
    }


def attack(number: int, seed: int, known: dict[str, Tokenizer], home: Path) -> list[list[str]]:
    """Put one damaged line between good ones and read them; returns ``[[mutation, verdict, detail]]``."""
    random = Random(f"{seed} {number}")
    name = list(MUTATIONS)[number % len(MUTATIONS)]
    kind = random.choice(list(known))
    alphabet = set(ALPHABET) if kind == "characters" else None
    before, after = ([json.dumps(good_line(random)).encode() for _ in range(random.randrange(3))] for _ in range(2))
    damaged = MUTATIONS[name](good_line(random), random).replace(b"\n", b" ")
    lines = [*before, damaged, *after]
    path, folder = home / f"lines-{number}.jsonl", home / f"data-{number}"
    path.write_bytes(b"\n".join(lines))
    try:
        verdict, detail = _read(path, folder, known[kind], lines, alphabet, len(before) + 1)
    finally:
        path.unlink()
        shutil.rmtree(folder, ignore_errors=True)
    return [[name, verdict, f"{shown(damaged)} among {len(lines)} lines, {kind}\n{detail}"]]


def _read(
    path: Path, folder: Path, tokenizer: Tokenizer, lines: list[bytes], alphabet: set[str] | None, number: int
) -> tuple[str, str]:
    stated: list[Stated] = []
    wrong = ""
    for line in lines:
        try:
            if line.strip():
                stated.append(read_line(line, alphabet))
        except Bad as error:
            wrong = str(error) or "bad"
    lengths = [dialogue.length(in_bytes=alphabet is None) for dialogue in stated]
    wrong = wrong or ("too long" if max(lengths, default=0) > ROW_LENGTH else "" if stated else "no line")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rows = dataset_from_jsonl(path, folder, tokenizer, ROW_LENGTH)
    except ValueError as error:
        text = str(error)
        if not wrong:
            return "refused a good line", text[:500]
        if folder.exists() or list(path.parent.glob(f"*{folder.name}*")):
            return "leftover", str(list(path.parent.glob(f"*{folder.name}*")))
        named = str(path) in text and (f"line {number}" in text or not stated)
        return ("refused", "") if named and len(text) < 3000 else ("unclear refusal", text[:500])
    except Exception:
        return "traceback", traceback.format_exc()[-800:]
    if wrong:
        return "silent acceptance", f"the line is wrong: {wrong}"
    return _compare(rows[torch.arange(len(rows))], tokenizer, stated)


def _compare(rows: Any, tokenizer: Tokenizer, stated: list[Stated]) -> tuple[str, str]:
    if len(rows) != len(stated):
        return "silent acceptance", f"{len(rows)} rows of {len(stated)} dialogues"
    for row, dialogue in zip(rows, stated, strict=True):
        attention, mine = row["attention_mask"].numpy(), row["agent_mask"].numpy()
        text = tokenizer.decode(row["tokens"][row["attention_mask"]].tolist())
        reward = row["token_reward"].numpy()
        found = [bool(row["terminated"]), bool(row["truncated"])]
        last = mine & ~np.append(mine[1:], False)
        problems = {
            "text": text != dialogue.text,
            "padding": (np.diff(attention.astype(int)) > 0).any() or (mine & ~attention).any(),
            "rewards": not np.array_equal(reward[reward != 0], [r for r in dialogue.rewards if r != 0]),
            "place of rewards": (row["tokens"].numpy()[reward != 0] != tokenizer.control.end_of_action).any(),
            "ends": found != [dialogue.terminated, dialogue.truncated],
            "turns of the agent": mine.any() != bool(dialogue.rewards) or last.sum() > len(dialogue.rewards),
        }
        wrong = [name for name, is_wrong in problems.items() if is_wrong]
        if wrong:
            return "silent acceptance", f"{wrong}: {shown(text)} instead of {shown(dialogue)}"
    return "accepted", ""


def campaign(count: int, seed: int, *, only: int | None = None) -> Iterator[Outcome]:
    """Damage ``count`` lines; ``only`` one of them where a number is given."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        known, numbers = tokenizers(), [number for number in range(count) if only in (None, number)]
        attacks = {str(number): partial(attack, number, seed, known, Path(name)) for number in numbers}
        yield from outcomes(attacks, timeout=20)
