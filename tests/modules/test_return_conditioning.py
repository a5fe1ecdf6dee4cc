"""Returns in the ids of tokens: what the trunk reads, cached decoding, games, and saving."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

from tests.modules.test_prefix_cache import Counter
from tests.modules.toys import CONTROL, KINDS, TOKENIZER, WIDTH, rows, sliding_lm, tiny_lm
from torchrl_lang import modules
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.functional.decisions import shift_right
from torchrl_lang.objectives import DecisionTransformerLoss

MODES = ("constant", "decremented")
K, V = 4, TOKENIZER.vocab_size
CLOSE = {"atol": 1e-6, "rtol": 1e-6}


def embedding(mode="decremented", low=-8.0, high=2.0, width=WIDTH, **options):
    """Embeddings that change a policy's choices."""
    returns = modules.ReturnEmbedding(width, low, high, mode=mode, **options)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        returns.weight.normal_()
        returns.bias.normal_()
    return returns


def conditioned(lm, mode="decremented", **options):
    return modules.condition_on_returns(modules.language_actor(lm), embedding(mode, **options).to(lm.dtype))


def carrying(batch, returns, every=3):
    """The rows with a return on some tokens."""
    chosen = torch.arange(batch["tokens"].shape[-1]) % every == 0
    number = torch.arange(batch["tokens"].shape[0])[:, None] * 100 % returns.n_bins
    return batch.clone().set("tokens", batch["tokens"] + torch.where(chosen, V * (number + 1), 0))


def prompts():
    batch = rows(n=12)
    blank = torch.zeros_like(batch["tokens"])
    return batch.update({"agent_mask": blank.bool(), "token_reward": blank.float()})


@pytest.mark.parametrize("kind", KINDS)
def test_the_trunk_adds_the_embedding_of_the_return(kind):
    lm = tiny_lm(kind)
    trunk, batch = conditioned(lm)[0].module, rows()
    returns = trunk.returns
    with torch.no_grad():
        raw = trunk(batch["tokens"])
        assert torch.equal(raw, modules.Trunk(lm)(batch["tokens"]))  # ids without a return are read as before
        ids = batch["tokens"].clone()
        ids[:, 0] += V * (1 + 750)  # 3/4 of the way from -8 to 2, scaled to 0.5
        embedded = F.embedding(batch["tokens"], lm.get_input_embeddings().weight)
        embedded[:, 0] += 0.5 * returns.weight + returns.bias
        torch.testing.assert_close(trunk(ids), lm.base_model(inputs_embeds=embedded).last_hidden_state)


def test_embeddings_with_code_of_their_own_are_used():
    """Gemma scales its embeddings, LoRA adds to them."""
    lm = sliding_lm("gemma3_text")
    batch, other = rows(), tiny_lm("llama")
    adapted = get_peft_model(other, LoraConfig(target_modules=["embed_tokens"], init_lora_weights=False))
    for model in (lm, adapted.double()):
        actor = modules.language_actor(model)
        plain = actor[0].module(batch["tokens"])
        returns = modules.ReturnEmbedding(WIDTH, 0.0, 1.0).double()  # zero
        again = modules.condition_on_returns(actor, returns)[0].module(carrying(batch, returns)["tokens"])
        assert torch.equal(again, plain)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_saved_folder_holds_a_plain_model_and_the_embedding(tmp_path, kind):
    lm = tiny_lm(kind)
    actor = conditioned(lm, target=-1.5)
    returns = actor[0].module.returns
    modules.save_language_model(tmp_path / "actor", actor, {"returns": returns}, tokenizer=TOKENIZER.config())
    modules.save_language_model(tmp_path / "plain", lm, tokenizer=TOKENIZER.config())
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("actor", "plain")]
    assert weights[0] == weights[1]
    saved = modules.load_language_model(tmp_path / "actor")
    held = saved.heads["returns"]
    assert held.config() == returns.config()
    assert [*held.config().values()] == [WIDTH, -8.0, 2.0, "decremented", -1.5, 1001]
    loaded = modules.condition_on_returns(modules.language_actor(saved.lm), held)
    batch = carrying(rows(), returns)
    assert torch.equal(loaded.get_dist(batch).logits, actor.get_dist(batch).logits)


@pytest.mark.parametrize(("kind", "method"), [("gpt2", "sample"), ("llama", "beam"), ("qwen2", "best_of")])
def test_cached_equals_uncached_and_the_distribution_agrees(kind, method):
    actor, batch = conditioned(tiny_lm(kind)), prompts()
    batch["target_return"] = torch.linspace(-8, 2, 12)[:, None]

    def play(target=None, **options):
        inner = modules.UtteranceActor(actor, CONTROL, K, seed=3, method=method, **options)
        return modules.ReturnConditionedActor(inner, target)

    cached, uncached = (play(cached=flag, prefix_cache=flag)(batch.clone()) for flag in (True, False))
    assert torch.equal(cached["action"], uncached["action"])
    torch.testing.assert_close(cached["token_log_prob"], uncached["token_log_prob"], atol=1e-4, rtol=1e-4)
    scored = play().log_prob(batch.clone().set("action", cached["action"]))
    torch.testing.assert_close(scored, cached["action_log_prob"], atol=1e-4, rtol=1e-4)
    one = play(2.0)(batch.exclude("target_return"))
    assert not torch.equal(one["action_log_prob"], cached["action_log_prob"])  # the return matters
    torch.testing.assert_close(one["action_log_prob"][-1:], cached["action_log_prob"][-1:], atol=1e-4, rtol=1e-4)


