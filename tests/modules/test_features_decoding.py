"""Decoding after features: with a cache as without, from turn to turn, and never with another row's features."""

from __future__ import annotations

import pytest
import torch

from tests.modules.featured_rows import P, feature_rows, projector, reading
from tests.modules.test_decoding import METHODS, K, guidance
from tests.modules.test_prefix_cache import EXACT, WIDTH, Counter, N, agree, grown, kept_of, lm_of, own_values
from tests.modules.toys import CONTROL, tiny_lm
from torchrl_lang.modules import CandidateSampler, Trunk, UtteranceActor, with_features
from torchrl_lang.schema import DONE
from torchrl_lang.transforms import frozen_copy
from torchrl_lang.transforms.language_references import UtteranceReference


def actor_of(kind="gpt2", **options):
    return reading(lm=lm_of(kind), **options)


GUIDES = {
    "plain": lambda: None,
    "exp": lambda: guidance().double(),
    "own trunk": own_values,
    "own trunk with features": lambda: guidance(
        clip=0.5, value_trunk=with_features(Trunk(lm_of(seed=5)), projector(seed=7))
    ).double(),
}


def policy_of(actor, **options):
    return UtteranceActor(actor, CONTROL, K, **({"seed": 3, "diagnostics": True, "temperature": 1.3} | options))


def kept_and_anew(actor, **options):
    return policy_of(actor, **options), policy_of(actor, cached=False, **options)


def carried(batch, action):
    """The rows a turn later: longer, with the same features."""
    return grown(batch, action).update({key: batch[key] for key in ("features", "features_mask") if key in batch})


WAYS = [("gpt2", guide, flag, method) for guide, flag, method in zip(GUIDES, (True, False) * 2, METHODS, strict=True)]
WAYS += [("gpt2", "plain", False, "beam"), ("llama", "plain", True, "best_of"), ("qwen2", "plain", False, "sample")]


@pytest.mark.parametrize(("kind", "guide", "positions", "method"), WAYS)
def test_a_dialogue_goes_as_without_a_cache(kind, positions, guide, method):
    both = kept_and_anew(actor_of(kind, positions=positions), guidance=GUIDES[guide](), method=method)
    batch = feature_rows("all" if method == "beam" else "some", n=N, width=WIDTH, longest=9)
    for _ in range(3):
        batch = carried(batch, agree(both, batch)["action"])
    assert kept_of(both[0]) is not None


@pytest.mark.parametrize(("guide", "positions"), [("exp", True), ("own trunk with features", False)])
def test_the_distribution_agrees_with_decoding(guide, positions):
    batch = feature_rows(n=N, width=20, longest=12)
    policy = policy_of(actor_of(positions=positions), guidance=GUIDES[guide]())
    out = policy(batch.clone())
    dist = policy.get_dist(batch)
    torch.testing.assert_close(dist.token_log_prob(out["action"]).float(), out["token_log_prob"], **EXACT)
    greedy = policy_of(policy.decoder.actor, method="greedy", guidance=GUIDES[guide]())
    assert torch.equal(dist.mode, greedy(batch.clone())["action"])
    shaped = policy.get_dist(batch.reshape(1, N)).log_prob(out["action"][None])
    torch.testing.assert_close(shaped[0].float(), out["action_log_prob"], **EXACT)
    each = dist.log_prob(torch.stack([dist.mode, out["action"]]))  # sample dimensions
    torch.testing.assert_close(each[1].float(), out["action_log_prob"], **EXACT)


@pytest.mark.parametrize("change", ["a value", "the mask", "fewer", "no mask"])
def test_a_row_whose_features_change_is_read_anew(change):
    actor = actor_of(scale=3.0)
    both, batch = kept_and_anew(actor, method="greedy"), feature_rows(n=N, width=WIDTH, longest=9)
    batch = carried(batch, agree(both, batch)["action"])
    before = agree(both, batch)
    if change == "a value":
        batch["features"][0, 0] += 1.0
        batch["features"][3, 1] += 1.0
    elif change == "the mask":
        batch["features_mask"][1] = True
    elif change == "fewer":
        batch.update({key: batch[key][:, :2] for key in ("features", "features_mask")})
    else:
        batch = batch.exclude("features_mask")
    after = agree(both, batch)
    assert not torch.allclose(before["token_log_prob"], after["token_log_prob"])


