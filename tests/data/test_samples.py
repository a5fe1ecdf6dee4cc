"""Samples in trlx's form become episodes whose rows hold the reward at the end of the last output."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.data.chat_templates import EXACT, chat, tokenizer_of
from tests.envs.helpers import PROMPTS, prompt_env
from torchrl_lang.data import from_samples, rows_from_rollout, rows_from_triples
from torchrl_lang.functional import group_advantages
from torchrl_lang.modules import StopStrings, UtteranceActor, causal_lm, language_actor, row_log_prob
from torchrl_lang.text import CharTokenizer, ChatTokenizer, Episode, RowFormat, Turn, from_row

TOKENIZER = CharTokenizer.from_alphabet("abc")


def test_prompts_and_outputs_alternate():
    """Without a prompt the agent begins."""
    long, *short = from_samples([["a", "b", "c", "a"], "ab", ("", "ab")], [2, 0.5, 0.5])
    assert long == Episode([Turn("a"), Turn("b", 0.0), Turn("c"), Turn("a", 2.0)], terminated=True)
    assert short == [Episode([Turn("ab", 0.5)], terminated=True)] * 2
    for sample in ([], ["a", "b", "c"], ["a", 3]):
        with pytest.raises(ValueError, match="Sample 1 must be a text, or prompts and outputs in turn"):
            from_samples(["a", sample], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"reward of sample 1 must be one number, got \[1.0\]"):
        from_samples(["a", "b"], [1.0, [1.0]])


LETTERS = CharTokenizer.from_alphabet("abcdef")
CONTROL = LETTERS.control
END, PAD = CONTROL.end_of_action, CONTROL.pad
T, K = 14, 4


def make_policy(tokenizer=LETTERS, width=T, **options):
    torch.manual_seed(0)
    lm = causal_lm(
        vocab_size=tokenizer.vocab_size, layers=1, width=16, heads=2, max_length=width + K, initializer_range=0.3
    )
    return UtteranceActor(language_actor(lm), tokenizer.control, K, seed=0, **options)


def play(policy, tokenizer=LETTERS, width=T, batch=64):
    """Steps of a prompt environment, whose reward depends on both texts, and the rows of its episodes."""
    env = prompt_env([batch], tokenizer=tokenizer, row_length=width, action_length=K, seed=1)
    steps = env.rollout(1, policy, break_when_any_done=False)
    rows = rows_from_rollout(steps, unfinished="drop", carry=["token_log_prob"])
    return steps[:, 0], rows, [PROMPTS[seed] for seed in env.game_seed.tolist()]


@pytest.mark.parametrize(
    ("query", "response"),
    [("ab", "cd"), ([0, 1], [2, 3, END]), (torch.tensor([0, 1]), torch.tensor([2, 3, END], dtype=torch.int32)),
     (np.array([0, 1]), np.array([2, 3, END, PAD, PAD]))],
)  # fmt: skip
def test_a_row_written_out(query, response):
    row = rows_from_triples([query], [response], [0.5], LETTERS, 10)[0]
    begin, end_of_state, end_of_dialogue = CONTROL.begin_state, CONTROL.end_of_state, CONTROL.end_of_dialogue
    assert row["tokens"].tolist() == [begin, 0, 1, end_of_state, 2, 3, END, end_of_dialogue, PAD, PAD]
    assert row["attention_mask"].tolist() == [True] * 8 + [False] * 2
    assert row["agent_mask"].tolist() == [False] * 4 + [True] * 3 + [False] * 3
    assert row["token_reward"].tolist() == [0.0] * 6 + [0.5] + [0.0] * 3
    assert (row["terminated"].tolist(), row["truncated"].tolist()) == ([True], [False])
    assert row["tokens"].dtype == row["group"].dtype == torch.int64


def assert_equal_rows(triples, rows):
    for key in ("tokens", "attention_mask", "agent_mask", "token_reward", "terminated", "truncated", "token_log_prob"):
        assert torch.equal(triples[key], rows[key]), key


@pytest.mark.parametrize("stop", [None, "a"])
def test_rows_of_sampled_ids_equal_those_of_an_environment(stop):
    """With ``stop`` some utterances end without an end-of-action token, which the environment writes."""
    policy = make_policy(stop=None if stop is None else StopStrings([stop], LETTERS))
    steps, rows, queries = play(policy)
    actions, log_probs = steps["action"], steps["token_log_prob"]
    is_cut = (actions != END).all(-1)
    assert bool(is_cut.any()) == (stop is not None)
    assert len(set((actions != PAD).sum(-1).tolist())) > 1, "all lengths are alike"
    rewards = steps["next", "reward"].squeeze(-1)
    found = rows_from_triples(queries, actions, rewards, LETTERS, T, log_probs=log_probs)
    assert_equal_rows(found, rows)
    lists = [[i for i in ids if i != PAD] for ids in actions.tolist()]
    their = [log_probs[n, : len(ids)].tolist() for n, ids in enumerate(lists)]
    assert_equal_rows(rows_from_triples(queries, lists, rewards.tolist(), LETTERS, T, log_probs=their), rows)
    if stop is None:  # the log-probability of a stopped utterance's last token is that of all its ends
        with torch.no_grad():
            again = row_log_prob(policy, found.exclude("token_log_prob"))
        torch.testing.assert_close(again, found["token_log_prob"], rtol=0, atol=1e-5)


def test_rows_of_a_chat_equal_those_of_an_environment():
    source = tokenizer_of(EXACT["chatml"])
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source, system="Complete."))
    steps, rows, queries = play(make_policy(tokenizer, 64), tokenizer, 64, batch=8)
    rewards, log_probs = steps["next", "reward"][:, 0], steps["token_log_prob"]
    messages = [[{"role": "system", "content": "Complete."}, *chat(text)[-1:]] for text in queries]
    prompts = [source.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]
    for asked in (queries, prompts):
        found = rows_from_triples(asked, steps["action"], rewards, tokenizer, 64, log_probs=log_probs)
        assert_equal_rows(found, rows)


def test_random_triples_return_from_their_rows():
    """Each part of a triple is where the masks point to."""
    draw = np.random.default_rng(0)
    triples = []
    for _ in range(60):
        query, own = (draw.integers(0, 6, draw.integers(0, 5)).tolist() for _ in range(2))
        response = [*own, END] if draw.random() < 0.5 or not own else own
        triples.append((query, response, draw.normal(size=len(response)), -draw.exponential(size=len(response))))
    queries, responses, rewards, log_probs = map(list, zip(*triples, strict=True))
    rows = rows_from_triples(queries, responses, rewards, LETTERS, T, log_probs=log_probs)
    for row, query, response, reward, log_prob in zip(rows, queries, responses, rewards, log_probs, strict=True):
        agent = row["agent_mask"]
        assert row["tokens"][agent].tolist() == response
        np.testing.assert_allclose(row["token_reward"][agent], reward, rtol=1e-6)
        np.testing.assert_allclose(row["token_log_prob"][agent], log_prob, rtol=1e-6)
        assert not row["token_reward"][~agent].any()
        assert not row["token_log_prob"][~agent].any()
        turns = from_row(row, LETTERS).turns
        own = [LETTERS.decode(query)] if query else []
        assert [turn.text for turn in turns] == [*own, LETTERS.decode([i for i in response if i != END])]
        assert turns[-1].closed == (response[-1] == END)


def test_equal_queries_are_a_group():
    begun_alike = rows_from_triples(["a", "ab", "ac", "abc", "b", "ab"], ["b"] * 6, [0.0] * 6, LETTERS, T)
    assert begun_alike["group"].tolist() == [0, 1, 2, 3, 4, 1]
    queries = ["ab", "c", [0, 1], "", "c", torch.tensor([], dtype=torch.int64), "ab"]
    returns = torch.tensor([1.0, 4.0, 2.0, 7.0, 0.0, 9.0, 6.0])
    rows = rows_from_triples(queries, ["a"] * 7, returns, LETTERS, T)
    assert rows["group"].tolist() == [0, 1, 0, 2, 1, 2, 0]
    # Group 0: 1, 2 and 6, with mean 3 and variance (4 + 1 + 9) / 2; group 1: 4 and 0, mean 2, variance 8; group 2:
    # 7 and 9, mean 8, variance 2.
    a, b = 7**-0.5, 2**-0.5
    expected = torch.tensor([-2 * a, b, -a, -b, -b, b, 3 * a])
    torch.testing.assert_close(group_advantages(rows["token_reward"].sum(-1), rows["group"]), expected)


NAN = float("nan")
GOOD = {"queries": ["ab", "c"], "responses": [[0, END], [1, 2]], "rewards": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"responses": [[0, END]]}, "got 2 queries, 1 responses, 2 rewards"),
        ({"responses": ["a", ""]}, r"Response 1 is empty: leave it out, or give the ids \[7\]"),
        ({"responses": [[0], [END, 1]]}, "Response 1 contains the control tokens"),
        ({"responses": [[0], [1.5]]}, "Response 1 must be a text or ids"),
        ({"responses": [[0], [12]]}, r"Row 1 has a token id out of range at position 3: ids lie in \[0, 12\)"),
        ({"queries": ["ab", [CONTROL.begin_state, 0]]}, r"Query 1 contains the control tokens \[9\]"),
        ({"responses": [[0], [1] * 9]}, r"1 of 2 triples \(the first is 1\) .* row_length=10 .* row_length of 14"),
        ({"rewards": [1.0, NAN]}, "Reward 1 is .*nan.*must be finite"),
        ({"rewards": [1.0, [0.0, 1.0, 2.0]]}, r"Reward 1 has the shape \[3\], but its response is 2 ids"),
        ({"responses": [[0, PAD], "ab"], "rewards": [[0.0, 1.0], 1.0]}, "Reward 0 is .*, not 0 on padding"),
        ({"responses": ["a", "b"], "rewards": [0.0, [1.0, 1.0]]}, "Reward 1 .* its response is a text"),
        ({"log_probs": [[-1.0, -1.0], [-1.0]]}, r"Log-probability 1 has the shape \[1\], but its response is 2 ids"),
        ({"log_probs": [[-1.0, 0.5], [-1.0, 0.0]]}, "Log-probability 0 is .* at most 0"),
    ],
)  # fmt: skip
def test_bad_triples(changed, reason):
    given = {"row_length": 10, **GOOD, **changed}
    with pytest.raises(ValueError, match=reason):
        rows_from_triples(**given, tokenizer=LETTERS)


@pytest.mark.parametrize("rewards", [[1, 2], torch.tensor([1, 2]), np.array([1.0, 2.0]), [torch.tensor(1.0), True + 1],
                                     torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True),
                                     [[0, 1], [0, 2]], torch.tensor([[0, 1], [0, 2]])])  # fmt: skip
def test_rewards_of_any_kind(rewards):
    rows = rows_from_triples(["a", "b"], [[1, END], [2, END]], rewards, LETTERS, 10)
    assert rows["token_reward"].dtype == torch.float32
    assert rows["token_reward"][rows["agent_mask"]].tolist() == [0.0, 1.0, 0.0, 2.0]
