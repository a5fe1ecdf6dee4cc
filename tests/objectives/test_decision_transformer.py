"""The decision transformer: against plain loops, by hand, and what conditioning on a return achieves."""

from __future__ import annotations

import pytest
import torch

from tests.objectives.models import CONTROL, VOCAB, WIDTH, by_hand, make_actor, make_dt, make_rows, vary
from tests.objectives.oracle import dt_loss, numpy_rows
from tests.objectives.test_ilql import of_oracle
from torchrl_lang import modules
from torchrl_lang.data import row_buffer
from torchrl_lang.functional.decisions import utterance_states
from torchrl_lang.functional.returns import return_conditions
from torchrl_lang.modules import ReturnConditionedActor, ReturnEmbedding, UtteranceActor, condition_on_returns
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.save import language_model_of
from torchrl_lang.objectives import BCLoss, DecisionTransformerLoss
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
from torchrl_lang.training import adamw, train_steps

MODES = ("constant", "decremented")


# -- the returns, by hand ----------------------------------------------------------------------------------------------

# Position:           0     1  2  3     4     5  6  7     8     9
# The agent wrote:          x  x  .     .     x  x  .     x     x        two utterances, then one that the row cuts off
AGENT = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 0, 1, 1]]).bool()
REWARD = torch.tensor([[0.0, 0.25, 1.0, 0, 0, 0, 2.0, 0, 0, -4.0]])
REAL = torch.ones(1, 10, dtype=torch.bool)


def placed(found):
    return dict(zip(found.mask[0].nonzero().flatten().tolist(), found.returns[found.mask].tolist(), strict=True))


def test_returns_by_hand():
    assert placed(return_conditions(REAL, AGENT, REWARD, "constant")) == {0: -0.75}
    assert placed(return_conditions(REAL, AGENT, REWARD, "decremented")) == {0: -0.75, 4: -2.0, 7: -4.0}


def test_the_state_that_a_policy_is_asked_in_carries_a_return_before_the_agent_writes():
    """The same at every earlier state, whatever follows: a cache of the row stays valid."""
    target = torch.tensor([[10.0]])
    whole = placed(return_conditions(REAL, AGENT, REWARD, "decremented", target=target))
    assert whole == {0: 10.0, 4: 8.75, 7: 6.75}
    for length, states in ((1, [0]), (5, [0, 4]), (8, [0, 4, 7])):
        real = torch.arange(10) < length
        entries, options = (REAL & real, AGENT & real, REWARD * real), {"target": target, "continued": True}
        found = return_conditions(*entries, "decremented", **options)
        assert placed(found) == {state: whole[state] for state in states}


def test_utterances_with_nothing_between_them_are_split_by_their_end():
    tokens = torch.tensor([[3, 7, 1, 8, 1, 2]])
    agent, real = torch.tensor([[0, 1, 1, 1, 1, 0]]).bool(), torch.ones(1, 6, dtype=torch.bool)
    assert utterance_states(real, agent).nonzero()[:, 1].tolist() == [0]
    assert utterance_states(real, agent, tokens, end_of_action=1).nonzero()[:, 1].tolist() == [0, 2]
    unfinished = by_hand(tokens[:, :5], agent[:, :5])
    policy = ReturnConditionedActor(UtteranceActor(make_dt().actor_network, CONTROL, 4), 3.0)
    assert (policy.conditioned(unfinished)["tokens"] >= VOCAB).nonzero()[:, 1].tolist() == [0, 2, 4]


