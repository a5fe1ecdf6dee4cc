"""CHAI: what every loss must do, its terms by loops and by hand, its candidates, its policy, learning."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.objectives import SoftUpdate

from tests.objectives import test_contract as contract
from tests.objectives.chai_rows import CANDIDATES, CONTROL, chai_rows, make_chai, make_policy
from tests.objectives.conftest import WIDTH, make_actor, make_rows, total
from tests.objectives.oracle_utterance import chai_losses
from tests.objectives.test_ilql import count_passes
from tests.objectives.test_utterance_ilql import appended
from tests.objectives.utterances import moved, number_of_utterances, utterances_of
from torchrl_lang.data import row_buffer
from torchrl_lang.modules import (
    CandidateSampler,
    CHAIActor,
    QValueHead,
    UtteranceActor,
    UtteranceQValueHead,
    ValueHead,
    qvalue_module,
)
from torchrl_lang.modules.chai import candidate_features
from torchrl_lang.objectives import CHAILoss
from torchrl_lang.training import adamw, train_steps

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")

# -- what every loss must do, on rows with candidates ------------------------------------------------------------------

LOSSES = {"both": make_chai, "td": lambda **options: make_chai(cql_weight=0.0, **options)}


@pytest.fixture
def rows():
    return chai_rows()


@pytest.fixture(params=sorted(LOSSES))
def make_loss(request):
    return LOSSES[request.param]


@pytest.mark.parametrize("name", contract.ON_FURTHER_COLUMNS)
def test_contract(name, make_loss, rows):
    getattr(contract, name)(make_loss, rows)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_any_batch_shape(make_loss, rows, shape):
    contract.test_any_batch_shape(make_loss, rows, shape)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_mask_takes_rows_out(make_loss, rows, reduction):
    contract.test_loss_mask_takes_rows_out(make_loss, rows, reduction)


@pytest.mark.slow
def test_compile_gives_the_same_losses(make_loss, rows):
    contract.assert_compiles(make_loss(), rows)


def test_padding_changes_nothing(make_loss, rows):
    loss = make_loss()
    wide = rows.clone()
    for key in ("tokens", "attention_mask", "agent_mask", "token_reward"):
        wide[key] = nn.functional.pad(rows[key], (0, 5))
    for key in ("state_position", "state_mask", "candidate_mask"):
        wide[key] = nn.functional.pad(rows[key], (0, 2))
    for key in ("utterance_feature", "candidate_log_prob"):
        wide[key] = nn.functional.pad(rows[key], (0, 0, 0, 2), value=9.0)
    wide["candidate_feature"] = nn.functional.pad(rows["candidate_feature"], (0, 0, 0, 0, 0, 2), value=9.0)
    contract.assert_same(loss(wide), loss(rows), rtol=1e-5, atol=1e-6)


def test_gradient_is_that_of_finite_differences(rows):
    loss = make_chai(qvalue_weight=0.7).double()
    data = rows.apply(lambda value: value.double() if value.is_floating_point() else value)
    weight = loss.qvalue_network_params["module", "in_weight"]
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total(loss(data)).backward()
    values = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            weight.data.add_(step * direction)
            values.append(total(loss(data)))
    torch.testing.assert_close((weight.grad * direction).sum(), (values[0] - values[1]) / 2e-6, rtol=1e-5, atol=1e-7)


def test_no_pass_of_a_language_model_and_heads_on_what_counts(rows):
    loss = make_chai()
    seen, head = [], loss.qvalue_network.module
    full = head.forward
    head.forward = lambda features: seen.append(len(features)) or full(features)
    assert count_passes(loss, rows) == 0
    n = number_of_utterances(rows, 1)
    bootstraps = int(rows["candidate_mask"].sum()) - int((rows["state_mask"].sum(-1) > 1).sum())
    # Of the states with candidates, all but the first of each row are successors.
    assert seen == [n, bootstraps * CANDIDATES, n * CANDIDATES]
    assert all("qvalue" in name for name, _ in loss.named_parameters())


# -- the terms ---------------------------------------------------------------------------------------------------------


def evaluated(loss, rows):
    """Values of all features as lists by row and state, computed from rows into which the candidates were written."""
    online, target = loss.qvalue_network, loss.target_qvalue_network()
    with loss.qvalue_network_params.to_module(online):
        mine = [online.module(rows[key]) for key in ("utterance_feature", "candidate_feature")]
    theirs = target.module(rows["candidate_feature"])
    return [[list(row) for row in values.detach().numpy()] for values in (*mine, theirs)]


@pytest.mark.parametrize("masked", [False, True], ids=["all", "train-mask"])
@pytest.mark.parametrize(("seed", "gamma"), [(0, 0.99), (1, 0.5), (2, 1.0)])
def test_terms_match_plain_loops(seed, gamma, masked):
    rows, loss = chai_rows(8, seed), make_chai(gamma=gamma, cql_weight=1.0).double()
    options = {}
    if masked:
        rows["train_mask"] = torch.rand(rows["tokens"].shape, generator=torch.Generator().manual_seed(seed)) < 0.6
        options["trained"] = rows["train_mask"]
    doubled = rows.apply(lambda value: value.double() if value.is_floating_point() else value)
    q, candidates, target = evaluated(loss, doubled)
    log_prob = doubled["candidate_log_prob"].numpy()
    expected = chai_losses(rows, q, candidates, target, log_prob, gamma=gamma, **options)
    out = loss(doubled)
    for term, value in expected.items():
        np.testing.assert_allclose(out[f"loss_{term}"].item(), value, rtol=1e-6, err_msg=term)


class Copies(nn.Module):
    """Values that are the features themselves, one a head; the target's are negative, to be seen apart."""

    def __init__(self):
        super().__init__()
        self.sign = nn.Parameter(torch.ones(()))

    def forward(self, features):
        return self.sign * features


