from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict
from tokenizers import Tokenizer, models, pre_tokenizers
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from transformers import PreTrainedTokenizerFast

from tests.envs.adapters.test_chat_env import Count, letters
from tests.envs.adapters.test_chat_env import wrapper as generating
from torchrl_lang.envs import GameChatEnv
from torchrl_lang.modules import causal_lm, language_actor
from torchrl_lang.transforms import KLConstrainedTransform, KLRewardTransform, WrapperReference, adapters_off
from torchrl_lang.transforms.language_references import as_policy, as_reference

SYMBOLS = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>", *"abcdeusrintyo \n"]
VOCABULARY = len(SYMBOLS)
FULL, SCORES, REF = ("tokens", "full"), ("log_probs", "full"), ("ref_log_probs", "full")
ATTENTION, ASSISTANT = ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")
TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n'}}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{m['content'] + '<|im_end|>'}}{% endgeneration %}"
    "{% else %}{{m['content'] + '<|im_end|>'}}{% endif %}{{'\n'}}{% endfor %}"
)


def characters():
    """A Hugging Face tokenizer of single characters, which can tell what the assistant wrote."""
    symbols = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token="<pad>"))
    symbols.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = ["<|im_start|>", "<|im_end|>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=symbols,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=special,
        chat_template=TEMPLATE,
    )


def model(kind="qwen2", seed=0):
    """Large weights, so that the distributions are far from uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lm = causal_lm(kind, vocab_size=VOCABULARY, layers=2, width=16, heads=2, max_length=64, pad=0)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)
    return lm


def wrapper(lm=None, mode="tokens", **options):
    lm = model() if lm is None else lm
    return TransformersWrapper(lm, tokenizer=characters(), input_mode=mode, **({"generate": False} | options))


def whole_rows(n=6, width=14, seed=0):
    """Rows of this library, some positions of each the agent's; the last row is all padding but for one token."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(4, width - 1, (n,), generator=generator)
    length[-1] = 1
    attention = torch.arange(width) < length[:, None]
    tokens = torch.randint(4, VOCABULARY, (n, width), generator=generator).masked_fill(~attention, 0)
    action = attention & (torch.rand(n, width, generator=generator) < 0.5)
    action[:, 0] = False
    data = {"tokens": tokens, "attention_mask": attention, "agent_mask": action}
    return TensorDict(data | {"token_reward": torch.zeros(n, width)}, batch_size=[n])


def conversations(rows, left):
    """The same in TorchRL's layout, padded as it is (right), or each row moved to the right end (left)."""
    shift = (rows["tokens"].shape[-1] - rows["attention_mask"].sum(-1)) * left
    tokens, attention, action = (
        torch.stack([row.roll(int(by)) for row, by in zip(rows[key], shift, strict=True)])
        for key in ("tokens", "attention_mask", "agent_mask")
    )
    masks = {"all_attention_mask": attention, "all_assistant_mask": action}
    return TensorDict({"tokens": {"full": tokens}, "masks": masks}, batch_size=rows.batch_size)


def one_by_one(lm, tokens, attention):
    """Log-probability of each token after the first: every row alone, without padding."""
    out = torch.zeros(tokens.shape)
    for row, real, scores in zip(tokens, attention, out, strict=True):
        ids = row[real]
        with torch.no_grad():
            logits = lm(input_ids=ids[None]).logits[0, :-1]
        scores[real.nonzero().squeeze(-1)[1:]] = logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
    return out


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2"])
def test_conversations_whatever_side_is_padded(kind, left):
    lm, data = model(kind), conversations(whole_rows(), left)
    expected = one_by_one(lm, data[FULL], data[ATTENTION])
    whole = WrapperReference(wrapper(lm), assistant_only=False).log_prob(data, data)
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)
    agent = WrapperReference(wrapper(lm)).log_prob(data, data)
    torch.testing.assert_close(agent, expected * data[ASSISTANT], atol=1e-5, rtol=1e-5)
    grid = data.reshape(2, 3)
    torch.testing.assert_close(WrapperReference(wrapper(lm)).log_prob(grid, grid), agent.reshape(2, 3, -1))


