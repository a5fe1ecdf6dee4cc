"""The JSON file of people's games and of the guesses that get each colouring, as the ILQL paper's code writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrl_lang._files import FileError, read_json, shorten, write_file
from torchrl_lang.envs.wordle.colour_text import CODE_OF_SYMBOLS, SYMBOLS_OF_CODE
from torchrl_lang.envs.wordle.makers.continuing import TRIES
from torchrl_lang.envs.wordle.rules import Rules, feedback_table
from torchrl_lang.envs.wordle.words import WordIndex, load_words

__all__ = ["read_games", "write_games"]

Games = list[tuple[str, list[int]]]
_REMEDY = 'give {"games": [[answer, [colours, ...]], ...], "transitions": {word: {colours: [guess, ...]}}}'
_NO_GUESS = 255


def write_games(path: Path, games: Games, words: list[str], guesses: list[str], table: Tensor, rules: str) -> None:
    """Write games and transitions; ``table`` is uint8 ``[W, G]``."""
    transitions: dict[str, dict[str, list[str]]] = {}
    for word, codes in zip(words, table, strict=True):
        by_code: dict[str, list[str]] = {}
        for guess, code in zip(guesses, codes.tolist(), strict=True):
            if code != _NO_GUESS:
                by_code.setdefault(SYMBOLS_OF_CODE[code], []).append(guess)
        transitions[word] = by_code
    written = [[answer, [SYMBOLS_OF_CODE[code] for code in codes]] for answer, codes in games]
    write_file(path, json.dumps({"games": written, "transitions": transitions, "rules": rules}))


def read_games(path: Path, rules: Rules | None) -> tuple[Games, list[str], list[str], Tensor, Rules]:
    """Games, words, guesses, the code of each guess for each word (255 for none), and the rules."""
    content = read_json(path, remedy=_REMEDY)
    missing = [key for key in ("games", "transitions") if key not in content]
    if missing:
        raise FileError(path, f'has no "{missing[0]}"', _REMEDY)
    games = [_game(path, number, game) for number, game in enumerate(_as(path, content["games"], list, "games"))]
    transitions = _as(path, content["transitions"], dict, "transitions")
    words = _words(path, list(transitions))
    found = dict.fromkeys(guess for word in words for guess, _ in _coloured(path, word, transitions[word]))
    guesses = _words(path, list(found))
    place = {guess: index for index, guess in enumerate(guesses)}
    table = torch.full((len(words), len(guesses)), _NO_GUESS, dtype=torch.uint8)
    for row, word in enumerate(words):
        pairs = [(place[guess], code) for guess, code in _coloured(path, word, transitions[word])]
        if pairs:
            index, codes = torch.tensor(pairs).unbind(-1)
            table[row, index] = codes.to(torch.uint8)
    named = content.get("rules") if rules is None else rules
    return games, words, guesses, table, _rules(path, table, words, guesses, named)


def _coloured(path: Path, word: str, by_colours: Any) -> Iterator[tuple[str, int]]:
    """Each guess for a word, and the code of its colours."""
    for colours, guesses in _as(path, by_colours, dict, word).items():
        if colours not in CODE_OF_SYMBOLS:
            raise FileError(path, f"has the colours {shorten(colours)} for {shorten(word)}", _REMEDY)
        for guess in _as(path, guesses, list, colours):
            yield _as(path, guess, str, colours), CODE_OF_SYMBOLS[colours]


def _game(path: Path, number: int, game: Any) -> tuple[str, list[int]]:
    match game:
        case [str(answer), [*colours]] if 1 <= len(colours) <= TRIES and all(
            isinstance(each, str) and each in CODE_OF_SYMBOLS for each in colours
        ):
            return answer, [CODE_OF_SYMBOLS[each] for each in colours]
    raise FileError(path, f"has {shorten(game)} as game {number}", _REMEDY)


def _rules(path: Path, table: Tensor, words: list[str], guesses: list[str], named: Any) -> Rules:
    """The rules that give all colours of the table, the ``named`` ones if they do."""
    hidden, guessed = WordIndex(words).letters, WordIndex(guesses).letters
    for rules in ("official", "ilql") if named is None else (named,):
        if rules not in ("official", "ilql"):
            raise FileError(path, f'has {shorten(rules)} as "rules"', 'expected "official" or "ilql"')
        wrong = (table != _NO_GUESS) & (table != feedback_table(guessed, hidden, rules).T)
        if not wrong.any():
            return rules
    word, guess = wrong.nonzero()[0].tolist()
    found = f"{SYMBOLS_OF_CODE[int(table[word, guess])]} for the guess {guesses[guess]!r} and the word {words[word]!r}"
    raise FileError(path, f"has {found}, which the rules do not give", "make the file again")


def _words(path: Path, words: list[Any]) -> list[str]:
    try:
        return load_words(words)
    except (TypeError, ValueError) as error:
        raise FileError(path, f"holds a bad word ({error})", _REMEDY) from error


def _as(path: Path, value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise FileError(path, f"has {shorten(value)} for {shorten(name)}, expected {kind.__name__}", _REMEDY)
    return value
