"""The values that acting writes beside its words: V of the state in which each token was said."""

from __future__ import annotations

import pytest
import torch

from tests.modules.test_decoding import CLOSE, K, guidance, policy, spoken
from tests.modules.test_utterance_actor import wordle_policy
from tests.modules.toys import CONTROL, KINDS, WIDTH, heads, rows, tiny_lm
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs import WordleEnv
from torchrl_lang.modules import Trunk, UtteranceActor, ValueHead, language_actor, value_module


def valued(kind="gpt2", **options):
    return policy(kind, **({"value": heads()[1]} | options))


def certain(action):
    """True in the last slot of utterances that did not end before."""
    last = torch.zeros_like(action, dtype=torch.bool)
    last[:, -1] = spoken(action)[:, -1]
    return last


def by_whole_rows(actor, batch, action):
    """V by one pass over row and utterance, a row at a time."""
    out = torch.zeros(action.shape)
    for i, length in enumerate(batch["attention_mask"].sum(-1).tolist()):
        said = int(spoken(action[i, None]).sum())
        tokens = torch.cat([batch["tokens"][i, :length].long(), action[i, :said]])
        hidden = actor.decoder.actor[0].module(tokens[None])[0]
        out[i, :said] = actor.decoder.value.eval()(hidden[length - 1 : -1]).squeeze(-1)
    return out.masked_fill(certain(action), torch.nan)


@pytest.mark.parametrize("method", ["sample", "greedy"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_values_are_those_of_a_pass_over_the_whole_row(kind, method):
    batch = rows(n=24)  # some end early, so that rows leave the batch
    actor = valued(kind, method=method, temperature=1.3)
    cached, uncached = (valued(kind, method=method, temperature=1.3, cached=c)(batch.clone()) for c in (True, False))
    assert torch.equal(cached["action"], uncached["action"])
    torch.testing.assert_close(cached["state_value"], uncached["state_value"], equal_nan=True, **CLOSE)
    expected = by_whole_rows(actor, batch, cached["action"])
    torch.testing.assert_close(cached["state_value"], expected, equal_nan=True, **CLOSE)
    assert cached["state_value"].dtype == torch.float32
    assert cached["state_value"].isnan().sum() == certain(cached["action"]).sum()
    if method == "sample":
        lengths = spoken(cached["action"]).sum(-1)
        assert lengths.min() < K <= lengths.max()


def test_what_is_said_stays_the_same_and_values_come_under_their_key():
    batch, plain = rows(n=24), policy(guidance=guidance())
    actor = valued(guidance=guidance())
    expected, said = plain(batch.clone()), actor(batch.clone())
    assert actor.out_keys == [*plain.out_keys, "state_value"]
    assert set(said.keys()) == {*expected.keys(), "state_value"}
    for key in plain.out_keys:
        assert torch.equal(expected[key], said[key])
    module = valued(guidance=guidance(), value=value_module(heads()[1]))
    torch.testing.assert_close(module(batch.clone())["state_value"], said["state_value"], equal_nan=True)


def test_a_value_of_ones_shows_the_slots():
    head = ValueHead(WIDTH)
    with torch.no_grad():
        head.out_weight.zero_()
        head.out_bias.fill_(1.0)
    said = valued(value=head)(rows(n=24))
    expected = spoken(said["action"]).float().masked_fill(certain(said["action"]), torch.nan)
    torch.testing.assert_close(said["state_value"], expected, equal_nan=True)
    one = valued(value=head, action_length=1)(rows(n=3))
    assert one["state_value"].isnan().all()


def test_residual_heads_and_an_own_value_trunk():
    actor = language_actor(tiny_lm(), expose_pre_norm=True)
    value = heads(kind="residual")[1]
    cached, uncached = (UtteranceActor(actor, CONTROL, K, value=value, seed=3, cached=c)(rows()) for c in (True, False))
    torch.testing.assert_close(cached["state_value"], uncached["state_value"], equal_nan=True, **CLOSE)
    # The guidance may have a trunk of its own; the value is always of the actor's states.
    guided = valued(guidance=guidance(value_trunk=Trunk(tiny_lm(seed=5))))
    said = guided(rows())
    with torch.no_grad():
        expected = by_whole_rows(guided, rows(), said["action"])
    torch.testing.assert_close(said["state_value"], expected, equal_nan=True, **CLOSE)
    with pytest.raises(KeyError, match="ValueHead reads 'hidden_pre_norm'"):
        valued(value=value)


def test_dropout_of_the_head_is_off_while_acting():
    actor = language_actor(tiny_lm(), expose_pre_norm=True)
    value = ValueHead(WIDTH, kind="residual", dropout=0.9).train()
    said = [UtteranceActor(actor, CONTROL, K, value=value, seed=0)(rows())["state_value"] for _ in range(2)]
    assert torch.equal(*(x.nan_to_num() for x in said))
    assert not said[0].requires_grad
    assert value.training


def test_values_travel_from_a_rollout_into_rows():
    env = WordleEnv(["crane", "slate", "light"], batch_size=[8], seed=0)
    actor = wordle_policy(env, value=ValueHead(16))
    with torch.no_grad():
        actor.decoder.value.out_bias.fill_(0.7)
    played = env.rollout(6, actor, break_when_any_done=False)
    found = rows_from_rollout(played, unfinished="truncate", carry=["token_log_prob", "state_value"])
    agents = found["agent_mask"]
    assert (found["state_value"][~agents] == 0).all()
    hidden = actor.decoder.actor[0].module(found["tokens"].long())
    expected = actor.decoder.value(hidden[:, :-1]).squeeze(-1)
    read = agents[:, 1:] & ~found["state_value"][:, 1:].isnan()
    assert 0 < read.sum() < agents.sum()  # the ends in certain slots have no value
    torch.testing.assert_close(found["state_value"][:, 1:][read], expected[read], **CLOSE)