@pytest.fixture
def corridor():
    return CorridorEnv(4, max_turns=6, batch_size=[9], seed=0)


def corridor_policy(env, mode, *, target=-2.0, kind="gpt2", **options):
    lm = tiny_lm(kind, vocab_size=env.tokenizer.vocab_size, max_length=40).double()
    inner = modules.UtteranceActor(conditioned(lm, mode), env.tokenizer.control, 2, seed=1, temperature=2.0, **options)
    return modules.ReturnConditionedActor(inner, target)


@pytest.mark.parametrize(("mode", "kind"), [*zip(MODES, ("gpt2", "llama"), strict=True)])
def test_games_with_a_reused_prefix_equal_games_without_one(corridor, mode, kind):
    def play(reuse):
        corridor.set_seed(5)
        policy = corridor_policy(corridor, mode, kind=kind, prefix_cache=reuse)
        counter = Counter(policy.actor.decoder.actor[0].module)
        return corridor.rollout(12, policy, break_when_any_done=False), counter.take() if kind == "llama" else 0

    (kept, fewer), (anew, more) = play(True), play(False)
    assert torch.equal(kept["action"], anew["action"])
    torch.testing.assert_close(kept["token_log_prob"], anew["token_log_prob"], **CLOSE)
    assert kind == "gpt2" or fewer < 0.7 * more  # earlier turns were not read again
    assert (kept["tokens"] < corridor.tokenizer.vocab_size).all()


@pytest.mark.parametrize("mode", MODES)
def test_what_a_game_recorded_is_what_the_loss_computes_for_the_same_return(mode):
    """In two moves no walk reaches the goal: every game has the return -2, which the policy was asked for."""
    env = CorridorEnv(4, start=0, max_turns=2, batch_size=[9], seed=0)
    policy = corridor_policy(env, mode, target=-2.0, diagnostics=True)
    # The loss reads the language model's own distribution: without the tokens that the policy may not generate.
    head = policy.actor.decoder.actor[1].module
    head.bias = nn.Parameter(torch.zeros(head.out_features).double())
    with torch.no_grad():
        head.bias[list(env.tokenizer.control.forbidden_in_action())] = -1e4
    steps = env.rollout(12, policy, break_when_any_done=False)
    games = rows_from_rollout(steps, unfinished="drop", carry=["behavior_log_prob"])
    assert (games["token_reward"].sum(-1) == -2).all()
    loss = DecisionTransformerLoss(policy.actor, reduction="none")
    chosen = games["agent_mask"] & ~shift_right(games["agent_mask"])  # the second of two slots is certain
    found = -shift_right(loss(games)["loss_actor"].detach())
    torch.testing.assert_close(found[chosen].float(), games["behavior_log_prob"][chosen], atol=1e-5, rtol=1e-5)
    policy.target_return = 1.0
    other = env.rollout(12, policy, break_when_any_done=False)
    assert not torch.equal(other["behavior_log_prob"], steps["behavior_log_prob"])


def test_a_new_target_or_new_weights_are_read_although_the_prefix_is_cached():
    actor, batch = conditioned(tiny_lm().double(), "constant"), prompts()

    def player(target):
        return modules.ReturnConditionedActor(modules.UtteranceActor(actor, CONTROL, K, method="greedy"), target)

    policy, found = player(0.0), []
    for change in (lambda weight: weight, lambda weight: weight, lambda weight: weight.mul_(-1)):
        with torch.no_grad():
            change(actor[0].module.returns.weight)
        found.append(policy(batch.clone())["action_log_prob"])
        torch.testing.assert_close(found[-1], player(policy.target_return)(batch.clone())["action_log_prob"], **CLOSE)
        policy.target_return = -7.0
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_a_return_to_go_that_leaves_the_range_is_clamped(corridor):
    policy = corridor_policy(corridor, "decremented", target=2.0)  # each move costs 1, so more and more remains
    steps = corridor.rollout(5, policy, break_when_any_done=False)
    assert (steps["next", "token_reward"].sum(-1).amin() < -1).item()
    assert policy.conditioned(steps[:, -1])["tokens"].max() // corridor.tokenizer.vocab_size == 1001
    assert not modules.ReturnEmbedding(WIDTH, 0.0, 0.0).outside(torch.zeros(1))  # all games may have the same return
