"""What is utterance ILQL's own: numbers by hand and by loops, ends of utterances, the policy, learning."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch.distributions import Categorical
from torchrl.objectives import SoftUpdate

from tests.objectives.conftest import make_actor, make_rows
from tests.objectives.oracle_utterance import utterance_ilql_losses
from tests.objectives.tables import TableHead, TableQ, TableTrunk, make_table
from tests.objectives.tables import table_loss as ilql_table
from tests.objectives.test_ilql import count_passes, touched
from tests.objectives.utterances import make_utterance_ilql, moved, utterances_of
from torchrl_lang.data import row_buffer, rows_from_rollout
from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer, corridor_value
from torchrl_lang.evaluation import play_games
from torchrl_lang.functional import find_utterances, turn_end_mask
from torchrl_lang.modules import (
    QValueHead,
    UtteranceActor,
    UtteranceQValueHead,
    UtteranceValueGuidance,
    ValueGuidance,
    ValueHead,
    causal_lm,
    language_actor,
    qvalue_module,
    value_module,
)
from torchrl_lang.objectives import BCLoss, UtteranceILQLLoss
from torchrl_lang.training import adamw, train_steps

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")
TOKENS = 5


class OneNumber(TableQ):
    """A table's Q without a vocabulary."""

    def forward(self, hidden):
        return super().forward(hidden).squeeze(-1)


def table_loss(heads=2, **options):
    """A loss whose trunk reads the entry ``table``: V, Q and target Q of ``heads`` heads, logits."""
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(TableTrunk(), in_keys=["table"], out_keys=["hidden"]),
        TensorDictModule(TableHead(1 + 2 * heads, TOKENS, (TOKENS,)), in_keys=["hidden"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["next_token"], distribution_class=Categorical),
    )
    qvalue = TensorDictModule(OneNumber(heads, 1), in_keys=["hidden"], out_keys=["utterance_value"])
    value = TensorDictModule(TableHead(0, 1, (1,)), in_keys=["hidden"], out_keys=["state_value"])
    loss = UtteranceILQLLoss(actor, qvalue, value, **options)
    loss.target_qvalue_network_params.data.zero_()
    return loss


def table_rows(seed=0, heads=2, n=8):
    """Ragged rows with random tables; rewards keep fractions."""
    g = torch.Generator().manual_seed(seed)
    rows = make_rows(n, seed=seed)
    rows["tokens"] = torch.where(rows["attention_mask"], rows["tokens"] % TOKENS, 0)
    width = rows["tokens"].shape[1]
    v, q, target, logits = (torch.randn(n, width, *shape, generator=g) for shape in ((), (heads,), (heads,), (TOKENS,)))
    rows["table"] = make_table(v, q.unsqueeze(-1), target.unsqueeze(-1), logits)
    return rows, [table.double().numpy() for table in (v, q, target, logits)]


OPTIONS = [
    {},
    {"gamma": 0.5, "expectile": 0.9},
    {"advantage_temperature": 2.0, "weight_clip": 1.5, "transition_weight": 2.0},
    {"advantage_weighting": "sign", "advantage_temperature": 0.8},
    {"actor_normalizer": "action", "advantage_temperature": 0.5},
    {"end_of_action": 3, "advantage_temperature": 1.0},
]


