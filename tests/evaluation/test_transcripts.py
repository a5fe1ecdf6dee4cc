from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_lang import evaluation
from torchrl_lang.evaluation import GameRecords, format_transcript
from torchrl_lang.evaluation.transcripts import TILES, transcript_turns, write_transcripts
from torchrl_lang.text import CharTokenizer

TOKENIZER = CharTokenizer([*"abcde", "<g>", "<b>", "<y>", "<|pad|>", "</a>", "</s>", "<s>", "<a>", "</eod>"])


def row(text: list[str], agent: str, reward: dict[int, float], width: int) -> TensorDict:
    """A row from symbols; ``agent`` marks the agent's tokens with an ``a``."""
    ids = [TOKENIZER.symbols.index(symbol) for symbol in text]
    n, pad = len(ids), TOKENIZER.control.pad
    return TensorDict(
        tokens=torch.tensor(ids + [pad] * (width - n)),
        attention_mask=torch.arange(width) < n,
        agent_mask=torch.tensor([mark == "a" for mark in agent] + [False] * (width - n)),
        token_reward=torch.tensor([reward.get(i, 0.0) for i in range(width)]),
    )


GAME = row(
    ["<a>", *"ab", "</a>", "<g>", "<b>", "</s>", *"abc", "</a>", "d", "</a>", "<y>", "</s>", "</eod>"],
    ".aaa...aaaaaa...",
    {3: -1.0, 10: -1.0, 12: 0.5},
    20,
)


def test_turns():
    assert transcript_turns(GAME, TOKENIZER) == [
        (True, "ab", -1.0),
        (False, "<g><b>", 0.0),
        (True, "abc", -1.0),
        (True, "d", 0.5),
        (False, "<y>", 0.0),
    ]
    assert format_transcript(GAME, TOKENIZER, spelling=TILES) == "> ab  (-1)\n< 🟩⬛\n> abc  (-1)\n> d  (+0.5)\n< 🟨"


@pytest.mark.parametrize(
    ("symbols", "agent", "reward", "expected"),
    [
        (["<s>", "e", "</s>", "</a>"], "...a", {3: -1.0}, [(False, "e", 0.0), (True, "", -1.0)]),  # it says nothing
        (["<a>", "a", "</a>", "b"], ".aa.", {2: -1.0}, [(True, "a", -1.0), (False, "b", 0.0)]),  # cut off by the width
        # A control token in the agent's words stays the agent's.
        (["<a>", "a", "</s>", "b", "</a>", "c", "</s>"], ".aaaa..", {}, [(True, "a</s>b", 0.0), (False, "c", 0.0)]),
    ],
)
def test_turns_of_odd_rows(symbols, agent, reward, expected):
    odd = row(symbols, agent, reward, 8)
    assert transcript_turns(odd, TOKENIZER) == expected
    assert ("(nothing)" in format_transcript(odd, TOKENIZER)) == (expected[-1][1] == "")


def test_file(tmp_path):
    rows = torch.stack([GAME, GAME])
    records = GameRecords.from_rows(rows, TOKENIZER.control)
    path = write_transcripts(tmp_path / "new" / "games.txt", records, TOKENIZER, games=[1], title="Ours")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[:2] == ["Ours", "===="]
    assert lines[3] == "game 1: return -1.5, 3 turns, ended"
    assert lines[4] == "> ab  (-1)"
    assert len(write_transcripts(path, records, TOKENIZER, games=9).read_text().split("game ")) == 3


def test_rewards_of_real_games_are_all_told(corridor, straight):
    env = corridor(4)
    records = evaluation.play_games(env, straight(env), games=4)
    for game in range(4):
        turns = transcript_turns(records.rows[game], env.tokenizer)
        assert sum(reward for _, _, reward in turns) == records.returns[game]
        assert sum(is_agent for is_agent, _, _ in turns) == records.turns[game]
        assert turns[1] == (True, "r", 0.0 if len(turns) == 3 else -1.0)
