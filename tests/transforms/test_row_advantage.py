"""Advantages of rows: by hand, by TorchRL's MCAdvantage, group by group, and drawn until groups differ."""

from __future__ import annotations

import pytest
import torch
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.objectives.llm import MCAdvantage

from torchrl_lang.data import row_returns, rows_from_rollout
from torchrl_lang.envs import WordleEnv
from torchrl_lang.envs.wordle import RandomWordPlayer
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
from torchrl_lang.transforms import RowAdvantage

WORDS = ["crane", "slate", "purge", "mouse", "point", "shirt"]
TOKENIZER = CharTokenizer.from_alphabet("abc")


def games(seed=0, group_size=4):
    env = WordleEnv(WORDS, batch_size=[16], group_size=group_size, seed=seed)
    steps = env.rollout(6, RandomWordPlayer(WORDS, seed=seed), break_when_any_done=False)
    return rows_from_rollout(steps, unfinished="drop")


def rows_of(rewards, groups):
    """Rows of turns ``a</a>`` with a reply between them; rewards of each turn."""
    turns = ([turn for reward in row for turn in (Turn("b"), Turn("a", reward))] for row in rewards)
    episodes = [Episode(each, terminated=True) for each in turns]
    return to_rows(episodes, TOKENIZER, 16).set("group", torch.tensor(groups))


def test_grpo_is_mcadvantage():
    rows = RowAdvantage(grpo_size=4).inv(games())
    steps = rows.clone().set("return", row_returns(rows)[:, None]).set("ended", torch.ones(len(rows), 1).bool())
    theirs = MCAdvantage(4, "group", "return", done_key="ended").inv(steps.set("number", torch.arange(len(rows))))
    expected = torch.empty(len(rows)).index_copy(0, theirs["number"], theirs["advantage"].squeeze(-1).float())
    assert len(rows) > 12
    torch.testing.assert_close(rows["advantage"], expected[:, None] * rows["agent_mask"])


# Two groups of two rows of two turns: returns 3 and 1, and 5 and 5 (discounted by 1/2: 2 and 1, and 4 and 3.5).
REWARDS = [[1.0, 2.0], [3.0, 4.0], [1.0, 0.0], [2.0, 3.0]]
GROUPS = [7, 2, 7, 2]
HALF = 0.5**0.5
BY_HAND = {
    "grpo": [[HALF] * 2, [HALF] * 2, [-HALF] * 2, [-HALF] * 2],
    "dr-grpo": [[1.0] * 2, [1.0] * 2, [-1.0] * 2, [-1.0] * 2],
    "rloo": [[2.0] * 2, [2.0] * 2, [-2.0] * 2, [-2.0] * 2],
    # Returns 3, 7, 1 and 5, of variance 20 / 3.
    "batch": [
        [-1 / (20 / 3) ** 0.5] * 2,
        [3 / (20 / 3) ** 0.5] * 2,
        [-3 / (20 / 3) ** 0.5] * 2,
        [1 / (20 / 3) ** 0.5] * 2,
    ],
    # The first turns begin in the state "b" and the second ones in "b", "a", "b": both rows of a group are compared.
    "gigpo": [[2 * HALF] * 2, [2 * HALF] * 2, [-2 * HALF] * 2, [-2 * HALF] * 2],
}


def at_turns(rows):
    """The advantages of the turns' first tokens, ``[N, 2]``; those of a turn must be equal."""
    advantage, agent = rows["advantage"], rows["agent_mask"]
    assert not advantage[~agent].any()
    found = advantage[agent].reshape(len(rows), 2, 2)
    assert torch.equal(found[..., 0], found[..., 1])
    return found[..., 0]


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    rows = rows_of(REWARDS, GROUPS)
    torch.testing.assert_close(at_turns(RowAdvantage(name).inv(rows)), torch.tensor(BY_HAND[name]))
    assert "advantage" not in rows.keys()


def test_discounts_returns_to_go_and_anchors():
    rows = rows_of(REWARDS, GROUPS)
    found = at_turns(RowAdvantage("dr-grpo", gamma=0.5).inv(rows))  # returns 2 and 1, 5 and 3.5
    torch.testing.assert_close(found[:, 0], torch.tensor([0.5, 0.75, -0.5, -0.75]))
    to_go = torch.tensor([[3.0, 2.0], [7.0, 4.0], [1.0, 0.0], [5.0, 3.0]])
    every = to_go.repeat_interleave(2)  # each turn has two tokens, which count
    found = at_turns(RowAdvantage("reinforce++").inv(rows))
    torch.testing.assert_close(found, (to_go - every.mean()) / every.std())
    found = at_turns(RowAdvantage("gigpo", anchor="observation", weight=2.0).inv(rows))
    group = to_go[[0, 2]].flatten()  # the environment writes the same before each turn
    expected = torch.tensor([HALF, -HALF])[:, None] + 2 * (to_go[[0, 2]] - group.mean()) / group.std()
    torch.testing.assert_close(found[[0, 2]], expected)
    found = at_turns(RowAdvantage("gigpo", gamma=0.5).inv(rows_of(REWARDS, [0] * 4)))
    steps = torch.tensor([[2.0, 2.0], [5.0, 4.0], [1.0, 0.0], [3.5, 3.0]])  # discounted; the rows' returns are not
    torch.testing.assert_close(found, torch.tensor(BY_HAND["batch"]) + (steps - steps.mean(0)) / steps.std(0))