@pytest.mark.parametrize("masked", [False, True], ids=["all", "train-mask"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("seed", "heads"), [(0, 1), (1, 2)])
def test_terms_match_plain_loops(options, seed, heads, masked):
    rows, tables = table_rows(seed, heads)
    names = {"advantage_temperature": "beta", "advantage_weighting": "weighting", "weight_clip": "clip"}
    names["actor_normalizer"] = "normalizer"
    plain = {names.get(key, key): value for key, value in options.items()}
    if masked:
        rows["train_mask"] = torch.rand(rows["tokens"].shape, generator=torch.Generator().manual_seed(seed)) < 0.6
        plain["trained"] = rows["train_mask"].numpy()
    out = table_loss(heads, **options)(rows)
    for term, value in utterance_ilql_losses(rows, *tables, **plain).items():
        np.testing.assert_allclose(out[f"loss_{term}"].item(), value, rtol=2e-5, err_msg=term)


@pytest.mark.parametrize("end_of_action", [None, 3])
def test_spans_are_those_of_plain_loops(end_of_action):
    for seed in range(20):
        rows, _ = table_rows(seed)
        masks = rows["attention_mask"], rows["agent_mask"]
        ends = turn_end_mask(*masks, rows["tokens"], end_of_action)
        found = find_utterances(*masks, ends, rows["terminated"][:, 0])
        states, utterances = [], []
        for row in range(len(rows)):
            own, bootstrap = utterances_of(rows, row, end_of_action)
            states += [(row, utterance[0] - 1) for utterance in own] + ([(row, bootstrap)] if own else [])
            utterances += [(row, utterance[0] - 1, utterance[-1] - 1) for utterance in own]
        assert list(zip(found.row.tolist(), found.position.tolist(), strict=True)) == states
        places = found.row[found.state], found.position[found.state], found.end
        assert list(zip(*(x.tolist() for x in places), strict=True)) == utterances


# Positions:      0  1  2  3  4  5  6  7
AGENT = [False, True, True, False, True, False, True, True]


def three_turns(*, terminated, tokens=(0, 1, 2, 0, 2, 0, 1, 1)):
    """Utterances at 1-2, at 4, and at 6-7, where the row ends without an end of action (2)."""
    return TensorDict(
        tokens=torch.tensor([tokens]),
        attention_mask=torch.ones(1, 8, dtype=torch.bool),
        agent_mask=torch.tensor([AGENT]),
        token_reward=torch.tensor([[0.0, -0.25, -0.5, 0.0, -1.0, 0.0, 0.5, 0.25]]),
        terminated=torch.tensor([[terminated]]),
        table=make_table(
            torch.tensor([[1.0, 90.0, 90.0, 2.0, 90.0, 3.0, 90.0, 4.0]]),  # V at 0, 3, 5 and after the end
            torch.zeros(1, 8, 1, 1),
            torch.tensor([[90.0, 5.0, 90.0, 1.0, 90.0, 90.0, 7.0, 90.0]])[..., None, None],  # target Q at 1, 3 and 6
            torch.zeros(1, 8, TOKENS),
        ),
        batch_size=[1],
    )


def found_at(out, name, positions):
    return out[name][0, positions]


def test_one_row_by_hand():
    """Q is zero, so its targets are the roots; V of 0.5-expectile regression is half the squared difference."""
    loss = table_loss(1, gamma=0.5, expectile=0.5, reduction="none")
    out = loss(three_turns(terminated=True))
    # -0.75 + 0.5 * 2, -1 + 0.5 * 3, 0.75
    torch.testing.assert_close(found_at(out, "loss_qvalue", [1, 3, 6]).sqrt(), torch.tensor([0.25, 0.5, 0.75]))
    assert out["loss_qvalue"].count_nonzero() == 3
    # 5 - 1, 1 - 2, 7 - 3
    torch.testing.assert_close(found_at(out, "loss_value", [1, 3, 6]), torch.tensor([8.0, 0.5, 8.0]))


def test_an_utterance_that_the_row_cuts_off_has_no_value_and_its_state_bootstraps():
    loss = table_loss(1, gamma=0.5, reduction="none")
    out = loss(three_turns(terminated=False))
    torch.testing.assert_close(found_at(out, "loss_qvalue", [1, 3]).sqrt(), torch.tensor([0.25, 0.5]))
    assert out["loss_qvalue"].count_nonzero() == 2
    assert out["loss_actor"].count_nonzero() == 5  # its tokens are imitated


def test_with_its_end_the_last_utterance_bootstraps_from_the_last_position():
    rows = three_turns(terminated=False, tokens=(0, 1, 2, 0, 2, 0, 1, 2))
    out = table_loss(1, gamma=0.5, reduction="none", end_of_action=2)(rows)
    # 0.75 + 0.5 * 4
    torch.testing.assert_close(found_at(out, "loss_qvalue", [1, 3, 6]).sqrt(), torch.tensor([0.25, 0.5, 2.75]))


def test_all_tokens_of_an_utterance_have_the_weight_of_its_advantage():
    weighted = {"advantage_temperature": 1.0, "weight_clip": 20.0, "reduction": "none"}
    out = table_loss(1, **weighted)(three_turns(terminated=False))
    weights = out["loss_actor"][0] / np.log(TOKENS)
    torch.testing.assert_close(weights[[0, 1]], torch.full((2,), 20.0))  # exp(5 - 1), clipped
    torch.testing.assert_close(weights[3], torch.tensor(-1.0).exp())
    torch.testing.assert_close(weights[[5, 6]], torch.ones(2))


def test_the_train_mask_of_the_last_token_decides_for_the_values():
    rows = three_turns(terminated=True)
    rows["train_mask"] = torch.tensor([[True, True, False, True, True, True, False, True]])
    out = table_loss(1, reduction="none")(rows)
    assert out["loss_qvalue"][0].nonzero().flatten().tolist() == [3, 6]
    assert out["loss_value"][0].nonzero().flatten().tolist() == [3, 6]
    assert out["loss_actor"][0].nonzero().flatten().tolist() == [0, 3, 6]


# -- relatives ---------------------------------------------------------------------------------------------------------


def test_without_temperature_the_policys_loss_is_behaviour_cloning(rows):
    actor = make_actor()
    expected = BCLoss(actor, transition_weight=0.2)(rows)["loss_actor"]
    torch.testing.assert_close(make_utterance_ilql(actor, transition_weight=0.2)(rows)["loss_actor"], expected)


def test_utterances_of_one_token_are_ilqls_decisions():
    """Then only the form of Q differs: equal where the token's values are."""
    rows, _ = table_rows()
    agent = torch.zeros_like(rows["agent_mask"])
    agent[:, 1::2] = rows["attention_mask"][:, 1::2]
    rows["agent_mask"], rows["terminated"][:] = agent, True
    rows["token_reward"] = torch.where(agent, rows["token_reward"] + 0.5, 0.0)
    ours = table_loss(2)(rows)
    n, width = rows["tokens"].shape
    v, q, target, logits = rows["table"].split([1, 2, 2, TOKENS], -1)
    tables = (x.unsqueeze(-1).expand(n, width, 2, TOKENS) for x in (q, target))
    theirs = ilql_table(2, TOKENS, cql_weight=0.0)(rows.set("table", make_table(v.squeeze(-1), *tables, logits)))
    for term in ("loss_value", "loss_qvalue", "loss_actor"):
        torch.testing.assert_close(ours[term], theirs[term])


def test_gradients_go_where_they_belong():
    loss = make_utterance_ilql(make_actor(), advantage_temperature=1.0)
    assert touched(loss, "loss_value") == {"v", "actor"}
    assert touched(loss, "loss_qvalue") == {"q", "actor"}
    assert touched(loss, "loss_actor") == {"actor"}


def test_one_pass_of_the_trunk_and_heads_at_utterances_only(rows):
    loss = make_utterance_ilql(make_actor())
    seen, head = [], loss.qvalue_network.module
    full = head.forward
    head.forward = lambda hidden: seen.append(len(hidden)) or full(hidden)
    assert count_passes(loss, rows) == 1
    n = sum(len(utterances_of(rows, row)[0]) for row in range(len(rows)))
    assert seen == [n, n]


# -- the policy --------------------------------------------------------------------------------------------------------

LENGTH = 4
BEST = float(corridor_value(LENGTH - 1))


def walks_of(env):
    player = CorridorPlayer(env.tokenizer, LENGTH, seed=0)
    return rows_from_rollout(env.rollout(64, player, break_when_any_done=False), unfinished="drop")


def corridor(batch=256):
    return CorridorEnv(LENGTH, start=0, max_turns=8, batch_size=[batch], seed=0)


def corridor_actor(env, width=32):
    torch.manual_seed(0)
    shape = {"vocab_size": env.tokenizer.vocab_size, "layers": 1, "width": width, "heads": 2, "max_length": 48}
    return language_actor(causal_lm(**shape, initializer_range=0.1))


def test_candidates_are_ranked_by_the_losses_q_of_the_finished_rows():
    """Of eight candidates, among them forced ends, the one is played whose appended row has the highest target Q."""
    env, width = corridor(12), 32
    actor, control = corridor_actor(env), env.tokenizer.control
    head = moved(UtteranceQValueHead(width), 5)
    loss = UtteranceILQLLoss(
        actor, qvalue_module(head), value_module(ValueHead(width)), end_of_action=control.end_of_action, actor_weight=0
    )
    guidance = UtteranceValueGuidance(loss.target_qvalue_network())
    ranking = {"end_value_weight": 1.0, "log_prob_weight": 0.0, "candidates": 8, "seed": 3}
    policy = UtteranceActor(actor, control, 4, guidance=guidance, method="best_of", **ranking)
    prompts = env.reset().select("tokens", "attention_mask")
    played = policy(prompts.clone())["action"]
    sampler = UtteranceActor(actor, control, 4, seed=3)
    drawn = sampler.decoder.generate(prompts["tokens"], prompts["attention_mask"], candidates=8).action
    assert len({tuple(action) for action in drawn.tolist()}) > 4
    rows = appended(prompts, drawn, control)
    with torch.no_grad():
        values = torch.stack([loss(row[None])["qvalue"] for row in rows])  # the mean over heads
        states = actor[0](rows.clone())["hidden"]
    last = rows["attention_mask"].sum(-1) - 2
    values_at_end = guidance.qvalue.module(states[torch.arange(len(rows)), last])
    torch.testing.assert_close(values_at_end.mean(-1), values, rtol=1e-4, atol=1e-5)
    best = values_at_end.amin(-1).reshape(12, 8).argmax(-1)
    assert torch.equal(played, drawn.reshape(12, 8, 4)[torch.arange(12), best])


def appended(prompts, action, control):
    """Rows of prompts each of which some utterances follow, terminated."""
    copies = action.shape[0] // prompts.shape[0]
    rows = []
    for index, utterance in enumerate(action.tolist()):
        row = prompts[index // copies]
        begin = row["tokens"][row["attention_mask"]].tolist()
        written = utterance[: utterance.index(control.end_of_action) + 1]
        pad = [0] * (row["tokens"].shape[-1] - len(begin) - len(written))
        tokens = torch.tensor(begin + written + pad)
        agent = torch.zeros_like(tokens, dtype=torch.bool)
        agent[len(begin) : len(begin) + len(written)] = True
        attention = torch.arange(len(tokens)) < len(begin) + len(written)
        masks = {"attention_mask": attention, "agent_mask": agent, "terminated": torch.tensor([True])}
        rows.append(TensorDict(tokens=tokens, token_reward=torch.zeros(len(tokens)), **masks))
    return torch.stack(rows)


def test_heads_are_given_to_the_guidance_of_their_kind():
    with pytest.raises(ValueError, match=r"must give 'utterance_value', a QValueHead does not"):
        UtteranceValueGuidance(QValueHead(8, 5))
    with pytest.raises(ValueError, match=r"must give 'action_value', a UtteranceQValueHead does not"):
        ValueGuidance(UtteranceQValueHead(8), beta=1.0)


@pytest.mark.slow
def test_the_values_of_a_corridor_are_found_and_their_policy_walks_straight():
    """Nobody in the data walked straight; the move that is best by far is tried in every place, so Q finds it."""
    env = corridor()
    walks, actor = walks_of(env), corridor_actor(env)
    loss = UtteranceILQLLoss(
        actor,
        qvalue_module(UtteranceQValueHead(32)),
        value_module(ValueHead(32)),
        expectile=0.9,
        gamma=1.0,
        actor_normalizer="action",
        end_of_action=env.tokenizer.control.end_of_action,
    )
    assert walks["token_reward"].sum(-1).max() < BEST
    buffer, updater = row_buffer(walks, 32, seed=0), SoftUpdate(loss, tau=0.05)
    for _ in train_steps(loss, buffer.sample, adamw(loss, 5e-3), steps=300, target_updater=updater, max_grad_norm=1.0):
        pass
    guidance = UtteranceValueGuidance(loss.target_qvalue_network())
    ranking = {"method": "best_of", "end_value_weight": 1.0, "log_prob_weight": 0.0, "candidates": 16, "seed": 0}
    policy = UtteranceActor(actor, env.tokenizer.control, 2, guidance=guidance, **ranking)
    found = play_games(env, policy, games=256, seed=1).returns.mean()
    copied = play_games(env, UtteranceActor(actor, env.tokenizer.control, 2, seed=0), games=256, seed=1).returns.mean()
    print(f"best {BEST}, found {found:.2f}, copied {copied:.2f}")
    assert found > BEST - 0.3
    assert copied < BEST - 1.5