def lengthened(batch, action, reply):
    """The rows with the whole utterance and ``reply`` letters behind them."""
    length = batch["attention_mask"].sum(-1, keepdim=True)
    said = torch.cat([action, torch.randint(6, (len(action), reply))], -1)
    tokens = batch["tokens"].scatter(-1, length + torch.arange(said.shape[1]), said)
    return batch.clone().update({"tokens": tokens, "attention_mask": torch.arange(WIDTH) < length + said.shape[1]})


def test_a_turn_costs_its_new_tokens_also_of_rows_that_move_in_the_cache():
    """Features are read once; masked ones may change."""
    actor = actor_of()
    counter, forbidden = Counter(actor[0].module), (*CONTROL.forbidden_in_action(), CONTROL.end_of_action)
    policy = policy_of(actor, forbidden=forbidden)
    batch = feature_rows(n=N, width=WIDTH, longest=9)
    batch = lengthened(batch, policy(batch.clone())["action"], 3)
    assert counter.take() <= N * (9 + P + K - 2)
    batch["features"][~batch["features_mask"]] = torch.nan
    done = torch.arange(N)[:, None] < 2
    out = policy(batch.clone().set(DONE, done))
    assert counter.take() == (N - 2) * (3 + 2 + K - 2)  # the last two tokens of an utterance were not read
    assert kept_of(policy).place.tolist() != list(range(N))
    batch = torch.where(done, batch, lengthened(batch, out["action"], 3))
    policy(batch.clone())
    assert counter.take() == N * (3 + 2 + K - 2)


def test_prompts_read_in_two_groups():
    """Few rows with many new tokens are read apart from those with few."""
    lm = tiny_lm(max_length=700).double()
    both, batch = kept_and_anew(reading(lm=lm, scale=2.0)), feature_rows(n=N, width=600, longest=500)
    batch = carried(batch, agree(both, batch)["action"])
    batch["features"][2] += 1.0
    agree(both, batch)


def test_a_reference_of_single_turns_reads_what_the_policy_reads():
    policy = policy_of(actor_of(scale=3.0), diagnostics=False)
    reference = UtteranceReference(frozen_copy(policy))
    step = policy(feature_rows(n=N)).set(DONE, torch.arange(N)[:, None] == 2)
    found = reference.log_prob(step, step)
    assert not found[2].any()
    done = step.clone().set(DONE, torch.ones(N, 1, dtype=torch.bool))
    assert not reference.log_prob(done, done).any()
    others = torch.arange(N) != 2
    torch.testing.assert_close(found[others].float(), step["token_log_prob"][others], **EXACT)
    with pytest.raises(KeyError, match="needs 'features', found only"):
        reference.log_prob(step.exclude("features"), step)


def test_candidates_of_a_dataset_read_the_features_of_their_rows():
    batch = feature_rows(n=N, width=20)
    batch["agent_mask"] = batch["attention_mask"] & (torch.arange(20) % 4 > 1)
    batch["terminated"] = torch.ones(N, 1, dtype=torch.bool)
    actor = actor_of(scale=3.0)
    changed = batch.clone().set("features", batch["features"] + 1)
    out, same, others = (
        CandidateSampler(policy_of(actor, diagnostics=False, temperature=1.0), 2, rows_at_a_time=3)(x)
        for x in (batch, batch, changed)
    )
    trunk = actor[0]
    for row in range(N):
        slots = out["state_mask"][row].nonzero().flatten()[:-1]  # the last state has no utterance
        states = trunk(batch[row : row + 1].clone())["hidden"][0].detach().float()
        agent = batch["agent_mask"][row].tolist() + [False]
        ends = [place for place in range(1, 20) if agent[place] and not agent[place + 1]]
        assert len(slots) == len(ends)
        for slot, end in zip(slots.tolist(), ends, strict=True):  # the last token is written in the state before it
            torch.testing.assert_close(out["utterance_feature"][row, slot], states[:end].mean(0), **EXACT)
    assert torch.equal(same["candidate_log_prob"], out["candidate_log_prob"])
    assert not torch.allclose(others["candidate_log_prob"], out["candidate_log_prob"])