# -- against loops -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transition_weight": 0.4},
        {"actor_normalizer": "action"},
        {"end_of_action": 3},
        {"end_of_action": 3, "transition_weight": 0.4, "logits_chunk": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("variant", ["all", "train-mask"])
def test_it_equals_plain_loops(mode, options, variant):
    rows = make_rows(8)
    rows["token_reward"] = rows["token_reward"].double()
    rows["tokens"] = torch.where(rows["agent_mask"] & (rows["tokens"] % 3 == 0), 3, rows["tokens"])
    vary(rows, variant)
    loss = make_dt(mode, **options).double()
    lm, returns = language_model_of(loss.actor_network), split_actor(loss.actor_network).trunk.module.returns
    expected = dt_loss(numpy_rows(rows), lm.double(), returns, **of_oracle(options))
    assert float(loss(rows)["loss_actor"].detach()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_without_an_embedding_of_returns_it_is_behaviour_cloning(mode):
    rows = make_rows()
    plain = BCLoss(make_actor(), transition_weight=0.2)(rows)["loss_actor"]
    actor = condition_on_returns(make_actor(), ReturnEmbedding(WIDTH, -20.0, 20.0, mode=mode))
    begun = DecisionTransformerLoss(actor, transition_weight=0.2)
    assert torch.equal(begun(rows)["loss_actor"], plain)  # a new embedding is zero
    begun(rows)["loss_actor"].backward()
    assert all(p.grad.any() for p in actor[0].module.returns.parameters())
    assert not torch.isclose(make_dt(mode, transition_weight=0.2)(rows)["loss_actor"], plain)


# -- wrong arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_returns_outside_the_range_are_named(mode):
    rows, actor = make_rows(), make_actor()
    returns = ReturnEmbedding(WIDTH, -0.1, 0.1, mode=mode)
    loss = DecisionTransformerLoss(condition_on_returns(actor, returns))
    loss(rows.clone().set("token_reward", torch.zeros_like(rows["token_reward"])))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a return outside \[-0.1, 0.1\].*at position \d+: .*wider low and high"):
            loss(rows)
    alone = rows.clone().set(("collector", "mask"), ~rows["agent_mask"].any(-1))  # the row without actions
    assert loss(alone)["loss_actor"].isfinite()
    beyond = ReturnEmbedding(WIDTH, 1.0, 2.0, mode=mode)
    assert DecisionTransformerLoss(condition_on_returns(make_actor(), beyond))(rows[:0])["loss_actor"] == 0


# -- known answers -----------------------------------------------------------------------------------------------------

TOKENIZER = CharTokenizer.from_alphabet("abx")


def trained(rows, mode, steps):
    torch.manual_seed(0)
    shape = {"layers": 1, "width": 32, "heads": 2, "max_length": 24}
    lm = modules.causal_lm(vocab_size=TOKENIZER.vocab_size, **shape, initializer_range=0.15)
    totals = rows["token_reward"].sum(-1)
    returns = ReturnEmbedding(32, min(float(totals.min()), 0.0), float(totals.max()), mode=mode)
    actor = condition_on_returns(modules.language_actor(lm), returns)
    loss = DecisionTransformerLoss(actor, actor_normalizer="action", end_of_action=TOKENIZER.control.end_of_action)
    buffer = row_buffer(rows, 32, seed=0)
    for _ in train_steps(loss, buffer.sample, adamw(loss, 5e-3), steps=steps, max_grad_norm=1.0):
        pass
    return UtteranceActor(actor, TOKENIZER.control, 2)


def chance(actor, target, row, letter):
    """Probability that the policy, asked for a return, writes the letter."""
    action = torch.tensor([[*TOKENIZER.encode(letter), TOKENIZER.control.end_of_action]])
    policy = ReturnConditionedActor(actor, target)
    with torch.no_grad():
        return float(policy.get_dist(row).log_prob(action.expand(len(row), -1))[0].exp())


def of(*turns, width=16):
    """A row of turns ``(text, reward)``; the environment's have reward None."""
    return to_rows([Episode([Turn(*turn) for turn in turns], terminated=False, truncated=True)], TOKENIZER, width)


@pytest.mark.slow
def test_returns_to_go_resolve_what_a_constant_return_leaves_open():
    """The first turn earns 0 or 1, which the transcript does not show; in the second ``a`` earns 0 and ``b`` 1.

    A constant return of 1 came from (0, b) and (1, a) alike. With the return to go the remaining reward decides.
    """
    rows = torch.cat(
        [
            of(("x", None), ("x", first), ("x", None), (letter, second))
            for first in (0.0, 1.0)
            for letter, second in (("a", 0.0), ("b", 1.0))
        ]
        * 2
    )
    unlucky, lucky = (of(("x", None), ("x", first), ("x", None)) for first in (0.0, 1.0))
    assert torch.equal(unlucky["tokens"], lucky["tokens"])
    constant = trained(rows, "constant", 60)
    for row in (unlucky, lucky):
        assert 0.35 < chance(constant, 1.0, row, "a") < 0.65
        assert chance(constant, 2.0, row, "b") > 0.9
        assert chance(constant, 0.0, row, "a") > 0.9
    decremented = trained(rows, "decremented", 50)
    assert chance(decremented, 1.0, unlucky, "b") > 0.9  # 1 remains
    assert chance(decremented, 1.0, lucky, "a") > 0.9  # nothing remains
    assert chance(decremented, 2.0, lucky, "b") > 0.9
