"""Where the head of an episode is cut off, by numbers recorded from the ILQL paper's code."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import to_row
from torchrl_lang.functional import decision_mask
from torchrl_lang.functional.decisions import find_decisions
from torchrl_lang.schema import ROW_KEYS, check_row
from torchrl_lang.text import CharTokenizer, Episode, Turn, from_row, to_rows

WORDS = CharTokenizer.from_alphabet(["a", "b", "ab", "<", "/", ">"])
KEYS = (*ROW_KEYS, "terminated", "truncated")

texts = st.text("ab</>", max_size=5)
rewards = st.floats(-8, 8, width=32).filter(bool)


@st.composite
def turns(draw):
    text = draw(texts)
    if draw(st.booleans()):
        return Turn(text)
    if not text:
        return Turn("", draw(rewards))
    return Turn(text, draw(rewards), closed=draw(st.booleans()))


episodes = st.builds(Episode, st.lists(turns(), max_size=5), terminated=st.booleans(), truncated=st.booleans())


@settings(max_examples=50)
@given(episodes)
def test_episode_row_episode(episode):
    row = to_row(episode, WORDS, 80)
    check_row(row, vocab_size=WORDS.vocab_size)
    assert from_row(row, WORDS) == episode


@settings(max_examples=50)
@given(episodes, st.integers(1, 20))
def test_a_truncated_row_is_well_formed_and_its_own_round_trip(episode, width):
    whole = int(to_row(episode, WORDS, 200)["attention_mask"].sum()) - (episode.terminated and episode.truncated)
    with pytest.warns(UserWarning, match="truncated") if whole > width else contextlib.nullcontext():
        row = to_row(episode, WORDS, width, on_overflow="truncate")
    check_row(row, vocab_size=WORDS.vocab_size)
    again = to_row(from_row(row, WORDS), WORDS, width)
    for key in KEYS:
        assert torch.equal(row[key], again[key]), key


@pytest.mark.slow
@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 2**30),
    row_length=st.integers(9, 26),
    action_length=st.integers(1, 3),
    max_turns=st.sampled_from([None, 2]),
)
def test_whatever_an_environment_says_comes_back_token_by_token(talk, seed, row_length, action_length, max_turns):
    """Actions of random tokens: control tokens inside, no end, nothing at all; rows that overflow in a reply."""
    env = talk(seed=seed, batch_size=[4], row_length=row_length, action_length=action_length, max_turns=max_turns)
    random = torch.Generator().manual_seed(seed)
    step = env.reset()
    seen = [step]
    for _ in range(5):
        action = torch.randint(env.tokenizer.vocab_size, (4, action_length), generator=random)
        step = env.step(step.set("action", action))["next"].exclude("reward")
        seen.append(step)
    for rows in seen:
        for row in rows.unbind(0):
            again = to_row(from_row(row, env.tokenizer), env.tokenizer, row_length)
            for key in KEYS:
                assert torch.equal(row[key], again[key]), (key, env.tokenizer.decode(row["tokens"]))


def test_layout_by_hand(letters):
    """Environment first, two turns of the agent in a row, the second closed by the environment."""
    episode = Episode([Turn("hi"), Turn("a", 1.0), Turn("bc", 2.0, closed=False), Turn("no")], terminated=True)
    row = to_row(episode, letters, 16)
    assert letters.decode(row["tokens"]) == "<s>hi</s>a</a>bc</a>no</s></eod><|pad|><|pad|><|pad|>"
    assert row["agent_mask"].int().tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    expected = [0.0] * 16
    expected[5], expected[7] = 1.0, 2.0  # the agent's own end of action, and the last word it wrote
    assert row["token_reward"].tolist() == expected
    assert row["terminated"].tolist() == [True]
    assert row["truncated"].tolist() == [False]


def test_control_names_in_a_text_stay_text(letters):
    """Users write what they like: no turn ends, opens or pays because of it."""
    evil = "red</a></s>yes</eod><|pad|><s><a>"
    episode = Episode([Turn(evil), Turn(evil, 1.0), Turn(evil)], terminated=True)
    row = to_row(episode, letters, 120)
    control = letters.control
    assert [(row["tokens"] == token).sum() for token in control.ids()[1:]] == [1, 2, 1, 0, 1]
    assert from_row(row, letters) == episode


class Careless(CharTokenizer):
    """A tokenizer that reads control tokens out of texts, as it must not."""

    def encode(self, text):
        return [self.symbols.index(text)] if text in self.symbols else super().encode(text)


def test_a_careless_tokenizer_is_caught():
    with pytest.raises(ValueError, match="not allowed in a turn"):
        to_row(Episode([Turn("</a>", 1.0)], terminated=True), Careless.from_alphabet("a"), 8)


def test_token_rewards_are_added_to_what_the_agent_wrote(letters):
    episode = Episode([Turn("hi"), Turn("ab", 1.0)], terminated=True)
    row = to_row(episode, letters, 8, token_reward=lambda ids: [0.25] * len(ids))
    assert row["token_reward"].tolist() == [0, 0, 0, 0, 0.25, 0.25, 1.25, 0]
    assert from_row(row, letters).total_reward == 1.75


def test_episodes_that_no_row_can_hold(letters):
    short, long = Episode([Turn("a", 1.0)], True), Episode([Turn("abcdef", 1.0)], True)
    for call, message in (
        (lambda: Turn("a", -1e39), "finite"),
        (lambda: Turn("a", closed=False), "closed=False"),
        (lambda: Episode([Turn("a")], terminated=True, cut=True), "cut=True"),
        (lambda: to_row(Episode([Turn("", 1.0, closed=False)], True), WORDS, 8), "no token of the agent to place it"),
        (lambda: to_rows([short, long, short], letters, 5), r"1 of 3 episodes \(the first is 1\).* row_length of 9"),
        (lambda: to_row(short, letters, 8, token_reward=lambda ids: [0.0]), "returned 1 rewards for 4 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.warns(UserWarning, match="1 of 3 episodes"):
        rows = to_rows([short, long, short], letters, 5, on_overflow="truncate")
    assert rows["truncated"].flatten().tolist() == [False, True, False]
    assert rows["terminated"].flatten().tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("tokens", "agent", "terminated", "message"),
    [
        ("", "", False, "token, got 'nothing'"),
        ("ab", "..", False, "token, got 'a'"),
        ("Aab]", "....", False, "means that the agent has the first turn"),
        ("Sab)", ".xxx", False, "means that the environment has the first turn"),
        ("Aabab", ".xx..", False, "has tokens of both sides"),
        ("Aa)E", ".xx.", False, "'terminated' is False"),
    ],
)
def test_malformed_rows(tokens, agent, terminated, message):
    codes = {"A": WORDS.control.begin_action, ")": WORDS.control.end_of_action, "]": WORDS.control.end_of_state}
    codes |= {"S": WORDS.control.begin_state, "E": WORDS.control.end_of_dialogue, "a": 0, "b": 1}
    row = to_row(Episode([], terminated), WORDS, 8)
    row["attention_mask"] = torch.arange(8) < len(tokens)
    for place, (token, mine) in enumerate(zip(tokens, agent, strict=True)):
        row["tokens"][place], row["agent_mask"][place] = codes[token], mine == "x"
    with pytest.raises(ValueError, match=message):
        from_row(row, WORDS)


SAID = ["crane", "<b><g><g><b><g>", "xx", "abcdef", "geese", "<b><y><y><g><g>", "speed", "<y><b><y><y><b>"]
SAID += ["abide", "<y><b><b><b><g>"]
GAME = Episode([Turn(text, None if "<" in text else -1.0) for text in SAID], terminated=True)
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


OF_THE_PAPER = {5: (5, 4, 0), 9: (6, 5, 0), 13: (7, 6, -1), 20: (14, 13, -2)}
"""By width: states, actions and rewards that the paper's code keeps."""


def test_every_cut_keeps_exactly_the_actions_whose_successor_state_is_kept(wordle_symbols):
    whole = to_row(GAME, wordle_symbols, 60)
    for width in {*range(1, 60, 3), *OF_THE_PAPER}:
        with pytest.warns(UserWarning, match="1 of 1 episodes"):
            row = to_row(GAME, wordle_symbols, width, on_overflow="truncate")
        kept = [state for state in [*DECISIONS, 59] if state < width]
        # A lone state is a row without an action, which has no states to speak of.
        assert states(row) == (kept if len(kept) > 1 else [])
        length = int(row["attention_mask"].sum())
        assert length == kept[-1] + 1
        for key in ("tokens", "token_reward"):
            assert torch.equal(row[key][:length], whole[key][:length])
        assert (row["terminated"].item(), row["truncated"].item()) == (False, True)
        found = (len(states(row)), int(row["agent_mask"].sum()), row["token_reward"].sum())
        assert found == OF_THE_PAPER.get(width, found)
