"""CHAI: its terms by loops, its candidates, its policy, learning."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives import SoftUpdate

from tests.objectives import models
from tests.objectives.models import CONTROL, WIDTH, chai_rows, make_actor, make_chai, make_policy, make_rows, moved
from tests.objectives.oracle import assert_matches, chai_losses
from torchrl_lang import modules
from torchrl_lang.data import row_buffer
from torchrl_lang.modules import CandidateSampler, CHAIActor, UtteranceActor, UtteranceQValueHead, qvalue_module
from torchrl_lang.modules.chai import candidate_features
from torchrl_lang.objectives import CHAILoss
from torchrl_lang.training import adamw, train_steps

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")


@pytest.fixture
def rows():
    return chai_rows()


# -- the terms ---------------------------------------------------------------------------------------------------------


def evaluated(loss, rows):
    """Values of all features as lists by row and state, computed from rows into which the candidates were written."""
    online, target = loss.qvalue_network, loss.target_qvalue_network()
    with loss.qvalue_network_params.to_module(online):
        mine = [online.module(rows[key]) for key in ("utterance_feature", "candidate_feature")]
    theirs = target.module(rows["candidate_feature"])
    return [[list(row) for row in values.detach().numpy()] for values in (*mine, theirs)]


@pytest.mark.parametrize("variant", ["all", "train-mask", "no-room"])
@pytest.mark.parametrize(("seed", "gamma"), [(0, 0.99), (1, 0.5)])
def test_terms_match_plain_loops(seed, gamma, variant):
    """In states without room there are no candidates: they give no target to the utterance before."""
    rows, loss = chai_rows(8, seed), make_chai(gamma=gamma, cql_weight=1.0).double()
    trained, room = models.vary(rows, variant).get("train_mask"), None
    if variant == "no-room":
        room = torch.rand(rows["candidate_mask"].shape, generator=torch.Generator().manual_seed(seed)) < 0.6
        rows["candidate_mask"] = room = rows["candidate_mask"] & room
    doubled = rows.apply(lambda value: value.double() if value.is_floating_point() else value)
    q, candidates, target = evaluated(loss, doubled)
    log_prob = doubled["candidate_log_prob"].numpy()
    expected = chai_losses(rows, q, candidates, target, log_prob, gamma=gamma, trained=trained, room=room)
    assert_matches(loss(doubled), expected, "loss_", rtol=1e-6)


def test_missing_and_misshapen_columns_are_named(rows):
    loss = make_chai()
    with pytest.raises(KeyError, match=r"candidate_feature.*CandidateSampler"):
        loss(rows.exclude("candidate_feature"))
    with pytest.raises(ValueError, match=r"candidate_log_prob must have shape \[6, \d, 3\]"):
        loss(rows.clone().set("candidate_log_prob", rows["candidate_log_prob"][..., :2]))
    with pytest.raises(TypeError, match="state_mask must be bool"):
        loss(rows.clone().set("state_mask", rows["state_mask"].long()))
    with pytest.raises(ValueError, match="reads 'utterance_value'"):
        CHAILoss(qvalue_module(modules.QValueHead(WIDTH, 5)))


# -- the candidates ----------------------------------------------------------------------------------------------------


def feature_of(tokens, position):
    """The mean of the hidden states of a single unpadded row up to a position."""
    with torch.no_grad():
        hidden = make_actor()[0](TensorDict(tokens=tokens[None], attention_mask=torch.ones_like(tokens[None]).bool()))
    return hidden["hidden"][0, : position + 1].mean(0)


def test_features_of_the_data_and_where_there_are_candidates(rows):
    assert rows["state_mask"].shape[1] == max(len(models.utterances_of(rows, b, 1)[0]) for b in range(6)) + 1
    for b in range(6):
        found, boot = models.utterances_of(rows, b, 1)
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
    """So that the same utterance has one feature as a candidate and as one of the data."""
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


def test_where_the_model_has_no_positions_for_another_utterance_there_are_no_candidates():
    """The model reads 32 tokens; an utterance of up to 22 may begin at most after ten."""
    rows = make_rows()
    out = CandidateSampler(UtteranceActor(make_actor(), CONTROL, 22, seed=0), 2)(rows)
    full = CandidateSampler(make_policy(), 2)(rows)["candidate_mask"]
    late = out["state_position"] + 1 + 22 > 32
    assert (full & late).any()
    assert torch.equal(out["candidate_mask"], full & ~late)
    assert models.total(make_chai()(out)).isfinite()


# -- the policy --------------------------------------------------------------------------------------------------------


def read(tokens):
    tokens = torch.tensor(tokens)
    return TensorDict(tokens=tokens, attention_mask=tokens != 0, batch_size=[len(tokens)])


def prompts():
    return read([[3, 7, 2, 0, 0, 0], [3, 6, 8, 9, 2, 0], [4, 0, 0, 0, 0, 0]])


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
    return models.by_hand(tokens, agent.clone(), reward)


@pytest.mark.slow
def test_it_finds_the_values_of_the_best_play_and_plays_it():
    """Q of the first letter is gamma times the best, not the average, of what can follow it."""
    policy = UtteranceActor(make_actor(), CONTROL, 2, seed=0, forbidden=[t for t in range(12) if t not in LETTERS])
    rows = CandidateSampler(policy, 16)(two_letter_games())
    torch.manual_seed(0)
    loss = CHAILoss(qvalue_module(UtteranceQValueHead(WIDTH)), gamma=0.9, cql_weight=0.0)
    buffer, updater = row_buffer(rows, 64, seed=0), SoftUpdate(loss, tau=0.1)
    for _ in train_steps(loss, buffer.sample, adamw(loss, 1e-2), steps=200, target_updater=updater, max_grad_norm=10.0):
        pass
    values = loss.target_qvalue_network().module(rows["utterance_feature"]).amin(-1)
    x, y = rows["tokens"][:, 1] - 6, rows["tokens"][:, 4] - 6
    torch.testing.assert_close(values[:, 1], REWARD[x, y], rtol=0, atol=0.1)
    torch.testing.assert_close(values[:, 0], 0.9 * REWARD.amax(-1)[x], rtol=0, atol=0.1)
    begin = read([[4, 0, 0, 0], [4, 7, 1, 9], [4, 6, 1, 9]])
    best = CHAIActor(policy, loss.target_qvalue_network(), candidates=32)(begin)["action"]
    assert best.tolist() == [[7, 1], [7, 1], [8, 1]]
