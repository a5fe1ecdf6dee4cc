"""The utterance actor as a policy of TorchRL, compiled, and with values while acting."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import ExplorationType, set_exploration_type

from tests.modules.test_decoding import CLOSE, K, guidance, policy, spoken
from tests.modules.test_prefix_cache import grown
from tests.modules.toys import CONTROL, heads, rows, tiny_lm
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs import WordleEnv
from torchrl_lang.modules import Trunk, UtteranceActor, ValueHead, causal_lm, language_actor


def wordle_policy(env, **options):
    tokenizer = env.tokenizer
    shape = {"vocab_size": tokenizer.vocab_size, "layers": 1, "width": 16, "heads": 2, "max_length": env.row_length}
    lm = causal_lm(**shape, pad=tokenizer.control.pad)
    return UtteranceActor(language_actor(lm), tokenizer.control, env.action_length, **({"seed": 0} | options))


def test_writes_its_keys_and_nothing_of_the_size_of_the_vocabulary():
    said = policy()(rows().reshape(7, 1))
    assert set(said.keys()) == {"tokens", "attention_mask", "action", "action_log_prob", "token_log_prob"}
    assert said["action"].shape == (7, 1, K)
    assert said["action"].dtype == torch.int64
    assert said["action_log_prob"].shape == (7, 1)
    torch.testing.assert_close(said["token_log_prob"].sum(-1), said["action_log_prob"])


def test_seeds():
    batch = rows(n=32)
    first = policy(seed=5)
    said = [actor(batch.clone())["action"] for actor in (first, policy(seed=5), policy(seed=6), first)]
    assert torch.equal(said[0], said[1])
    assert not torch.equal(said[0], said[2])
    assert not torch.equal(said[0], said[3])  # the stream moves on
    state = torch.get_rng_state()
    one, other = (policy(seed=None)(batch.clone())["action"] for _ in range(2))
    assert not torch.equal(one, other)
    assert torch.equal(state, torch.get_rng_state())
    one, other = (policy(seed=None, generator=torch.Generator().manual_seed(1))(batch.clone()) for _ in range(2))
    assert torch.equal(one["action"], other["action"])


@pytest.mark.parametrize("method", ["sample", "best_of"])
def test_deterministic_exploration_is_greedy(method):
    batch = rows()
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        said = policy(method=method)(batch.clone())
    assert torch.equal(said["action"], policy(method="greedy")(batch.clone())["action"])
    assert torch.equal(said["action"], policy(method=method).get_dist(batch).mode)


def test_rows_that_are_done_are_left_out_and_move_nobody_else():
    batch = rows()
    done = torch.tensor([0, 1, 0, 0, 1, 0, 0], dtype=torch.bool)[:, None]
    everyone, some = policy()(batch.clone()), policy()(batch.clone().set("done", done))
    live = ~done[:, 0]
    assert torch.equal(everyone["action"][live], some["action"][live])
    silent = [CONTROL.end_of_action] + [CONTROL.pad] * (K - 1)
    assert some["action"][~live].tolist() == [silent, silent]
    assert (some["action_log_prob"][~live] == 0).all()
    assert policy()(batch.clone().set("done", torch.ones_like(done)))["action"].tolist() == [silent] * 7


def test_copies_of_an_unseeded_actor_go_their_own_ways():
    actor, batch = policy(seed=None), rows(n=32)
    copies = actor, copy.deepcopy(actor), pickle.loads(pickle.dumps(actor))  # noqa: S301
    said = [twin(batch.clone())["action"] for twin in copies]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(said, 2))
    own = policy(seed=None, generator=torch.Generator().manual_seed(1))
    twin = copy.deepcopy(own)
    assert torch.equal(twin(batch.clone())["action"], own(batch.clone())["action"])


def test_dropout_is_off_while_acting_and_flags_come_back():
    lm = tiny_lm()
    lm.config.resid_pdrop = 0.5
    for block in lm.base_model.h:
        block.mlp.dropout.p = 0.5
    actor = UtteranceActor(language_actor(lm), CONTROL, K, method="greedy")
    expected = actor.eval()(rows())["token_log_prob"]
    actor.train()
    lm.base_model.h[0].eval()
    torch.testing.assert_close(actor(rows())["token_log_prob"], expected)
    assert lm.base_model.h[1].training
    assert not lm.base_model.h[0].training


def test_plays_in_a_collector_and_takes_new_weights():
    env = wordle(8)
    actor = wordle_policy(env, method="greedy")
    collector = Collector(env, actor, frames_per_batch=64, total_frames=192, auto_register_policy_transforms=False)
    first = next(iter(collector))
    assert first["action_log_prob"].shape == (8, 8)
    with torch.no_grad():  # from now on it says nothing but "z"
        head = actor.decoder.actor[1].module.weight
        head.zero_()
        head[25] = 1.0
        actor.decoder.actor[0].module.model.ln_f.weight.zero_()
        actor.decoder.actor[0].module.model.ln_f.bias.fill_(1.0)
    collector.update_policy_weights_()
    second = next(iter(collector))
    collector.shutdown()
    assert (second["action"][..., :5] == 25).all()
    assert not (first["action"][..., :5] == 25).all()


def wordle(n=4):
    return WordleEnv(["crane", "slate", "light"], batch_size=[n], seed=0)


@pytest.mark.slow
def test_a_seeded_actor_goes_on_with_its_numbers_in_a_worker_process():
    options = {"frames_per_batch": 32, "total_frames": 32, "auto_register_policy_transforms": False}
    torch.manual_seed(0)
    actor = wordle_policy(wordle(), seed=7)
    actor(wordle().reset())  # a stream in the middle
    here, found = Collector(wordle(), copy.deepcopy(actor), **options), []
    for collector in (here, MultiSyncCollector([wordle], actor, **options)):
        found.append(next(iter(collector))["action"].flatten(0, -2).clone())
        collector.shutdown()
    assert torch.equal(*found)
    assert actor.decoder.stream.is_seeded


def valued(kind="gpt2", **options):
    return policy(kind, **({"value": heads()[1]} | options))


def by_whole_rows(actor, batch, action):
    """V by one pass over row and utterance, a row at a time."""
    out = torch.zeros(action.shape)
    for i, length in enumerate(batch["attention_mask"].sum(-1).tolist()):
        said = int(spoken(action[i, None]).sum())
        tokens = torch.cat([batch["tokens"][i, :length].long(), action[i, :said]])
        hidden = actor.decoder.actor[0].module(tokens[None])[0]
        out[i, :said] = actor.decoder.value.eval()(hidden[length - 1 : -1]).squeeze(-1)
    certain = torch.arange(action.shape[1]) == action.shape[1] - 1  # utterances that did not end before
    return out.masked_fill(certain & spoken(action), torch.nan)


@pytest.mark.parametrize(("kind", "method"), [("gpt2", "sample"), ("llama", "greedy"), ("qwen2", "sample")])
@torch.no_grad()
def test_values_are_those_of_a_pass_over_the_whole_row(kind, method):
    batch = rows(n=24)  # some end early, so that rows leave the batch
    actor = valued(kind, method=method, temperature=1.3)
    plain = policy(kind, method=method, temperature=1.3)
    cached, uncached = (valued(kind, method=method, temperature=1.3, cached=c)(batch.clone()) for c in (True, False))
    assert torch.equal(cached["action"], uncached["action"])
    torch.testing.assert_close(cached["state_value"], uncached["state_value"], equal_nan=True, **CLOSE)
    expected = by_whole_rows(actor, batch, cached["action"])
    torch.testing.assert_close(cached["state_value"], expected, equal_nan=True, **CLOSE)
    assert torch.equal(plain(batch.clone())["action"], cached["action"])
    assert actor.out_keys == [*plain.out_keys, "state_value"]
    if method == "sample":
        lengths = spoken(cached["action"]).sum(-1)
        assert lengths.min() < K <= lengths.max()


def test_the_value_is_of_the_actors_states_also_where_the_guidance_has_an_own_trunk():
    guided = valued(guidance=guidance(value_trunk=Trunk(tiny_lm(seed=5))))
    said = guided(rows())
    with torch.no_grad():
        expected = by_whole_rows(guided, rows(), said["action"])
    torch.testing.assert_close(said["state_value"], expected, equal_nan=True, **CLOSE)


def test_values_travel_from_a_rollout_into_rows():
    env = wordle(8)
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


@pytest.mark.slow
def test_compiled_decoding_says_the_same_and_one_graph_serves_all_steps_of_all_turns():
    lm, graphs, said = tiny_lm(layers=1), [], []
    for backend in (None, lambda graph, inputs: graphs.append(graph) or graph):
        torch.manual_seed(0)
        actor, batch = language_actor(lm), rows(5, 32, longest=1)
        if backend is not None:
            actor[0].module.compile(backend=backend)
        policy = UtteranceActor(actor, CONTROL, K, method="greedy")
        for _ in range(3):
            out = policy(batch.clone())
            said += [out["action"], out["token_log_prob"]]
            batch = grown(batch, out["action"])
    for expected, found in zip(said[:6], said[6:], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1
