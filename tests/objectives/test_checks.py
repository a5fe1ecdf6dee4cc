"""Wrong rows, wrong options and wrong parts: each is named, and before anything is computed from it."""

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
from tests.objectives.conftest import (
    LOSSES,
    VOCAB,
    WIDTH,
    losses_of,
    make_actor,
    make_bc,
    make_heads,
    make_ilql,
    make_rows,
)
from tests.objectives.conftest import total as total_of
from torchrl_lang.data import EpisodeRows, row_buffer
from torchrl_lang.envs import WordleEnv
from torchrl_lang.modules import (
    QValueHead,
    UtteranceActor,
    ValueGuidance,
    ValueHead,
    causal_lm,
    language_actor,
    qvalue_module,
    value_module,
)
from torchrl_lang.objectives import BCLoss, ILQLLoss, PPOLoss
from torchrl_lang.schema import ControlTokens
from torchrl_lang.training import train_steps
from torchrl_lang.transforms import AdaptiveKLController, KLConstrainedTransform, RowReference, frozen_copy

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")
CONTROL = ControlTokens(pad=0, end_of_action=1, end_of_state=2, begin_state=3, begin_action=4, end_of_dialogue=5)


def make_ppo(**options):
    return PPOLoss(make_actor(), make_heads()[1], **options)


def ppo_rows(**options):
    rows = make_rows(**options)
    g = torch.Generator().manual_seed(9)
    for key in ("token_log_prob", "advantage", "value_target", "state_value"):
        rows[key] = torch.where(rows["agent_mask"], -torch.rand(rows["tokens"].shape, generator=g), 0.0)
    return rows


MAKERS = {"bc": make_bc, "ilql": make_ilql, "ppo": make_ppo}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@pytest.fixture
def rows():
    return ppo_rows()


def left_padded(rows):
    """The same rows, each moved to the right end."""
    out, length = rows.clone(), rows["attention_mask"].sum(-1)
    width = rows["tokens"].shape[-1]
    for key in ("tokens", "attention_mask", "agent_mask", "token_reward"):
        for row, n in enumerate(length.tolist()):
            out[key][row] = rows[key][row].roll(width - n)
    return out


def with_hole(rows):
    rows = rows.clone()
    rows["attention_mask"][1, 2] = rows["agent_mask"][1, 2] = False
    rows["token_reward"][1, 2] = 0.0
    return rows


def beyond_attention(rows):
    rows = rows.clone()
    row = int((~rows["attention_mask"][:, -1]).nonzero()[0])
    rows["agent_mask"][row, -1] = True
    return rows


def out_of_range(rows, token=VOCAB):
    rows = rows.clone()
    rows["tokens"][2, 1] = token
    return rows