def table_chai(**options):
    loss = CHAILoss(TensorDictModule(Copies(), in_keys=["feature"], out_keys=["utterance_value"]), **options)
    loss.target_qvalue_network_params["module", "sign"].data.fill_(-1.0)
    return loss


def two_turns(*, terminated):
    """Utterances at 1-2 and at 4 with Q (1, 2) and (3, 4) of two heads, two candidates in each of three states."""
    agent = torch.tensor([[False, True, True, False, True, False]])
    candidates = torch.tensor([[[0.0, 0.0], [2.0, 1.0]], [[-5.0, -6.0], [-8.0, -2.0]], [[-3.0, -3.0], [-1.0, -9.0]]])
    return TensorDict(
        tokens=agent.long(),
        attention_mask=torch.ones(1, 6, dtype=torch.bool),
        agent_mask=agent,
        token_reward=torch.tensor([[0.0, -0.25, -0.5, 0.0, 0.5, 0.0]]),
        terminated=torch.tensor([[terminated]]),
        state_position=torch.tensor([[0, 3, 5]]),
        state_mask=torch.ones(1, 3, dtype=torch.bool),
        candidate_mask=torch.tensor([[True, True, not terminated]]),
        utterance_feature=torch.tensor([[[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]]),
        candidate_feature=candidates[None],
        candidate_log_prob=torch.tensor([[[0.25, 0.5], [0.5, 0.5], [0.5, 0.5]]]).log(),
        batch_size=[1],
    )


@pytest.mark.parametrize("terminated", [False, True])
def test_targets_by_hand(terminated):
    """The target's values are the negated features: of each candidate the least, of a state's candidates the most."""
    out = table_chai(gamma=0.5, reduction="none")(two_turns(terminated=terminated))
    # min(5, 6) = 5 and min(8, 2) = 2; then min(3, 3) = 3 and min(1, 9) = 1
    first = -0.75 + 0.5 * 5
    second = 0.5 + (0 if terminated else 0.5 * 3)
    expected = [(first - 1) ** 2 + (first - 2) ** 2, (second - 3) ** 2 + (second - 4) ** 2]
    torch.testing.assert_close(out["loss_qvalue"][0, [1, 3]], torch.tensor(expected))
    assert out["loss_qvalue"].count_nonzero() == 2


def test_the_importance_weight_by_hand():
    """log( (e^0 / .25 + e^2 / .5) / 2 ) - 1, and for the other head with e^1 and - 2."""
    out = table_chai(cql_weight=1.0, reduction="none")(two_turns(terminated=True))
    heads = [np.log((np.exp(0) / 0.25 + np.exp(x) / 0.5) / 2) - y for x, y in ((2, 1), (1, 2))]
    assert out["loss_cql"][0, 1].item() == pytest.approx(sum(heads), rel=1e-5)


def test_a_state_without_candidates_gives_no_target():
    rows = two_turns(terminated=False)
    rows["candidate_mask"][0, 2] = False
    out = table_chai(gamma=0.5, reduction="none")(rows)
    assert out["loss_qvalue"][0].nonzero().flatten().tolist() == [1]
    assert out["loss_cql"][0].nonzero().flatten().tolist() == [1, 3]
    rows["candidate_mask"][0, 0] = False
    whole = table_chai(gamma=0.5, cql_weight=1.0)(rows)
    assert whole["loss_qvalue"].item() == pytest.approx(out["loss_qvalue"].sum().item())
    assert whole["loss_cql"].item() == pytest.approx(out["loss_cql"][0, 3].item() / 0.1, rel=1e-5)


def test_missing_and_misshapen_columns_are_named(rows):
    loss = make_chai()
    with pytest.raises(KeyError, match=r"candidate_feature.*CandidateSampler"):
        loss(rows.exclude("candidate_feature"))
    with pytest.raises(ValueError, match=r"candidate_log_prob must have shape \[6, \d, 3\]"):
        loss(rows.clone().set("candidate_log_prob", rows["candidate_log_prob"][..., :2]))
    with pytest.raises(TypeError, match="state_mask must be bool"):
        loss(rows.clone().set("state_mask", rows["state_mask"].long()))
    with pytest.raises(ValueError, match="reads 'utterance_value'"):
        CHAILoss(qvalue_module(QValueHead(WIDTH, 5)))


# -- the candidates ----------------------------------------------------------------------------------------------------


def feature_of(tokens, position):
    """The mean of the hidden states of a single unpadded row up to a position."""
    with torch.no_grad():
        hidden = make_actor()[0](TensorDict(tokens=tokens[None], attention_mask=torch.ones_like(tokens[None]).bool()))
    return hidden["hidden"][0, : position + 1].mean(0)


def test_features_of_the_data_and_where_there_are_candidates(rows):
    assert rows["state_mask"].shape[1] == max(len(utterances_of(rows, b, 1)[0]) for b in range(6)) + 1
    for b in range(6):
        found, boot = utterances_of(rows, b, 1)
        positions = [utterance[0] - 1 for utterance in found] + ([boot] if found else [])
        assert rows["state_position"][b][rows["state_mask"][b]].tolist() == positions
        expected = [True] * len(positions)
        if found and rows["terminated"][b]:
            expected[-1] = False
        assert rows["candidate_mask"][b, : len(positions)].tolist() == expected
        assert not rows["candidate_mask"][b, len(positions) :].any()
        for i, utterance in enumerate(found):
            feature = feature_of(rows["tokens"][b, : utterance[-1] + 1], utterance[-1] - 1)
            torch.testing.assert_close(rows["utterance_feature"][b, i], feature, rtol=1e-4, atol=1e-5)
        assert not rows["utterance_feature"][b, len(found) :].any()


def test_candidates_features_are_those_of_rows_into_which_they_were_written():
    """The same utterance has one feature as a candidate in the dataset, as one in play, and as one of the data."""
    policy = make_policy(seed=7)
    prefix, length = torch.tensor([[3, 7, 2, 0, 0], [3, 6, 8, 9, 2]]), torch.tensor([3, 5])
    attention = torch.arange(5) < length[:, None]
    drawn = policy.decoder.generate(prefix, attention, candidates=6)
    features = candidate_features(policy, prefix, length, drawn.action)
    ends = set()
    for i, action in enumerate(drawn.action.tolist()):
        written = action[: action.index(CONTROL.end_of_action) + 1]
        ends.add(len(written))
        row = torch.tensor(prefix[i // 6, : length[i // 6]].tolist() + written)
        torch.testing.assert_close(features[i // 6, i % 6], feature_of(row, len(row) - 2), rtol=1e-4, atol=1e-5)
    assert len(ends) > 1
    wide = {"tokens": nn.functional.pad(prefix, (0, 4)), "attention_mask": nn.functional.pad(attention, (0, 4))}
    rows = appended(TensorDict(wide, batch_size=[2]), drawn.action, CONTROL)
    added = CandidateSampler(policy, 1)(rows)
    torch.testing.assert_close(added["utterance_feature"][:, 0], features.flatten(0, 1), rtol=1e-4, atol=1e-5)


def test_log_probabilities_are_those_of_the_policy():
    """Of the sampled utterances, found again by their features; an impossible one has none."""
    policy, rows = make_policy(seed=1, temperature=0.7), make_rows()
    out = CandidateSampler(policy, 4, rows_at_a_time=100)(rows)
    again = make_policy(seed=1, temperature=0.7)
    states = [(int(position), b) for b in range(6) for position in out["state_position"][b][out["candidate_mask"][b]]]
    order = sorted(range(len(states)), key=lambda i: states[i][0])
    lengths = torch.tensor([states[i][0] + 1 for i in order])
    prefix = torch.stack([rows["tokens"][states[i][1]] for i in order])[:, : int(lengths.max())]
    attention = torch.arange(prefix.shape[1]) < lengths[:, None]
    assert len(set(lengths.tolist())) < len(lengths)  # ties: their order is that of the sampler's sort
    drawn = again.decoder.generate(prefix, attention, candidates=4)
    repeated = TensorDict(tokens=prefix, attention_mask=attention, batch_size=[len(prefix)])
    repeated = repeated[torch.arange(len(prefix)).repeat_interleave(4)]
    expected = again.get_dist(repeated).log_prob(drawn.action).detach()
    found = out["candidate_log_prob"][out["candidate_mask"]]
    torch.testing.assert_close(found.flatten().sort().values, expected.sort().values, rtol=1e-4, atol=1e-5)


def test_the_same_seed_gives_the_same_columns_and_blocks_change_no_feature_of_the_data():
    rows = make_rows()
    one, same = (CandidateSampler(make_policy(3), 2, rows_at_a_time=4)(rows) for _ in range(2))
    assert (one == same).all()
    other = CandidateSampler(make_policy(3), 2, rows_at_a_time=1)(rows)
    for key in ("state_position", "state_mask", "candidate_mask", "utterance_feature"):
        torch.testing.assert_close(other[key], one[key], rtol=1e-4, atol=1e-5)
    nested = CandidateSampler(make_policy(3), 2, rows_at_a_time=4)(rows.reshape(2, 3))
    assert nested["candidate_feature"].shape[:2] == (2, 3)
    assert torch.equal(nested["candidate_feature"].flatten(0, 1), one["candidate_feature"])


def test_where_the_model_has_no_positions_for_another_utterance_there_are_no_candidates():
    """The model reads 32 tokens; an utterance of up to 22 may begin at most after ten."""
    rows = make_rows()
    out = CandidateSampler(UtteranceActor(make_actor(), CONTROL, 22, seed=0), 2)(rows)
    full = CandidateSampler(make_policy(), 2)(rows)["candidate_mask"]
    late = out["state_position"] + 1 + 22 > 32
    assert (full & late).any()
    assert torch.equal(out["candidate_mask"], full & ~late)
    assert total(make_chai()(out)).isfinite()


def test_policies_that_do_not_sample_to_the_end_are_refused():
    with pytest.raises(ValueError, match="method='sample', got method='greedy'"):
        CHAIActor(make_policy(method="greedy"), UtteranceQValueHead(WIDTH))
    with pytest.raises(ValueError, match="candidates must be an integer of at least 1"):
        CandidateSampler(make_policy(), 0)
    with pytest.raises(ValueError, match="must give 'utterance_value', a ValueHead does not"):
        CHAIActor(make_policy(), ValueHead(WIDTH))


# -- the policy --------------------------------------------------------------------------------------------------------


def prompts():
    tokens = torch.tensor([[3, 7, 2, 0, 0, 0], [3, 6, 8, 9, 2, 0], [4, 0, 0, 0, 0, 0]])
    return TensorDict(tokens=tokens, attention_mask=tokens != 0, batch_size=[3])


def test_the_candidate_with_the_highest_value_is_played():
    head, policy = moved(UtteranceQValueHead(WIDTH), 5), make_policy(seed=2)
    out = CHAIActor(policy, head, candidates=7)(prompts())
    drawn = make_policy(seed=2).decoder.generate(prompts()["tokens"], prompts()["attention_mask"], candidates=7)
    best = []
    for b in range(3):
        values = []
        for action in drawn.action[b * 7 : b * 7 + 7].tolist():
            begin = prompts()["tokens"][b][prompts()["attention_mask"][b]].tolist()
            row = torch.tensor(begin + action[: action.index(1) + 1])
            values.append(head(feature_of(row, len(row) - 2)[None]).min().item())
        best.append(b * 7 + int(np.argmax(values)))
    assert torch.equal(out["action"], drawn.action[best])
    torch.testing.assert_close(out["token_log_prob"], drawn.token_log_prob[best])
    torch.testing.assert_close(out["action_log_prob"], drawn.token_log_prob[best].sum(-1))


def test_done_rows_get_an_empty_utterance_and_change_no_other():
    head = moved(UtteranceQValueHead(WIDTH), 5)
    whole = CHAIActor(make_policy(seed=2), head, candidates=4)(prompts())
    done = torch.tensor([[False], [True], [False]])
    some = CHAIActor(make_policy(seed=2), head, candidates=4)(prompts().set("done", done))
    assert some["action"][1].tolist() == [1, 0, 0, 0]
    assert torch.equal(some["action"][[0, 2]], whole["action"][[0, 2]])
    none = CHAIActor(make_policy(seed=2), head, candidates=4)(prompts().set("done", torch.ones(3, 1, dtype=torch.bool)))
    assert none["action"][:, 0].tolist() == [1, 1, 1]


def test_the_metrics_are_means_over_what_they_name():
    """Of the two targets by hand, 5 and 3, the second is of a state that has no candidates."""
    rows = two_turns(terminated=False)
    out = table_chai(gamma=0.5)(rows)
    assert (out["candidate_value"].item(), out["qvalue"].item()) == (4.0, 2.5)
    rows["candidate_mask"][0, 2] = False
    assert table_chai(gamma=0.5)(rows)["candidate_value"].item() == 5.0


def test_modules_heads_shapes_and_greedy_decoding():
    head = moved(UtteranceQValueHead(WIDTH), 5)
    one = CHAIActor(make_policy(seed=2), head)(prompts())["action"]
    assert torch.equal(CHAIActor(make_policy(seed=2), qvalue_module(head))(prompts())["action"], one)
    nested = CHAIActor(make_policy(seed=2), head)(prompts().reshape(1, 3))
    assert torch.equal(nested["action"][0], one)
    assert nested["action_log_prob"].shape == (1, 3)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        greedy = CHAIActor(make_policy(seed=2), head)(prompts())["action"]
        assert torch.equal(greedy, make_policy()(prompts())["action"])


# -- learning ----------------------------------------------------------------------------------------------------------

LETTERS = [6, 7, 8]
REWARD = torch.tensor([[0.0, 0.3, 0.5], [-1.0, 1.0, -1.0], [0.2, 0.0, 0.1]])
"""Of the second letter after the first: the best end follows the middle one, whose average is the worst."""


def two_letter_games(n=256):
    """Rows ``<a> x </a> reply y </a> end`` with letters chosen at random; a reward for the second alone."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randint(3, (2, n), generator=g)
    letters = torch.tensor(LETTERS)
    fixed = [torch.full((n,), token) for token in (4, 1, 9, 1, 5)]
    tokens = torch.stack([fixed[0], letters[x], fixed[1], fixed[2], letters[y], fixed[3], fixed[4]], -1)
    reward = torch.zeros(n, 7)
    reward[:, 5] = REWARD[x, y]
    agent = torch.tensor([False, True, True, False, True, True, False]).expand(n, 7)
    return TensorDict(
        tokens=tokens,
        attention_mask=torch.ones(n, 7, dtype=torch.bool),
        agent_mask=agent.clone(),
        token_reward=reward,
        terminated=torch.ones(n, 1, dtype=torch.bool),
        batch_size=[n],
    )


@pytest.mark.slow
def test_it_finds_the_values_of_the_best_play_and_plays_it():
    """Q of the first letter is gamma times the best, not the average, of what can follow it."""
    policy = UtteranceActor(make_actor(), CONTROL, 2, seed=0, forbidden=[t for t in range(12) if t not in LETTERS])
    rows = CandidateSampler(policy, 16)(two_letter_games())
    torch.manual_seed(0)
    loss = CHAILoss(qvalue_module(UtteranceQValueHead(WIDTH)), gamma=0.9, cql_weight=0.0)
    buffer, updater = row_buffer(rows, 64, seed=0), SoftUpdate(loss, tau=0.05)
    for _ in train_steps(loss, buffer.sample, adamw(loss, 5e-3), steps=600, target_updater=updater, max_grad_norm=10.0):
        pass
    values = loss.target_qvalue_network().module(rows["utterance_feature"]).amin(-1)
    x, y = rows["tokens"][:, 1] - 6, rows["tokens"][:, 4] - 6
    torch.testing.assert_close(values[:, 1], REWARD[x, y], rtol=0, atol=0.1)
    torch.testing.assert_close(values[:, 0], 0.9 * REWARD.amax(-1)[x], rtol=0, atol=0.1)
    begin = TensorDict(
        tokens=torch.tensor([[4, 0, 0, 0], [4, 7, 1, 9], [4, 6, 1, 9]]),
        attention_mask=torch.tensor([[True, False, False, False], [True] * 4, [True] * 4]),
        batch_size=[3],
    )
    best = CHAIActor(policy, loss.target_qvalue_network(), candidates=32)(begin)["action"]
    assert best.tolist() == [[7, 1], [7, 1], [8, 1]]


@pytest.mark.slow
def test_the_regulariser_lowers_the_values_of_what_the_data_never_tried():
    """Only the first letter is in the data: with the term Q of the others lies below its own."""
    policy = UtteranceActor(make_actor(), CONTROL, 2, seed=0, forbidden=[t for t in range(12) if t not in LETTERS])
    games = two_letter_games()
    rows = CandidateSampler(policy, 16)(games[games["tokens"][:, 4] == LETTERS[0]])
    features = CandidateSampler(policy, 1)(games)["utterance_feature"][:, 1]
    untried = games["tokens"][:, 4] != LETTERS[0]
    gaps = []
    for weight in (0.0, 1.0):
        torch.manual_seed(0)
        loss = CHAILoss(qvalue_module(UtteranceQValueHead(WIDTH)), gamma=0.9, cql_weight=weight)
        buffer, updater = row_buffer(rows, 64, seed=0), SoftUpdate(loss, tau=0.05)
        training = train_steps(loss, buffer.sample, adamw(loss, 5e-3), steps=200, target_updater=updater)
        figures = [figures for _, figures in training][-1]
        values = loss.target_qvalue_network().module(features).amin(-1).detach()
        gaps.append(float(values[~untried].mean() - values[untried].mean()))
    assert gaps[1] > gaps[0] + 1.0
    assert figures["loss_cql"] > 0
