"""What all losses over rows share: options, actors, how far a row is read, whose rewards count."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.objectives import ValueEstimators
from transformers import GPT2Model

from tests.modules.toys import without_blocks
from tests.objectives import models
from tests.objectives.models import CONTROL, VOCAB, make_actor, make_bc, make_heads, make_ilql, make_oreo, make_ppo
from tests.objectives.test_contract import with_rewards_of_others
from torchrl_lang.data import EpisodeRows, best_rows, row_buffer, row_returns
from torchrl_lang.envs import WordleEnv
from torchrl_lang.envs.random_walks import RandomWalksEnv, walk_optimality
from torchrl_lang.evaluation import value_report
from torchrl_lang.functional.returns import return_conditions
from torchrl_lang.modules import UtteranceActor, ValueGuidance, ValueHead, causal_lm, language_actor, value_module
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.objectives import ILQLLoss, PPOLoss, policy
from torchrl_lang.objectives.networks import gather_inputs
from torchrl_lang.training import train_steps
from torchrl_lang.transforms import AdaptiveKLController, KLConstrainedTransform, RowReference, frozen_copy

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")


@pytest.fixture
def rows():
    return models.rows_for("ppo")


BAD_OPTIONS = [
    (make_ilql, "gamma expectile lmbda turn_gamma turn_lmbda qvalue_lmbda", 1.5),
    (make_ilql, "value_weight qvalue_weight cql_weight margin_weight actor_weight transition_weight", -1.0),
    (make_ilql, "cql_temperature weight_clip", 0.0),
    (make_ilql, "margin value_min value_max advantage_temperature", math.nan),
    (make_ilql, "target advantage_weighting actor_normalizer reduction logits_chunk", "other"),
    (make_ilql, "end_of_action", VOCAB),
    (make_ppo, "turn_gamma turn_lmbda clip_epsilon", 1.5),
    (make_ppo, "clip_epsilon value_clip value_weight entropy_weight kl_weight", math.nan),
    (make_ppo, "bootstrap kl_estimator loss_critic_type ratio surrogate aggregation", "other"),
    (make_ppo, "aggregation max_engine_weight", 0),
    (make_ppo, "clip_epsilon", (0.2, math.inf)),
    (make_bc, "transition_weight kl_weight", math.nan),
    (make_bc, "logits_chunk", 0),
    (make_bc, "logits_chunk", True),
    (models.make_cql, "cql_weight cql_temperature", -1.0),
    (models.make_bcq, "threshold", 1.5),
    (models.make_psi, "threshold reward_scale", -0.1),
    (models.make_qsft, "threshold rest end_of_action", -1),
    (make_oreo, "value_weight actor_weight kl_weight", -0.1),
    (make_oreo, "level", "other"),
    (models.make_chai, "gamma cql_weight qvalue_weight", math.nan),
    (models.make_utterance_ilql, "expectile gamma weight_clip", -1.0),
]


@pytest.mark.parametrize(("build", "names", "value"), BAD_OPTIONS)
def test_options_out_of_range_are_named(build, names, value):
    for name in names.split():
        with pytest.raises(ValueError, match=rf"^{name}\b.*got|^{name}=.* is no token id"):
            build(**{name: value})


def test_terms_of_weight_zero_have_the_dtype_of_the_others(rows):
    out = make_ppo(entropy_weight=0.0).double()(rows)
    assert {out[key].dtype for key in out.keys() if key.startswith("loss_")} == {torch.float64}


@pytest.mark.parametrize("build", [make_ilql, models.make_utterance_ilql])
def test_weights_by_sign_are_larger_where_the_advantage_is(build):
    for temperature in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"must be above 0 and at most 1, got {temperature}"):
            build(advantage_weighting="sign", advantage_temperature=temperature)


@pytest.mark.parametrize("name", ["token_reward", "token_log_prob", "advantage", "value_target"])
def test_entries_that_are_not_finite(rows, name):
    row, position = rows["agent_mask"].nonzero()[3].tolist()
    rows[name][row, position] = math.nan
    calls = [make_ilql(), make_ppo().estimate] if name == "token_reward" else [make_ppo()]
    for call in calls:
        with pytest.raises(ValueError, match=rf"Row {row} has .* that is not finite at position {position}"):
            call(rows)


def test_value_estimators_by_torchrls_names(rows):
    clocks = {"gamma": 0.9, "lmbda": 0.8, "turn_gamma": 0.7, "turn_lmbda": 0.6}
    for kind, given, expected in (
        (ValueEstimators.GAE, clocks, clocks),
        (ValueEstimators.TD0, {"turn_gamma": 0.5}, {"turn_gamma": 0.5, "lmbda": 0.0, "turn_lmbda": 0.0}),
        (ValueEstimators.TD1, {}, {"lmbda": 1.0, "turn_lmbda": 1.0}),
    ):
        loss = make_ppo()
        assert loss.make_value_estimator(kind, **given) is loss
        found = loss.estimate(rows.clone())["advantage"]
        torch.testing.assert_close(found, make_ppo(**expected).estimate(rows.clone())["advantage"])
    loss, other = make_ilql(), make_ilql(target="lambda", lmbda=0.5, gamma=0.8)
    loss.make_value_estimator(ValueEstimators.TDLambda, lmbda=0.5, gamma=0.8)
    torch.testing.assert_close(loss(rows)["loss_value"], other(rows)["loss_value"])
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got nan"):
        make_ppo().make_value_estimator(gamma=math.nan)
    for make in (make_ppo, make_ilql):  # TD0 fixes it
        with pytest.raises(TypeError, match=r"Unknown hyperparameters \['lmbda'\]"):
            make().make_value_estimator(ValueEstimators.TD0, lmbda=0.5)


@pytest.mark.slow
def test_values_are_checked_in_compiled_calls(rows, monkeypatch):
    """Without an interruption of the graph."""
    monkeypatch.setattr(GPT2Model, "forward", without_blocks)
    loss = make_bc()
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(rows)["loss_actor"], loss(rows)["loss_actor"])
    for _ in range(2):
        with pytest.raises(ValueError, match="Row 1 has a real token right of padding at position 3"):
            compiled(models.with_a_hole(rows))
    assert compiled(rows)["loss_actor"].isfinite()


def test_ilql_takes_an_utterance_actor(rows):
    q, v = make_heads()
    spoken = ILQLLoss(UtteranceActor(make_actor(), CONTROL, 4, temperature=0.5), q, v, advantage_temperature=0.5)
    plain = ILQLLoss(make_actor(), *make_heads(), advantage_temperature=0.5)
    for key, value in models.losses_of(plain(rows)).items():
        torch.testing.assert_close(spoken(rows)[key], value)
    models.total(spoken(rows)).backward()
    assert any(p.grad is not None and p.grad.any() for p in spoken.actor_network.parameters())
    guided = UtteranceActor(make_actor(), CONTROL, 4, guidance=ValueGuidance(q.module, beta=1.0))
    with pytest.raises(ValueError, match="give no guidance="):
        ILQLLoss(guided, q, v)


def test_a_ppo_loop_over_batches_in_which_no_game_ends():
    """Collector, rows, penalty, estimate, buffer, step: with no rows nothing fails and nothing is learned."""
    env = WordleEnv(["crane", "slate", "purge", "mouse"], batch_size=[3], seed=0)
    torch.manual_seed(0)
    actor, value = language_actor(causal_lm(vocab_size=35, layers=1, width=16, heads=2, max_length=96)), ValueHead(16)
    policy = UtteranceActor(actor, env.tokenizer.control, action_length=6, value=value, seed=0)
    near = KLConstrainedTransform(RowReference(frozen_copy(policy)), AdaptiveKLController(0.1, target=4.0, horizon=99))
    loss = PPOLoss(policy, value_module(value))
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    collector = Collector(env, policy, frames_per_batch=3, total_frames=3 * 7)
    rows_of, numbers = EpisodeRows(carry=["token_log_prob", "state_value"]), []
    for steps in collector:
        before = [p.detach().clone() for p in loss.parameters()]
        rows = near(rows_of(steps))
        near.update(rows)
        rows = loss.estimate(rows, reuse_values=True)
        for _ in train_steps(loss, row_buffer(rows, 16).sample, optimizer, steps=2, max_grad_norm=1.0):
            pass
        numbers.append(len(rows))
        moved = any(not torch.equal(a, b) for a, b in zip(before, loss.parameters(), strict=True))
        assert moved == (len(rows) > 0)
    collector.shutdown()
    assert 0 in numbers
    assert sum(numbers) > 0


def test_an_end_beyond_the_vocabulary_is_refused_where_the_heads_size_is_unknown():
    """The model's embeddings count."""
    wrapped = TensorDictModule(nn.Sequential(nn.Linear(models.WIDTH, VOCAB)), in_keys=["hidden"], out_keys=["logits"])
    actor = ProbabilisticTensorDictSequential(make_actor()[0], wrapped, make_actor()[-1])
    ILQLLoss(actor, *make_heads(), end_of_action=VOCAB - 1)
    with pytest.raises(ValueError, match=f"end_of_action={VOCAB} is no token id"):
        ILQLLoss(actor, *make_heads(), end_of_action=VOCAB)