BAD_VALUES = [
    (left_padded, "a real token right of padding"),
    (with_hole, "Row 1 has a real token right of padding at position 3"),
    (beyond_attention, "an agent's token on padding at position 13"),
    (out_of_range, rf"Row 2 has a token id out of range at position 1: ids lie in \[0, {VOCAB}\)"),
    (lambda rows: out_of_range(rows, -1), "Row 2 has a token id out of range at position 1"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD_VALUES)
def test_values_are_named(make, rows, spoil, message):
    with pytest.raises(ValueError, match=message):
        make()(spoil(rows))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_rewards_that_are_not_finite(rows, number):
    row, position = rows["agent_mask"].nonzero()[3].tolist()
    rows["token_reward"][row, position] = number
    with pytest.raises(ValueError, match=f"Row {row} has a reward that is not finite at position {position}"):
        make_ilql()(rows)
    with pytest.raises(ValueError, match="a reward that is not finite"):
        make_ppo().estimate(rows)


@pytest.mark.parametrize("name", ["token_log_prob", "advantage", "value_target"])
def test_estimates_that_are_not_finite(rows, name):
    row, position = rows["agent_mask"].nonzero()[3].tolist()
    rows[name][row, position] = math.nan
    with pytest.raises(ValueError, match=rf"Row {row} has {name} that is not finite at position {position}: "):
        make_ppo()(rows)


def test_masked_rows_may_hold_anything(make, rows):
    spoilt = left_padded(rows)
    kept = torch.arange(6) != 3
    rows["collector", "mask"] = kept
    rows[3] = spoilt.set(("collector", "mask"), kept)[3]
    assert not rows["attention_mask"][3, 0]
    make()(rows)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_values_are_checked_in_every_call(name):
    """Rows that count are named by their number in the batch; a batch without rows is accepted."""
    loss, rows = LOSSES[name](), make_rows()
    loss(rows)
    loss(rows[:0])
    with pytest.raises(ValueError, match="a real token right of padding"):
        loss(left_padded(rows))
    loss(rows)
    kept = torch.tensor([False, True, True, True, True, True])
    with pytest.raises(ValueError, match="Row 1 has a real token right of padding at position 3"):
        loss(with_hole(rows).set(("collector", "mask"), kept))


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
            compiled(with_hole(rows))
    assert compiled(rows)["loss_actor"].isfinite()


DTYPES = [
    ("tokens", torch.float32, "tokens must be int64 or int32, got torch.float32"),
    ("attention_mask", torch.float32, "attention_mask must be bool, got torch.float32"),
    ("train_mask", torch.int64, "train_mask must be bool, got torch.int64"),
]


@pytest.mark.parametrize(("name", "dtype", "message"), DTYPES)
def test_dtypes_are_checked_in_every_call(make, rows, name, dtype, message):
    loss = make()
    loss(rows)
    entry = rows["agent_mask"] if name == "train_mask" else rows[name]
    with pytest.raises(TypeError, match=message):
        loss(rows.clone().set(name, entry.to(dtype)))
    with pytest.raises(TypeError, match=r"mask \('collector', 'mask'\) must be bool"):
        loss(rows.clone().set(("collector", "mask"), torch.ones(6)))


def test_integer_rewards_are_named(rows):
    with pytest.raises(TypeError, match="token_reward must be a float"):
        make_ilql()(rows.set("token_reward", rows["token_reward"].long()))


BAD_OPTIONS = [
    (make_ilql, "cql_weight", math.nan),
    (make_ilql, "cql_weight", -1.0),
    (make_ilql, "value_weight", math.inf),
    (make_ilql, "gamma", math.nan),
    (make_ilql, "expectile", math.nan),
    (make_ilql, "lmbda", math.nan),
    (make_ilql, "cql_temperature", math.nan),
    (make_ilql, "margin", math.nan),
    (make_ilql, "advantage_temperature", math.nan),
    (make_ilql, "weight_clip", math.nan),
    (make_ilql, "weight_clip", 0.0),
    (make_ilql, "transition_weight", math.nan),
    (make_ilql, "value_min", math.nan),
    (make_ppo, "clip_epsilon", math.nan),
    (make_ppo, "clip_epsilon", (0.2, math.inf)),
    (make_ppo, "value_clip", math.nan),
    (make_ppo, "value_weight", math.nan),
    (make_ppo, "entropy_weight", math.inf),
    (make_ppo, "kl_weight", math.nan),
    (make_ppo, "turn_gamma", math.nan),
    (make_ppo, "turn_lmbda", 1.5),
    (make_ppo, "end_of_action", VOCAB),
    (make_bc, "transition_weight", math.nan),
    (make_bc, "kl_weight", math.nan),
]


@pytest.mark.parametrize(("build", "name", "value"), BAD_OPTIONS)
def test_options_out_of_range_are_named(build, name, value):
    with pytest.raises(ValueError, match=name):
        build(**{name: value})


def test_a_bare_language_model_is_no_actor():
    lm = causal_lm(vocab_size=VOCAB, layers=1, width=WIDTH, heads=2, max_length=32)
    q, v = make_heads()
    for build in (BCLoss, lambda actor: ILQLLoss(actor, q, v), lambda actor: PPOLoss(actor, v)):
        with pytest.raises(TypeError, match=r"got GPT2LMHeadModel: build it with language_actor\(lm\)"):
            build(lm)


def test_heads_of_another_kind():
    _, v = make_heads()
    with pytest.raises(TypeError, match=r"PPOLoss needs value_network as a module hidden .* got int"):
        PPOLoss(make_actor(), 3)
    with pytest.raises(ValueError, match=r"reads 'action_value' of its qvalue_network, which writes \['state_value'\]"):
        ILQLLoss(make_actor(), v, v)


def test_a_q_network_with_too_small_a_vocabulary():
    _, v = make_heads()
    small = qvalue_module(QValueHead(WIDTH, VOCAB - 2))
    with pytest.raises(ValueError, match=rf"values for {VOCAB - 2} tokens and the policy can write {VOCAB}"):
        ILQLLoss(make_actor(), small, v)
    # Where the model's matrix is padded, an utterance actor supports the tokenizer's vocabulary.
    padded = UtteranceActor(make_actor(), CONTROL, 4, vocab_size=VOCAB - 2)
    rows = make_rows()
    rows["tokens"].clamp_max_(VOCAB - 3)
    assert total_of(ILQLLoss(padded, small, v)(rows)).isfinite()
    with pytest.raises(ValueError, match=rf"ids lie in \[0, {VOCAB - 2}\)"):
        ILQLLoss(padded, small, v)(make_rows())


def test_ilql_takes_an_utterance_actor(rows):
    q, v = make_heads()
    spoken = ILQLLoss(UtteranceActor(make_actor(), CONTROL, 4, temperature=0.5), q, v, advantage_temperature=0.5)
    plain = ILQLLoss(make_actor(), *make_heads(), advantage_temperature=0.5)
    for key, value in losses_of(plain(rows)).items():
        torch.testing.assert_close(spoken(rows)[key], value)
    total_of(spoken(rows)).backward()
    assert any(p.grad is not None and p.grad.any() for p in spoken.actor_network.parameters())
    guided = UtteranceActor(make_actor(), CONTROL, 4, guidance=ValueGuidance(QValueHead(WIDTH, VOCAB), beta=1.0))
    with pytest.raises(ValueError, match="without guidance="):
        ILQLLoss(guided, q, v)


def test_tokens_of_another_name_reach_the_actor(make, rows):
    loss = make()
    expected = loss(rows)
    renamed = rows.clone()
    for name in ("tokens", "attention_mask"):
        renamed.rename_key_(name, ("text", name))
        loss.set_keys(**{name: ("text", name)})
    for key, value in loss(renamed).items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=0, equal_nan=True)


