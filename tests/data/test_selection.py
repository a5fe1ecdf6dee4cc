"""The best episodes: by hand, whatever the order and the padding, all at once or piece by piece."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from torchrl_lang.data import BestRows, LatestRows, best_rows, preference_pairs, row_buffer, row_returns
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
from torchrl_lang.training import Checkpointer

WORDS = CharTokenizer.from_alphabet("abcdef")
WIDTH = 16


def episode(*rewards, terminated=True):
    """The agent says a letter for each reward, the environment answers."""
    turns = [turn for reward in rewards for turn in (Turn("a", reward=reward), Turn("bc"))]
    return Episode(turns[:-1], terminated)


def numbered(episodes, **entries):
    """Rows with their numbers beside them."""
    rows = to_rows(episodes, WORDS, WIDTH)
    return rows.update({"number": torch.arange(len(rows)), **entries})


def numbers(rows):
    return rows["number"].tolist()


def of_returns(*returns, **entries):
    return numbered([episode(r) for r in returns], **entries)


def test_returns_by_hand():
    """Rewards by turn 1, 2, 4: 1 + 2/2 + 4/4. Every token of a turn has the turn's discount."""
    rows = numbered([episode(1.0, 2.0, 4.0), episode(0.0, 0.0, 8.0), episode(3.0)])
    assert row_returns(rows).tolist() == [7.0, 8.0, 3.0]
    assert row_returns(rows, gamma=0.5).tolist() == [3.0, 2.0, 3.0]
    assert row_returns(rows[None], gamma=0.5).tolist() == [[3.0, 2.0, 3.0]]
    assert numbers(best_rows(rows, 1)) == [1]
    assert numbers(best_rows(rows, 2, gamma=0.5)) == [0, 2]
    agent = torch.tensor([[False, True, True, True, True, False, True]])
    row = TensorDict(tokens=torch.tensor([[0, 7, 9, 7, 9, 0, 9]]), attention_mask=agent | True, agent_mask=agent,
                     shaped=torch.tensor([[0.0, -1.0, -1.0, -1.0, -3.0, 0.0, -4.0]]), batch_size=[1])  # fmt: skip
    assert row_returns(row, gamma=0.5, reward_key="shaped").tolist() == [-8.0]
    # Turns without an answer between them are told apart by their end.
    assert row_returns(row, gamma=0.5, reward_key="shaped", end_of_action=9).tolist() == [-5.0]


def test_number_and_fraction_and_groups_by_hand():
    rows = of_returns(0.0, 2.0, 1.0, 2.0, -1.0, 2.0, group=torch.tensor([0, 0, 7, 7, 0, 7]))
    assert numbers(best_rows(rows, 2)) == [1, 3]
    assert numbers(best_rows(rows, 99)) == [0, 1, 2, 3, 4, 5]
    assert numbers(best_rows(rows, 1, per="group")) == [1, 3]
    assert numbers(best_rows(rows, 2, per="group")) == [0, 1, 3, 5]
    assert numbers(best_rows(rows, fraction=1 / 3, per=rows["group"][:, None])) == [1, 3]
    assert numbers(best_rows(rows, fraction=1e-9, per="group")) == [1, 3]  # at least one of each
    assert numbers(best_rows(rows, 1, by=torch.tensor([1, 2, 3, 4, 6, 5]))) == [4]


@pytest.mark.parametrize(("top", "bottom"), [(0.3, None), (None, 0.25), (0.5, 0.59), (0.29, 1.0), (1.0, 0.001)])
@pytest.mark.parametrize("n", [7, 100])
def test_shares_are_those_of_the_paper_s_code(top, bottom, n):
    """First the worst ``int(bottom_p * N)``, then the best ``int(top_p * N)`` of them; at least one is kept."""
    returns = [float(r) for r in torch.randperm(n, generator=torch.Generator().manual_seed(n)).tolist()]
    left = sorted(range(n), key=returns.__getitem__)
    if bottom is not None:
        left = left[: max(1, int(len(left) * bottom))]
    if top is not None:
        left = left[-max(1, int(len(left) * top)) :]
    assert numbers(best_rows(of_returns(*returns), fraction=top, bottom_fraction=bottom)) == sorted(left)