def test_rows_wait_for_their_groups_in_a_replay_buffer():
    rows, advantage = games(), RowAdvantage("dr-grpo", grpo_size=4)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=advantage, batch_size=8)
    for part in rows.split(3):
        buffer.extend(part)
    number = rows["group"].unique(return_counts=True)[1]
    assert len(buffer) == number[number == 4].sum()
    assert len(advantage.waiting) == number[number < 4].sum()
    stored = buffer[:]
    assert stored["group"].unique(return_counts=True)[1].unique().tolist() == [4]
    expected = RowAdvantage("dr-grpo", grpo_size=4).inv(rows)
    for group in stored["group"].unique():
        mine, whole = (x["advantage"][x["group"] == group] for x in (stored, expected))
        assert torch.equal(mine, whole)
    sampled = buffer.sample()  # parts of groups, whose advantages stay
    assert sampled["advantage"].any()
    assert RowAdvantage(grpo_size=4).inv(rows[:1]) is None


def test_groups_of_equal_returns_are_drawn_again():
    equal, differ = rows_of([[1.0], [1.0]], [0, 0]), rows_of([[0.0], [1.0]], [1, 1])
    assert RowAdvantage(drop_equal=True).inv(equal) is None
    played = []

    def play(n):
        played.append(n)
        rows = torch.cat([equal, differ] if n % 2 else [equal, equal])
        return rows.set("group", rows["group"] + 10 * len(played))

    advantage = RowAdvantage(drop_equal=True)
    rows = advantage.draw(lambda: play(len(played)), 2)
    assert (len(played), len(rows), rows["group"].unique().tolist()) == (4, 4, [21, 41])
    assert advantage.draw(lambda: equal, 1, limit=3).shape == (0,)
    assert len(RowAdvantage().draw(lambda: equal, 1)) == 2
    # A penalty makes all returns differ: those before it decide.
    penalized = equal.clone().set("raw_reward", equal["token_reward"].clone())
    penalized["token_reward"][0] *= 0.5
    assert advantage.inv(penalized) is None
    assert RowAdvantage(drop_equal=True).inv(penalized.exclude("raw_reward"))["advantage"].any()


def test_what_is_missing_or_unknown_is_named():
    with pytest.raises(KeyError, match="'group'"):
        RowAdvantage().inv(rows_of(REWARDS, GROUPS).exclude("group"))
    for name in ("batch", "reinforce++"):
        RowAdvantage(name).inv(rows_of(REWARDS, GROUPS).exclude("group"))
    with pytest.raises(ValueError, match="advantage must be one of"):
        RowAdvantage("ppo")


def test_rewards_that_are_not_finite_are_refused_before_groups_are_compared():
    rows = rows_of(REWARDS, GROUPS)
    rows["token_reward"][0, 2] = float("nan")
    with pytest.raises(ValueError, match="token_reward is not finite"):
        RowAdvantage("grpo", drop_equal=True).inv(rows)


def test_tokens_that_do_not_train_are_not_counted_among_decisions():
    rows = rows_of([[0.0, 0.0], [1.0, 2.0]], [0, 0])
    rows["train_mask"] = rows["agent_mask"] & torch.tensor([[False], [True]])
    found = RowAdvantage("reinforce++").inv(rows)["advantage"][1][rows["agent_mask"][1]]
    # Each turn is a letter and its end; returns to go 3, 3, 2, 2 of the row that trains: mean 2.5, variance 1 / 3.
    torch.testing.assert_close(found, torch.tensor([3.0, 3.0, 2.0, 2.0]).sub(2.5).mul(3**0.5))


def test_several_plays_are_standardised_together():
    rows = rows_of(REWARDS, GROUPS)
    plays = iter([rows[[0, 2]], rows[[1, 3]]])
    drawn = RowAdvantage("reinforce++").draw(lambda: next(plays), 2)
    torch.testing.assert_close(drawn["advantage"], RowAdvantage("reinforce++").inv(rows[[0, 2, 1, 3]])["advantage"])


def test_rows_that_wait_are_in_the_state():
    rows, advantage = rows_of(REWARDS, GROUPS), RowAdvantage("rloo", grpo_size=2)
    assert RowAdvantage().state_dict()["_extra_state"] == {"waiting": None}
    assert advantage.inv(rows[:2]) is None
    other = RowAdvantage("rloo", grpo_size=2)
    other.load_state_dict(advantage.state_dict())
    found, expected = other.inv(rows[2:]), RowAdvantage("rloo").inv(rows)
    assert len(other.waiting) == 0
    assert torch.equal(found["advantage"], expected["advantage"])


def test_groups_that_are_never_complete_are_an_error():
    """Groups of four, taken for groups of three: each fourth row would wait for ever."""
    advantage = RowAdvantage(grpo_size=3, max_waiting=8)
    for number in range(8):
        rows = rows_of([[float(n)] for n in range(4)], [number] * 4)
        assert len(advantage.inv(rows[:3])) == 3
        assert advantage.inv(rows[3:]) is None
    with pytest.raises(ValueError, match="9 rows wait for groups of 3: grpo_size is not the environment's group_size"):
        advantage.inv(rows_of([[0.0]], [8]))