def test_the_train_mask_is_an_optional_input(make, rows):
    loss = make()
    learned = torch.rand(rows["tokens"].shape, generator=torch.Generator().manual_seed(0)) < 0.5
    assert "train_mask" in loss.optional_in_keys
    assert ("collector", "mask") in loss.optional_in_keys
    assert "train_mask" not in loss.in_keys
    expected = loss(rows.clone().set("train_mask", learned))
    kept = rows.clone().set("train_mask", learned).set("other", learned)
    kept = kept.select(*loss.in_keys, *loss.optional_in_keys, strict=False)
    assert "train_mask" in kept.keys()
    found = loss(*(rows[key] for key in loss.in_keys), train_mask=learned)
    found = found if isinstance(found, tuple) else (found,)
    assert not torch.equal(found[-1 if make is make_bc else 0], loss(rows)[loss.out_keys[0]])
    for key, value in zip(loss.out_keys, found, strict=True):
        torch.testing.assert_close(value, expected[key], equal_nan=True)


# -- no rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_no_rows_give_zero_losses_with_zero_gradients(make, reduction, shape):
    none = ppo_rows()[:0].reshape(shape) if len(shape) == 1 else ppo_rows().unsqueeze(0).expand(2, 6)[:, :0]
    none = none.reshape(*shape)
    loss = make(reduction=reduction)
    out = loss(none)
    assert set(out.keys()) == set(loss.out_keys)
    for value in losses_of(out).values():
        assert value.shape == ((*shape, none["tokens"].shape[-1]) if reduction == "none" else ())
        assert not value.any()
    total_of(out).backward()
    assert not any(p.grad.any() for p in loss.parameters() if p.grad is not None)


