"""Format games as readable text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tensordict import TensorDictBase

from torchrl_lang._files import write_file
from torchrl_lang.evaluation.play import GameRecords
from torchrl_lang.schema import ROW_KEYS
from torchrl_lang.text.chat_tokenizer import ChatTokenizer
from torchrl_lang.text.rows import read_chat_turns, read_control_turns
from torchrl_lang.text.tokenizers import Tokenizer

TILES = {"<g>": "🟩", "<y>": "🟨", "<b>": "⬛"}
"""Coloured squares for Wordle's colour symbols."""


def transcript_turns(row: TensorDictBase, tokenizer: Tokenizer) -> list[tuple[bool, str, float]]:
    """Split a row into turns ``(is_agent, text, reward)``, in order and without control tokens.

    A control token that the agent wrote inside its utterance stays in the text.

    Args:
        row: the entries of one row, ``[T]``.
        tokenizer: the row's tokenizer.
    """
    tokens, real, agent, reward = (row.get(key).tolist() for key in ROW_KEYS)
    length = sum(real)
    entries = tokens[:length], agent[:length], reward[:length]
    if isinstance(tokenizer, ChatTokenizer):
        turns, _ = read_chat_turns(*entries, tokenizer, terminated=False)
    else:
        turns, _, _ = read_control_turns(*entries, tokenizer)
    return [(turn.by_agent, turn.text, turn.reward or 0.0) for turn in turns if turn.by_agent or turn.text]


def format_transcript(row: TensorDictBase, tokenizer: Tokenizer, *, spelling: Mapping[str, str] | None = None) -> str:
    """Format a row with one line per turn: ``>`` the agent, with its reward, ``<`` the environment.

    Args:
        row: the entries of one row, ``[T]``.
        tokenizer: the row's tokenizer.
        spelling: replacements for symbols in the environment's text, such as :data:`TILES`.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.evaluation import format_transcript
        >>> from torchrl_lang.evaluation.transcripts import TILES
        >>> tokenizer = CharTokenizer.from_alphabet(["a", "b", "<g>", "<y>"])
        >>> rows = to_rows([Episode([Turn("ab", reward=-1.0), Turn("<g><y>")], True)], tokenizer, 9)
        >>> print(format_transcript(rows[0], tokenizer, spelling=TILES))
        > ab  (-1)
        < 🟩🟨
    """
    lines = []
    for is_agent, text, reward in transcript_turns(row, tokenizer):
        if is_agent:
            lines.append(f"> {text or '(nothing)'}  ({f'{reward:+g}' if reward else 0})")
        else:
            for symbol, written in (spelling or {}).items():
                text = text.replace(symbol, written)
            lines.append(f"< {text}")
    return "\n".join(lines)


def write_transcripts(
    path: str | Path,
    records: GameRecords,
    tokenizer: Tokenizer,
    *,
    games: int | Sequence[int] = 5,
    title: str = "",
    spelling: Mapping[str, str] | None = None,
) -> Path:
    """Write games to a text file, each with its number, return and length.

    Args:
        path: the file, which is overwritten; its folder is created if missing.
        records: the games.
        tokenizer: the games' tokenizer.
        games: the number of games to write, or their indices.
        title: first line of the file.
        spelling: as in :func:`format_transcript`.
    """
    chosen = range(min(games, len(records))) if isinstance(games, int) else games
    blocks = [f"{title}\n{'=' * len(title)}"] if title else []
    for game in chosen:
        turns = int(records.turns[game])
        end = "ended" if records.terminated[game] else "cut off"
        head = f"game {game}: return {float(records.returns[game]):g}, {turns} turn{'s' * (turns != 1)}, {end}"
        blocks.append(f"{head}\n{format_transcript(records.rows[game], tokenizer, spelling=spelling)}")
    write_file(path, "\n\n".join(blocks) + "\n")
    return Path(path)
