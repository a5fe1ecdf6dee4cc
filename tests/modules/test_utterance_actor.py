"""The utterance actor as a policy of TorchRL."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import ExplorationType, set_exploration_type

from tests.modules.test_decoding import K, guidance, policy
from tests.modules.toys import CONTROL, rows, tiny_lm
from torchrl_lang.envs import WordleEnv
from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor


def wordle_policy(env, **options):
    tokenizer = env.tokenizer
    lm = causal_lm(
        vocab_size=tokenizer.vocab_size,
        layers=1,
        width=16,
        heads=2,
        max_length=env.row_length,
        pad=tokenizer.control.pad,
    )
    return UtteranceActor(language_actor(lm), tokenizer.control, env.action_length, **({"seed": 0} | options))


def test_writes_its_keys_and_nothing_of_the_size_of_the_vocabulary():
    said = policy()(rows().reshape(7, 1))
    assert set(said.keys()) == {"tokens", "attention_mask", "action", "action_log_prob", "token_log_prob"}
    assert said["action"].shape == (7, 1, K)
    assert said["action"].dtype == torch.int64
    assert said["action_log_prob"].shape == (7, 1)
    torch.testing.assert_close(said["token_log_prob"].sum(-1), said["action_log_prob"])
    both = policy(diagnostics=True)(rows())
    assert both["behavior_log_prob"].shape == both["token_entropy"].shape == (7, K)


def test_seeds():
    batch = rows(n=32)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first, second = policy(seed=5), policy(seed=5)
    assert torch.equal(first(batch.clone())["action"], second(batch.clone())["action"])
    assert not torch.equal(policy(seed=6)(batch.clone())["action"], policy(seed=5)(batch.clone())["action"])
    assert not torch.equal(
        first(batch.clone())["action"], policy(seed=5)(batch.clone())["action"]
    )  # the stream moves on
    said = []
    for _ in range(2):
        torch.manual_seed(1)
        said.append(policy(seed=None)(batch.clone())["action"])
    assert not torch.equal(*said)
    torch.set_rng_state(state)
    policy(seed=None)(batch.clone())
    assert torch.equal(state, torch.get_rng_state())


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


def test_copies_say_the_same():
    actor, batch = policy(guidance=guidance()), rows()
    # Collectors send policies to their worker processes by pickling them.
    copies = copy.deepcopy(actor), pickle.loads(pickle.dumps(actor))  # noqa: S301
    expected = actor(batch.clone())["action"]
    for twin in copies:
        assert torch.equal(twin(batch.clone())["action"], expected)


def test_copies_of_an_unseeded_actor_go_their_own_ways():
    actor, batch = policy(seed=None), rows(n=32)
    copies = actor, copy.deepcopy(actor), pickle.loads(pickle.dumps(actor))  # noqa: S301
    said = [twin(batch.clone())["action"] for twin in copies]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(said, 2))
    own = policy(seed=None, generator=torch.Generator().manual_seed(1))
    twin = copy.deepcopy(own)
    assert torch.equal(twin(batch.clone())["action"], own(batch.clone())["action"])


def test_missing_entries_are_told():
    actor = policy()
    for key in ("tokens", "attention_mask"):
        for call in (actor, actor.get_dist):
            with pytest.raises(KeyError, match=f"A row needs '{key}'"):
                call(rows().exclude(key))
    with pytest.raises(KeyError, match="A row needs 'action'"):
        actor.log_prob(rows())


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
    env = WordleEnv(["crane", "slate", "light"], batch_size=[8], seed=0)
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


def seeded_wordle():
    return WordleEnv(["crane", "slate", "light"], batch_size=[4], seed=0)


@pytest.mark.slow
def test_a_seeded_actor_goes_on_with_its_numbers_in_a_worker_process():
    options = {"frames_per_batch": 32, "total_frames": 32, "auto_register_policy_transforms": False}
    torch.manual_seed(0)
    actor = wordle_policy(seeded_wordle(), seed=7)
    actor(seeded_wordle().reset())  # a stream in the middle
    here = Collector(seeded_wordle(), copy.deepcopy(actor), **options)
    expected = next(iter(here))
    here.shutdown()
    worker = MultiSyncCollector([seeded_wordle], actor, **options)
    found = next(iter(worker)).clone()
    worker.shutdown()
    assert torch.equal(found["action"].flatten(0, -2), expected["action"].flatten(0, -2))
    assert actor.decoder.stream.is_seeded