@pytest.mark.parametrize("reuse_values", [False, True])
def test_estimating_no_rows(reuse_values):
    none = ppo_rows()[:0].exclude("advantage", "value_target")
    out = make_ppo().estimate(none, reuse_values=reuse_values)
    assert out is none
    assert all(out[key].shape == none["tokens"].shape for key in ("advantage", "value_target", "state_value"))


# -- value estimators --------------------------------------------------------------------------------------------------


def test_make_value_estimator_sets_the_clocks_and_returns_the_loss(rows):
    loss = make_ppo()
    assert loss.make_value_estimator(ValueEstimators.GAE, gamma=0.9, lmbda=0.8, turn_gamma=0.7, turn_lmbda=0.6) is loss
    expected = make_ppo(gamma=0.9, lmbda=0.8, turn_gamma=0.7, turn_lmbda=0.6).estimate(rows.clone())
    torch.testing.assert_close(loss.estimate(rows.clone())["advantage"], expected["advantage"])
    for kind, lmbda in ((ValueEstimators.TD0, 0.0), (ValueEstimators.TD1, 1.0)):
        loss = make_ppo(gamma=0.9).make_value_estimator(kind, turn_gamma=0.5)
        expected = make_ppo(gamma=0.9, turn_gamma=0.5, lmbda=lmbda, turn_lmbda=lmbda).estimate(rows.clone())
        torch.testing.assert_close(loss.estimate(rows.clone())["advantage"], expected["advantage"])
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got nan"):
        make_ppo().make_value_estimator(gamma=math.nan)
    with pytest.raises(TypeError, match=r"Unknown hyperparameters \['lmbda'\]"):
        make_ppo().make_value_estimator(ValueEstimators.TD0, lmbda=0.5)
    with pytest.raises(ValueError, match="PPOLoss supports"):
        make_ppo().make_value_estimator(ValueEstimators.VTrace)
    ilql = make_ilql()
    assert ilql.make_value_estimator(ValueEstimators.TD1) is ilql


# -- normalised advantages ---------------------------------------------------------------------------------------------


def test_rows_that_are_masked_or_doubled(rows):
    """Masked rows are as rows that are not there; doubled ones differ by the unbiased deviation and nothing else."""
    loss, kept = make_ppo(), torch.tensor([True, False, True, True, True, False])
    masked = loss(rows.clone().set(("collector", "mask"), kept))["loss_objective"]
    torch.testing.assert_close(masked, loss(rows[kept])["loss_objective"])
    once, twice = (loss(x)["loss_objective"] for x in (rows, torch.cat([rows, rows])))
    n = int(rows["agent_mask"].sum())
    log_ratio = make_ppo(normalize_advantage=False)
    standard = rows.clone()
    agent = rows["agent_mask"]
    standard["advantage"] = torch.where(
        agent, (rows["advantage"] - rows["advantage"][agent].mean()) / rows["advantage"][agent].std(), 0.0
    )
    torch.testing.assert_close(once, log_ratio(standard)["loss_objective"])
    torch.testing.assert_close(twice, once * math.sqrt((2 * n - 1) / (2 * n - 2)), rtol=1e-5, atol=1e-7)


def test_an_actor_whose_head_is_no_linear_layer_is_fine(rows):
    """Where nothing tells the vocabulary, ids have no upper limit."""
    actor = make_actor()
    head = actor[1].module
    actor[1].module = nn.Sequential(head)
    assert total_of(BCLoss(actor)(rows)).isfinite()


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


@pytest.mark.parametrize("known", [True, False])
def test_an_end_beyond_the_vocabulary_is_refused(known):
    """Also where the head's size is unknown: then the model's embeddings count."""
    trunk, head, output = make_actor()
    if not known:
        head = TensorDictModule(nn.Sequential(nn.Linear(WIDTH, VOCAB)), in_keys=["hidden"], out_keys=["logits"])
    actor = ProbabilisticTensorDictSequential(trunk, head, output)
    ILQLLoss(actor, *make_heads(), end_of_action=VOCAB - 1)
    with pytest.raises(ValueError, match=f"end_of_action={VOCAB} is no token id"):
        ILQLLoss(actor, *make_heads(), end_of_action=VOCAB)
