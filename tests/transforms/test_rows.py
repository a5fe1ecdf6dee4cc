"""Whole rows under a reference: one pass, the same numbers as acting, and nothing on what the agent did not write."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Categorical, kl_divergence

from tests.modules.toys import KINDS, tiny_lm
from tests.objectives.models import make_rows
from torchrl_lang import transforms
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs import WordleEnv
from torchrl_lang.modules import UtteranceActor, language_actor
from torchrl_lang.modules.frozen.frozen_copy import CurrentPolicy
from torchrl_lang.transforms import KLDivergenceTransform, ReferenceModelLogProbTransform, RowReference, frozen_copy

CONTROL = WordleEnv(batch_size=[1]).tokenizer.control


def wordle(n):
    return WordleEnv(["crane", "slate", "pious"], batch_size=[n], max_tries=3, seed=0)


def plain_log_prob(lm, rows):
    """What Hugging Face's own forward says of the agent's tokens."""
    with torch.no_grad():
        logits = lm(input_ids=rows["tokens"], attention_mask=rows["attention_mask"].long()).logits[:, :-1]
    taken = logits.log_softmax(-1).gather(-1, rows["tokens"][:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(taken, (1, 0)) * rows["agent_mask"]


def jitter(actor, scale=0.05, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in actor.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def score(reference, rows):
    return ReferenceModelLogProbTransform(reference)(rows.copy())["ref_log_prob"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_log_probability_is_the_model_s_own(kind):
    lm, rows = tiny_lm(kind), make_rows()
    found = score(language_actor(lm), rows)
    assert found.shape == rows["tokens"].shape
    torch.testing.assert_close(found, plain_log_prob(lm, rows), atol=1e-4, rtol=1e-5)
    assert (found[~rows["agent_mask"]] == 0).all()
    assert (found[rows["agent_mask"]] < 0).all()


def test_gradients_flow_through_an_estimate_that_is_to_be_differentiable_alone():
    logs = {"action_log_prob": torch.zeros(2, requires_grad=True), "ref_log_prob": torch.ones(2)}
    for options, flows in (({}, False), ({"differentiable": True}, True)):
        found = KLDivergenceTransform(**options)(TensorDict(logs, batch_size=[2]))["kl"]
        assert found.requires_grad is flows


def test_padding_and_order_and_shape_and_type_change_nothing():
    rows, actor = make_rows(), language_actor(tiny_lm(), length_groups=3)
    found, order = score(actor, rows), torch.tensor([3, 0, 5, 1, 4, 2])
    wider = TensorDict({k: torch.nn.functional.pad(v, (0, 7)) for k, v in rows.items()}, batch_size=[6])
    padding = torch.where(rows["attention_mask"], rows["tokens"], 3)
    for other, expected in (
        (rows[order], found[order]),
        (wider, torch.nn.functional.pad(found, (0, 7))),
        (rows.clone().set("tokens", padding), found),
        (rows.reshape(2, 3), found.reshape(2, 3, -1)),
        (rows.clone().set("tokens", rows["tokens"].int()), found),
    ):
        torch.testing.assert_close(score(actor, other), expected, atol=1e-5, rtol=1e-5)


def play(policy, env, steps=12):
    return env.rollout(steps, policy, break_when_any_done=False)


def speaker(env, seed=0, **options):
    lm = tiny_lm(vocab_size=env.tokenizer.vocab_size, max_length=env.row_length + env.action_length)
    return UtteranceActor(language_actor(lm), env.tokenizer.control, env.action_length, seed=seed, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 3, "temperature": 0.5},
        {"top_p": 0.8, "temperature": 2.0},
        {"min_p": 0.3},
        {"forbidden": (0, 1, *CONTROL.forbidden_in_action())},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_rows_turns_and_acting_agree(options):
    """What acting wrote, what one pass a turn says and what one pass a row says are the same numbers."""
    env = wordle(8)
    policy = speaker(env, **options)
    rollout = play(policy, env)
    rows = rows_from_rollout(rollout, unfinished="drop", carry=["token_log_prob"])
    assert len(rows) >= 8
    row = score(RowReference(frozen_copy(policy)), rows)
    torch.testing.assert_close(row, rows["token_log_prob"], atol=1e-4, rtol=1e-4)
    turn = ReferenceModelLogProbTransform(policy)(rollout.copy())["next", "ref_log_prob"]
    alive = ~rollout["done"].squeeze(-1)
    torch.testing.assert_close(turn[alive], rollout["token_log_prob"][alive], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("direction", "chunk_size"), [("reverse", 4), ("forward", 1024)])
def test_the_exact_divergence_is_torch_s(direction, chunk_size):
    actor, rows = language_actor(tiny_lm()), make_rows()
    reference = frozen_copy(actor)
    jitter(actor)
    options = {"direction": direction, "mask_key": "agent_mask", "chunk_size": chunk_size}
    found = KLDivergenceTransform("exact", policy=actor, reference=reference, **options)(rows.copy())["kl"]
    with torch.no_grad():
        p, q = (Categorical(logits=model.get_dist(rows).logits) for model in (actor, reference.actor))
    plain = kl_divergence(q, p) if direction == "forward" else kl_divergence(p, q)
    expected = torch.nn.functional.pad(plain[:, :-1], (1, 0)) * rows["agent_mask"]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert found[rows["agent_mask"]].min() > 0


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.5}, {"top_k": 3}, {"min_p": 0.9}, {"forbidden": tuple(range(5, 30))}],
    ids=["colder", "top-k", "min-p", "forbidden"],
)
def test_the_exact_divergence_of_actors_with_options(options):
    """Linear heads are folded over the vocabulary, filters are not; both are the divergence of what acting samples."""
    env = wordle(8)
    policy = speaker(env, **options)
    reference = frozen_copy(policy)
    jitter(policy, 0.1 if options.keys() & {"temperature", "forbidden"} else 0.01)
    rows = rows_from_rollout(play(policy, env), unfinished="drop")
    actors = {"policy": RowReference(CurrentPolicy(policy)), "reference": RowReference(reference)}
    found = KLDivergenceTransform("exact", **actors)(rows.copy())["kl"]
    tokens, mask = rows["tokens"], rows["agent_mask"]
    with torch.no_grad():
        p, q = (
            actor.decoder.rule({"logits": actor.decoder.actor.get_dist(rows).logits.flatten(0, 1)})
            for actor in (policy, reference.actor)
        )
    plain = torch.where(p > -torch.inf, p.exp() * (p - q), 0).sum(-1).view(tokens.shape)
    expected = torch.where(mask, torch.nn.functional.pad(plain[:, :-1], (1, 0)), 0)
    for row in range(len(rows)):
        slot = 0
        for place in range(tokens.shape[1]):
            slot = slot + 1 if mask[row, place] else 0
            if slot == env.action_length:
                expected[row, place] = 0  # must be the end, under both
            if tokens[row, place] == CONTROL.end_of_action:
                slot = 0
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_the_whole_penalty_on_the_last_token(per):
    actor, rows = language_actor(tiny_lm()), make_rows()
    rows["agent_mask"][2] = False
    rows["token_reward"] = rows["token_reward"] * rows["agent_mask"]
    rows["token_log_prob"] = plain_log_prob(tiny_lm(seed=3), rows)
    spread = transforms.KLConstrainedTransform(actor, 0.5)(rows.copy())["token_reward"]
    out = transforms.KLConstrainedTransform(actor, 0.5, per=per, placement="last")(rows.copy())["token_reward"]
    torch.testing.assert_close(out.sum(-1), spread.sum(-1), atol=1e-4, rtol=1e-4)
    changed = (out != rows["token_reward"]).nonzero().tolist()
    last = {(row, int(mask.nonzero().max())) for row, mask in enumerate(rows["agent_mask"]) if mask.any()}
    assert {tuple(place) for place in changed} == last


def test_errors_say_what_to_do():
    env, rows = wordle(2), make_rows()
    policy = speaker(env)
    rollout, actor = play(policy, env, 3), policy.decoder.actor
    turns, whole = rows_from_rollout(rollout, unfinished="truncate"), RowReference(frozen_copy(policy))
    scored, exact = ReferenceModelLogProbTransform(actor), KLDivergenceTransform("exact", policy=actor, reference=whole)
    whole_rows = transforms.RewardAdjustmentTransform(reward_key="token_reward")
    for call, error, match in (
        (lambda: scored(rollout), ValueError, "rows_from_rollout"),
        (lambda: env.append_transform(scored.clone()).reset(), ValueError, "pass an UtteranceActor"),
        (lambda: exact(turns), ValueError, "both be UtteranceActors"),
        (lambda: transforms.KLConstrainedTransform(actor)(rows), KeyError, "token_log_prob"),
        (lambda: scored(rows.exclude("agent_mask")), KeyError, "'agent_mask'"),
        (lambda: whole_rows(rows.set("kl", torch.zeros(6, 1, 1))), ValueError, "placement='last'"),
    ):
        with pytest.raises(error, match=match):
            call()