def opened(*starts, **entries):
    """The environment says a text, the agent answers something else each time and earns a reward."""
    games = enumerate(zip(starts[::2], starts[1::2], strict=True))
    answered = [(text, "abc"[number % 3] + "abc"[number // 3 % 3], reward) for number, (text, reward) in games]
    return numbered([Episode([Turn(text), Turn(answer, earned)], True) for text, answer, earned in answered], **entries)


def test_pairs_by_hand():
    """Best with worst, second best with second worst; no pair of equal returns, of other beginnings or groups."""
    rows = opened("b", 1.0, "c", 5.0, "b", 3.0, "b", 2.0, "c", 5.0, "b", 0.0, "bb", 7.0)
    pairs = preference_pairs(rows)
    assert pairs.shape == (1, 2)
    assert numbers(pairs) == [[2, 5]]
    assert numbers(preference_pairs(rows, None)) == [[2, 5], [3, 0]]
    rows["group"] = torch.tensor([0, 0, 4, 0, 0, 4, 4])[:, None]
    for per in (None, "group"):
        assert numbers(preference_pairs(rows, None, per=per)) == [[3, 0], [2, 5]]
    assert numbers(preference_pairs(rows, None, per=torch.zeros(7).long())) == [[2, 5], [3, 0]]
    assert numbers(preference_pairs(rows, by=torch.tensor([1, 2, 1, 1, 3, 1, 9]))) == [[4, 1]]
    assert preference_pairs(rows[:2]).shape == preference_pairs(rows[:0]).shape == (0, 2)
    silent = numbered([Episode([Turn("b")], True), *[Episode([Turn("b"), Turn("ab"[r], r)], True) for r in (0, 1)]])
    assert numbers(preference_pairs(silent, None)) == [[2, 1]]
    same = numbered([Episode([Turn("b"), Turn("a", r)], True) for r in (0.0, 1.0)])
    assert len(preference_pairs(same)) == 0  # nothing to learn


def test_a_buffer_samples_pairs():
    rows = opened(*[value for r in range(10) for value in ("b" * (1 + r // 2), float(r))])
    pairs = preference_pairs(rows, None)
    assert sorted(row_returns(pairs).tolist()) == [[r + 1.0, r] for r in range(0, 10, 2)]
    for options in ({}, {"bucket": True, "drop_last": True}):
        buffer = row_buffer(pairs, 2, **options)
        batches = [*buffer]
        assert [len(batch) for batch in batches] == [2, 2, 1][: 3 - len(options) // 2]
        assert all(batch["tokens"].shape == (len(batch), 2, batch["attention_mask"].sum(-1).max()) for batch in batches)
        seen = [pair for batch in batches for pair in numbers(batch)]
        assert all(chosen == rejected + 1 for chosen, rejected in seen)
        assert len({chosen for chosen, _ in seen}) == len(seen)
    with pytest.raises(ValueError, match=r"rows of batch size \[N\], or pairs \[N, 2\], got \[2, 5\]"):
        row_buffer(rows.reshape(2, 5), 2)


RETURNS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12)


def drawn(pairs):
    """Few different returns, so that there are ties, and few groups."""
    return of_returns(*(0.5 * r for r, _ in pairs), group=torch.tensor([g for _, g in pairs]))


@settings(max_examples=25, deadline=None)
@given(RETURNS, st.integers(1, 5), st.booleans(), st.randoms(use_true_random=False))
def test_order_changes_nothing_but_ties_and_padding_nothing(pairs, n, grouped, random):
    rows, per = drawn(pairs), "group" if grouped else None
    best = best_rows(rows, n, per=per)
    order = list(range(len(pairs)))
    random.shuffle(order)
    shuffled = best_rows(rows[order], n, per=per)

    def kinds(chosen):
        groups = chosen["group"] if grouped else torch.zeros_like(chosen["group"])
        return sorted(zip(row_returns(chosen).tolist(), groups.tolist(), strict=True))

    assert kinds(shuffled) == kinds(best)
    wide = rows.exclude("group", "number", "terminated", "truncated")
    wide = wide.apply(lambda x: torch.nn.functional.pad(x, (0, 9))).update(rows.select("group", "number"))
    assert numbers(best_rows(wide, n, per=per)) == numbers(best)
    garbage = rows.clone()
    garbage["token_reward"] = torch.where(rows["agent_mask"], rows["token_reward"], 77.0)
    assert numbers(best_rows(garbage, n, per=per)) == numbers(best)


@settings(max_examples=25, deadline=None)
@given(RETURNS, st.integers(1, 6), st.sampled_from([None, "group"]), st.lists(st.integers(0, 12), max_size=3))
def test_in_pieces_as_at_once(pairs, capacity, per, cuts):
    rows, pieces = drawn(pairs), BestRows(capacity, per=per)
    edges = sorted({0, len(pairs), *(min(cut, len(pairs)) for cut in cuts)})
    for begin, end in pairwise(edges):
        pieces.extend(rows[begin:end])
    assert numbers(pieces.rows) == numbers(best_rows(rows, capacity, per=per))


@pytest.mark.parametrize("cuts", [(5,), (2, 3), (1, 1, 1, 1, 1), (0, 4, 1)])
def test_the_latest_rows_are_kept_in_their_order(cuts):
    rows, pool, first = of_returns(5.0, 1.0, 4.0, 2.0, 3.0), LatestRows(3), 0
    for number in cuts:
        pool.extend(rows[first : first + number])
        first += number
    assert numbers(pool.rows) == [2, 3, 4]
    rows["number"].zero_()
    assert numbers(pool.rows) == [2, 3, 4]


@pytest.mark.parametrize("kind", [BestRows, LatestRows])
def test_a_resumed_pool_goes_on_as_one_never_stopped(kind, tmp_path):
    pieces = [of_returns(*torch.randn(4, generator=torch.Generator().manual_seed(s)).tolist()) for s in range(4)]
    for piece in pieces:
        piece["beside", "figure"] = piece["token_reward"].clone()
    straight, stopped, resumed = kind(3), kind(3), kind(3)
    checkpointer = Checkpointer(tmp_path).register("pool", stopped)
    for step, piece in enumerate(pieces):
        straight.extend(piece)
        if step < 2:
            stopped.extend(piece)
    checkpointer.save(2)
    assert Checkpointer(tmp_path).register("pool", resumed).restore() == 2
    for piece in pieces[2:]:
        resumed.extend(piece)
    assert (resumed.rows == straight.rows).all()
    assert resumed.rows["beside", "figure"].shape == (3, WIDTH)
    state = straight.state_dict()
    state["rows"]["token_reward"].zero_()
    assert straight.rows["token_reward"].any()
    empty = kind(2)
    resumed.load_state_dict(empty.state_dict())
    assert len(resumed) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda rows: best_rows(rows), "either n or fraction"),
        (lambda rows: best_rows(rows, 1, fraction=0.5), "either n or fraction"),
        (lambda rows: best_rows(rows, 0), "n must"),
        (lambda rows: best_rows(rows, 1, per=torch.zeros(3, dtype=torch.int64)), "one integer per row"),
        (lambda rows: best_rows(rows, 1, reward_key="raw"), "A row needs 'raw'"),
        (lambda rows: best_rows(rows, 1, by=torch.tensor([float("nan"), 1.0])), "got 1 NaN"),
        (lambda rows: BestRows(2).rows, "call extend"),
        (lambda rows: BestRows(2).extend(rows).extend(rows.exclude("number")), r"\['number'\] are in"),
        (lambda rows: LatestRows(2).extend(rows.exclude("number")).extend(rows), r"\['number'\] are in"),
    ],
)
def test_what_selects_nothing_sensible(call, message):
    with pytest.raises((ValueError, KeyError, RuntimeError), match=message):
        call(of_returns(1.0, 2.0))
