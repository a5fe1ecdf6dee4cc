from __future__ import annotations

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict
from tokenizers import Tokenizer, models, pre_tokenizers
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs.llm.transforms.kl import RetrieveLogProb
from torchrl.modules.llm import TransformersWrapper
from transformers import PreTrainedTokenizerFast

from torchrl_lang.modules import causal_lm, language_actor
from torchrl_lang.transforms import (
    KLConstrainedTransform,
    ReferenceModelLogProbTransform,
    WrapperReference,
    adapters_off,
)
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


def test_the_log_probabilities_of_the_wrapper_itself():
    lm, data = model(), conversations(whole_rows(), left=True)
    scored = wrapper(lm, pad_output=True)(data.clone())
    ours = WrapperReference(wrapper(lm), assistant_only=False).log_prob(data, data)
    torch.testing.assert_close(ours, scored[SCORES].detach(), atol=1e-5, rtol=1e-5)


def test_gpt2_fails_in_torchrl_itself_or_this_page_is_out_of_date():
    data = conversations(whole_rows(), left=False)
    with pytest.raises(AttributeError, match="get_seq_length"):
        RetrieveLogProb(wrapper(model("gpt2")), assistant_only=False)(data.to_lazystack(0))


class TestFrozen:
    def test_stays_while_the_policy_moves_and_shows_no_parameters(self):
        lm, data = model(), conversations(whole_rows(), left=True)
        transform = ReferenceModelLogProbTransform(wrapper(lm))
        before = transform(data.clone())[REF]
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter.mul_(1.5)
        assert torch.equal(transform(data.clone())[REF], before)
        assert not before.requires_grad
        assert not list(transform.parameters())
        assert list(transform.state_dict()) == ["reference_fingerprint"]

    def test_another_model_is_refused_on_load(self):
        saved = ReferenceModelLogProbTransform(wrapper(model(seed=0))).state_dict()
        ReferenceModelLogProbTransform(wrapper(model(seed=0))).load_state_dict(saved)
        with pytest.raises(RuntimeError, match="another reference"):
            ReferenceModelLogProbTransform(wrapper(model(seed=1))).load_state_dict(saved)

    def test_adapters_switched_off(self):
        lm, data = model(), conversations(whole_rows(), left=True)
        plain = WrapperReference(wrapper(copy.deepcopy(lm))).log_prob(data, data)
        lora = get_peft_model(lm, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        base = WrapperReference(adapters_off(language_actor(wrapper(lora).model)))
        torch.testing.assert_close(base.log_prob(data, data), plain)
        live = as_policy(wrapper(lora)).log_prob(data, data)
        assert (live - plain).abs().max() > 0.01

    def test_leaves_the_data_as_they_were(self):
        data = conversations(whole_rows(), left=True)
        before, keys = data.clone(), set(data.keys(True))
        WrapperReference(wrapper()).log_prob(data, data)
        assert set(data.keys(True)) == keys
        assert (data == before).all()

    def test_pickled(self):
        data = conversations(whole_rows(), left=True)
        reference = WrapperReference(wrapper())
        again = pickle.loads(pickle.dumps(reference))  # noqa: S301
        assert torch.equal(again.log_prob(data, data), reference.log_prob(data, data))


class TestChain:
    def test_reward_of_conversations(self):
        lm, moved = model(seed=0), model(seed=1)
        steps = conversations(whole_rows(), left=True)
        steps.update(wrapper(moved, pad_output=True)(steps.clone()).select(SCORES).detach())
        steps["next"] = TensorDict(reward=torch.ones(6, 1), batch_size=[6])
        out = KLConstrainedTransform(wrapper(lm), 0.5)(steps)
        kl = ((steps[SCORES] - one_by_one(lm, steps[FULL], steps[ATTENTION])) * steps[ASSISTANT]).sum(-1)
        torch.testing.assert_close(out["next", "reward"], 1 - 0.5 * kl[:, None], atol=1e-4, rtol=1e-4)
        assert out["next"].get(REF).shape == steps[FULL].shape

    def test_reward_a_token(self):
        steps = conversations(whole_rows(), left=True)
        steps.update(wrapper(pad_output=True)(steps.clone()).select(SCORES).detach())
        steps["next"] = TensorDict(reward=torch.ones(6, 14, 1), batch_size=[6])
        out = KLConstrainedTransform(wrapper(model(seed=3)))(steps)
        assert (out["next", "reward"].squeeze(-1)[~steps[ASSISTANT]] == 1).all()
        assert (out["next", "reward"].squeeze(-1)[steps[ASSISTANT]] != 1).all()

    def test_in_a_replay_buffer(self):
        lm, data = model(), conversations(whole_rows(), left=True)
        buffer = ReplayBuffer(storage=LazyTensorStorage(6), batch_size=6)
        buffer.append_transform(ReferenceModelLogProbTransform(wrapper(lm)))
        buffer.extend(data)
        sample = buffer.sample()
        expected = one_by_one(lm, sample[FULL], sample[ATTENTION]) * sample[ASSISTANT]
        torch.testing.assert_close(sample[REF], expected, atol=1e-5, rtol=1e-5)

    def test_the_shape_of_the_batch_is_free(self):
        data = conversations(whole_rows(), left=True)
        reference = WrapperReference(wrapper())
        flat = reference.log_prob(data, data)
        assert torch.equal(reference.log_prob(data.reshape(2, 3), data), flat.reshape(2, 3, -1))
        torch.testing.assert_close(reference.log_prob(data[2], data), flat[2])

    def test_padding_changes_nothing(self):
        data, other = conversations(whole_rows(), left=True), conversations(whole_rows(), left=True)
        other[FULL][~other[ATTENTION]] = 7
        reference = WrapperReference(wrapper(model("gpt2")))
        assert torch.equal(reference.log_prob(data, data), reference.log_prob(other, other))

    def test_conversations_without_an_action(self):
        data = conversations(whole_rows(), left=True)
        data[ASSISTANT].fill_(False)
        assert (WrapperReference(wrapper()).log_prob(data, data) == 0).all()


class TestErrors:
    def test_no_wrapper(self):
        with pytest.raises(TypeError, match=r"FunctionReference"):
            WrapperReference(model())

    def test_an_engine_that_is_no_module(self):
        engine = wrapper()
        engine.__dict__["model"] = "an address"
        engine._modules.pop("model", None)
        with pytest.raises(TypeError, match=r"FunctionReference"):
            WrapperReference(engine)

    def test_rows_taken_for_conversations(self):
        with pytest.raises(ValueError, match="conversations"):
            as_reference(wrapper()).log_prob(whole_rows(), whole_rows())

    @pytest.mark.parametrize("key", [FULL, ATTENTION, ASSISTANT])
    def test_a_missing_entry(self, key):
        data = conversations(whole_rows(), left=True).exclude(key)
        with pytest.raises(KeyError, match=key[-1]):
            as_reference(wrapper()).log_prob(data, data)

    def test_ragged(self):
        rows = [conversations(whole_rows(1, width), left=False) for width in (8, 9)]
        data = torch.cat([row.to_lazystack(0) for row in rows])
        with pytest.raises(ValueError, match="pad_output=True"):
            as_reference(wrapper()).log_prob(data, data)

    def test_keys_of_others(self):
        with pytest.raises(ValueError, match="to TransformersWrapper itself"):
            as_reference(wrapper(), in_keys=["observation"])

    def test_an_exact_divergence(self):
        with pytest.raises(TypeError, match="no distribution"):
            as_reference(wrapper()).distribution(whole_rows(), whole_rows())
