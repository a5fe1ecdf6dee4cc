"""Where the head of an episode is cut off, by numbers recorded from the ILQL paper's code."""

from __future__ import annotations

import pytest
import torch

from torchrl_lang.functional import decision_mask, find_decisions
from torchrl_lang.text import Episode, Turn, to_row

GAME = Episode(
    [
        Turn("crane", -1.0),
        Turn("<b><g><g><b><g>"),
        Turn("xx", -1.0),
        Turn("abcdef", -1.0),
        Turn("geese", -1.0),
        Turn("<b><y><y><g><g>"),
        Turn("speed", -1.0),
        Turn("<y><b><y><y><b>"),
        Turn("abide", -1.0),
        Turn("<y><b><b><b><g>"),
    ],
    terminated=True,
)
DECISIONS = [*range(6), *range(12, 28), *range(34, 40), *range(46, 52)]


def states(row):
    found = find_decisions(row["attention_mask"][None], row["agent_mask"][None])
    return found.position.tolist()


def test_a_whole_game(wordle_symbols):
    row = to_row(GAME, wordle_symbols, 74)
    assert int(row["attention_mask"].sum()) == 60
    assert decision_mask(row["agent_mask"]).nonzero().flatten().tolist() == DECISIONS
    assert states(row) == [*DECISIONS, 59]
    # The reward of the decision at p sits on the token at p + 1.
    assert (row["token_reward"].nonzero().flatten() - 1).tolist() == [5, 14, 21, 27, 39, 51]
    assert row["token_reward"].sum() == -6
    assert wordle_symbols.decode(row["tokens"][:60]) == (
        "<a>crane</a><b><g><g><b><g></s>xx</a>abcdef</a>geese</a><b><y><y><g><g></s>speed</a><y><b><y><y><b></s>"
        "abide</a><y><b><b><b><g></s></eod>"
    )


@pytest.mark.parametrize(
    ("width", "n_states", "n_actions", "total"), [(5, 5, 4, 0), (9, 6, 5, 0), (13, 7, 6, -1), (20, 14, 13, -2)]
)
def test_the_head_of_a_game(wordle_symbols, width, n_states, n_actions, total):
    with pytest.warns(UserWarning, match="1 of 1 episodes"):
        row = to_row(GAME, wordle_symbols, width, on_overflow="truncate")
    assert states(row) == [state for state in [*DECISIONS, 59] if state < width][:n_states]
    assert int(row["agent_mask"].sum()) == n_actions == n_states - 1
    assert row["token_reward"].sum() == total
    assert not row["terminated"].any()
    assert row["truncated"].all()


def test_every_cut_keeps_exactly_the_actions_whose_successor_state_is_kept(wordle_symbols):
    whole = to_row(GAME, wordle_symbols, 60)
    every = [*DECISIONS, 59]
    for width in range(1, 60):
        with pytest.warns(UserWarning, match="truncated"):
            row = to_row(GAME, wordle_symbols, width, on_overflow="truncate")
        kept = [state for state in every if state < width]
        # A lone state is a row without an action, which has no states to speak of.
        assert states(row) == (kept if len(kept) > 1 else [])
        length = int(row["attention_mask"].sum())
        assert length == kept[-1] + 1
        assert torch.equal(row["tokens"][:length], whole["tokens"][:length])
        assert torch.equal(row["token_reward"][:length], whole["token_reward"][:length])


def test_a_cut_through_the_opening_keeps_what_fits(wordle_symbols):
    episode = Episode([Turn("crane"), Turn("slate", 1.0)], terminated=True)
    with pytest.warns(UserWarning, match="truncated"):
        row = to_row(episode, wordle_symbols, 4, on_overflow="truncate")
    assert wordle_symbols.decode(row["tokens"]) == "<s>cra"
    assert row["truncated"].all()