def test_the_log_probabilities_of_the_wrapper_itself():
    lm, data = model(), conversations(whole_rows(), left=True)
    scored = wrapper(lm, pad_output=True)(data.clone())
    ours = WrapperReference(wrapper(lm), assistant_only=False).log_prob(data, data)
    torch.testing.assert_close(ours, scored[SCORES].detach(), atol=1e-5, rtol=1e-5)


def test_adapters_switched_off():
    lm, data = model(), conversations(whole_rows(), left=True)
    plain = WrapperReference(wrapper(copy.deepcopy(lm))).log_prob(data, data)
    lora = get_peft_model(lm, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    base = WrapperReference(adapters_off(language_actor(wrapper(lora).model)))
    torch.testing.assert_close(base.log_prob(data, data), plain)
    assert (as_policy(wrapper(lora)).log_prob(data, data) - plain).abs().max() > 0.01


def test_reward_of_conversations():
    lm, steps = model(), conversations(whole_rows(), left=True)
    steps.update(wrapper(model(seed=1), pad_output=True)(steps.clone()).select(SCORES).detach())
    steps["next"] = TensorDict(reward=torch.ones(6, 1), batch_size=[6])
    out = KLConstrainedTransform(wrapper(lm), 0.5)(steps)
    kl = ((steps[SCORES] - one_by_one(lm, steps[FULL], steps[ATTENTION])) * steps[ASSISTANT]).sum(-1)
    torch.testing.assert_close(out["next", "reward"], 1 - 0.5 * kl[:, None], atol=1e-4, rtol=1e-4)
    assert out["next"].get(REF).shape == steps[FULL].shape


def test_what_cannot_be_scored():
    engine, padded = wrapper(), conversations(whole_rows(), left=True)
    engine.__dict__["model"] = "an address"
    engine._modules.pop("model", None)
    with pytest.raises(TypeError, match=r"FunctionReference"):
        WrapperReference(engine)
    ragged = [conversations(whole_rows(1, width), left=False).to_lazystack(0) for width in (8, 9)]
    for data, error, match in (
        (whole_rows(), ValueError, "conversations"),
        *((padded.exclude(key), KeyError, key[-1]) for key in (FULL, ATTENTION, ASSISTANT)),
        (torch.cat(ragged), ValueError, "pad_output=True"),
    ):
        with pytest.raises(error, match=match):
            as_reference(wrapper()).log_prob(data, data)


@pytest.fixture(scope="module")
def players():
    """A policy and another model, as wrappers that generate."""
    source = letters()
    return source, generating(source), generating(source, seed=5)


def scored(wrapper, step):
    """TorchRL's log-probability of a step's response."""
    scoring = wrapper.get_new_version(generate=False, input_mode="tokens", pad_output=True, input_key=FULL)
    out = scoring(TensorDict(tokens={"full": step["tokens"].full[None]}, batch_size=[1]))
    return out[SCORES][0, -len(step["tokens"].response) :].sum().detach()


@pytest.mark.parametrize("place", ["environment", "steps"])
def test_the_reward_of_generated_responses(players, place):
    source, policy, reference = players
    env = GameChatEnv(Count, seed=3, tokenizer=source)
    transform = KLConstrainedTransform(reference, 0.5, policy=policy)
    env = TransformedEnv(env, transform) if place == "environment" else env
    steps = env.rollout(5, policy, break_when_any_done=False)
    steps = steps if place == "environment" else transform(steps)
    kl = torch.stack([scored(policy, step) - scored(reference, step) for step in steps[0]])
    assert kl.abs().min() > 1e-3
    torch.testing.assert_close(steps["next", "kl"].flatten(), kl, atol=1e-4, rtol=1e-4)
    earned = torch.tensor([float(len(step["history"].response[0].content)) for step in steps[0]])
    torch.testing.assert_close(steps["next", "reward"].flatten(), earned - 0.5 * kl, atol=1e-4, rtol=1e-4)
    by_hand = [step["log_probs"].response.clone() for step in steps[0]]
    for log_probs, step in zip(by_hand, steps[0], strict=True):  # as an engine writes them
        log_probs[0] = scored(policy, step) - log_probs[1:].sum()
        step["log_probs"].response = log_probs
    transform = KLConstrainedTransform(reference, 0.5, log_prob_key=("log_probs", "response"))
    again = transform(steps.exclude(("next", "raw_reward"), ("next", "kl"), ("next", "ref_log_prob")))
    torch.testing.assert_close(again["next", "kl"].flatten(), kl, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("number", [2, 4])
def test_several_conversations_with_responses_of_unequal_lengths(players, number):
    """An environment's transform writes what it writes on the finished steps, and pays accordingly."""
    source, policy, reference = players
    transform = KLConstrainedTransform(reference, 0.5, policy=policy)
    torch.manual_seed(number)
    env = TransformedEnv(GameChatEnv(Count, seed=3, tokenizer=source, batch_size=(number,)), transform)
    steps = env.rollout(2, policy)
    lengths = [[len(step["tokens"].response) for step in row] for row in steps]
    assert all(len({*at_once}) > 1 for at_once in zip(*lengths, strict=True))
    earned = torch.tensor([[float(len(step["history"].response[0].content)) for step in row] for row in steps])
    kl = steps["next", "kl"].squeeze(-1)
    torch.testing.assert_close(steps["next", "reward"].squeeze(-1), earned - 0.5 * kl)
    finished = steps.exclude(("next", "raw_reward"), ("next", "kl"), ("next", "ref_log_prob"))
    again = KLConstrainedTransform(reference, 0.5, policy=policy)(finished)
    torch.testing.assert_close(again["next", "kl"].squeeze(-1), kl)
    by_hand = [[scored(policy, step) - scored(reference, step) for step in row] for row in steps]
    torch.testing.assert_close(kl, torch.tensor(by_hand), atol=1e-4, rtol=1e-4)


def test_the_wrapper_itself_as_reference_and_policy(players):
    source, policy, other = players
    env = TransformedEnv(GameChatEnv(Count, seed=3, tokenizer=source), KLRewardTransform(policy, 2.0))
    assert env.rollout(3, policy)["next", "kl"].abs().max() < 1e-5
    before = copy.deepcopy(policy.model.state_dict())
    policy.model.load_state_dict(other.model.state_dict())
    assert env.rollout(3, policy)["next", "kl"].abs().min() > 1e-3
    policy.model.load_state_dict(before)


def test_generated_steps_that_cannot_be_scored(players):
    source, policy, reference = players
    env = GameChatEnv(Count, seed=3, tokenizer=source)
    steps = env.rollout(2, policy)
    written = ("log_probs", "response")
    padded = env.rollout(1, policy.get_new_version(pad_output=True))
    for transform, data, match in (
        (KLConstrainedTransform(reference), steps, "that generates, KLConstrained.*policy=wrapper"),
        (KLConstrainedTransform(reference, log_prob_key=written), steps, "0 for the first token.*pass policy=wrapper"),
        (KLConstrainedTransform(wrapper()), steps[:, 0], r"pass that wrapper \(generate=True\), or ResponseReference"),
        (KLConstrainedTransform(reference, policy=policy), whole_rows(), "need WrapperReference.*rows a RowRef"),
        (KLConstrainedTransform(reference, policy=policy), padded, "pad_output=False"),
    ):
        with pytest.raises((KeyError, ValueError), match=match):
            transform(data)
    with pytest.raises(ValueError, match=r"WrapperReference scores whole conversations\. For steps that a wrapper gen"):
        TransformedEnv(env, KLConstrainedTransform(wrapper())).reset()
    chat = TransformedEnv(ChatEnv(tokenizer=source), KLConstrainedTransform(reference, policy=policy))
    with pytest.raises(KeyError, match="ChatEnv has none"):
        chat.reset(TensorDict(query=["a"], batch_size=[1]))