# -- how far a row is read --------------------------------------------------------------------------------------------

# Positions:            0  1  2  3  4  5  6  7
AGENT = [
    [0, 1, 1, 0, 0, 0, 0, 0],  # ended: its last decision is at 1
    [0, 1, 1, 0, 0, 0, 0, 0],  # not ended: bootstraps from its last token
    [0, 0, 0, 0, 1, 0, 0, 0],  # ended with its last token, a decision at 3
    [0, 0, 0, 0, 0, 0, 0, 0],  # nothing to learn, but a model wants something to read
]


@pytest.mark.parametrize("make", [make_ilql, make_bc])
def test_up_to_the_last_decision_or_the_state_that_bootstraps(make):
    rows, seen = models.by_hand(torch.ones(4, 8, dtype=torch.int64), AGENT, terminated=[True, False, True, True]), []
    rows["attention_mask"] = torch.arange(8) < torch.tensor([6, 6, 5, 4])[:, None]
    for options in ({}, {"transition_weight": 0.5}):
        loss = make(**options)
        trunk = split_actor(loss.actor_network).trunk
        trunk.register_forward_pre_hook(lambda _, args: seen.append(args[0]["attention_mask"].sum(-1).tolist()))
        loss(rows)
    # Copying bootstraps from nothing; with the environment's tokens all but the last token are followed by one.
    assert seen == ([[2, 6, 4, 1], [5, 6, 4, 3]] if make is make_ilql else [[2, 2, 4, 1], [5, 5, 4, 3]])


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("make", [make_oreo, models.make_qsft])
def test_the_environments_term_reads_no_token_of_the_agent(make, chunk, monkeypatch):
    """Its logits are of the environment's real tokens, but for the first of a row, which nothing predicts."""
    seen, batch = [], models.make_rows()
    read = lambda keys, rows, index: seen.append(index.tolist()) or gather_inputs(keys, rows, index)  # noqa: E731
    monkeypatch.setattr(policy, "gather_inputs", read)
    loss = make(transition_weight=0.5, logits_chunk=chunk)
    assert loss(batch)["loss_transition"] > 0
    theirs = (batch["attention_mask"] & ~batch["agent_mask"])[:, 1:]
    places = torch.nn.functional.pad(theirs, (0, 1)).flatten().nonzero().flatten()
    assert seen == [places.tolist()]
    batch["collector", "mask"] = torch.arange(6) % 3 > 0
    loss(batch)
    assert seen[1] == [place for place in seen[0] if place // batch["tokens"].shape[1] % 3 > 0]


# -- whose rewards count ----------------------------------------------------------------------------------------------


def test_others_rewards_count_in_no_return_and_no_report():
    """The losses are in the contract suite."""
    rows, (q, v) = models.make_rows(), (head.module for head in make_heads())
    other = with_rewards_of_others(rows)
    torch.testing.assert_close(row_returns(other), row_returns(rows))
    torch.testing.assert_close(best_rows(other, 2)["tokens"], best_rows(rows, 2)["tokens"])
    for mode in ("constant", "decremented"):
        keys = ("attention_mask", "agent_mask", "token_reward")
        expected, found = (return_conditions(*(r[key] for key in keys), mode) for r in (rows, other))
        torch.testing.assert_close(found, expected)
    expected, found = (value_report(make_actor(), q, v, r, CONTROL) for r in (rows, other))
    assert str(found.as_dict()) == str(expected.as_dict())  # NaN where nothing is known
    graph = RandomWalksEnv(batch_size=[1], seed=0).graph
    walks = models.by_hand([[0, 3, 5, 7]], [[0, 0, 1, 1]], [[0.0, 0.0, -1.0, -1.0]])
    found = walk_optimality(with_rewards_of_others(walks), graph, 10)
    torch.testing.assert_close(found, walk_optimality(walks, graph, 10))
