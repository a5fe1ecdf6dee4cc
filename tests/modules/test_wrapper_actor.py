"""TorchRL's wrappers of language models as policies of language environments."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tokenizers import Tokenizer, models
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import LLMWrapperBase
from transformers import PreTrainedTokenizerFast

from tests.modules.toys import CONTROL, TOKENIZER, tiny_lm
from torchrl_lang.envs import PromptEnv
from torchrl_lang.modules import UtteranceActor, WrapperActor, language_actor
from torchrl_lang.objectives import ILQLLoss, PPOLoss

K, T, END, PAD, KEYS = 6, 18, CONTROL.end_of_action, CONTROL.pad, ("action", "token_log_prob", "action_log_prob")


def wrapper_of(lm, pad=PAD, generate_kwargs=None, **options):
    kwargs = {"max_new_tokens": K - 1, "eos_token_id": END, "do_sample": False} | (generate_kwargs or {})
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(TOKENIZER.vocab_size)}, unk_token="<0>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=f"<{pad}>", eos_token=f"<{END}>")
    options = {"input_mode": "tokens", "pad_output": True, "return_log_probs": True} | options
    return TransformersWrapper(lm, tokenizer=tokenizer, generate_kwargs=kwargs, **options)


def make_rows(n=40):
    """Ragged beginnings of rows, with ends of earlier utterances."""
    g = torch.Generator().manual_seed(0)
    attention = torch.arange(T - K) < torch.randint(1, T - K + 1, (n, 1), generator=g)
    tokens = torch.randint(TOKENIZER.vocab_size, (n, T - K), generator=g)
    tokens = tokens.masked_fill(tokens == PAD, END).masked_fill(~attention, PAD)
    return TensorDict(tokens=tokens, attention_mask=attention, batch_size=[n])


@pytest.mark.parametrize("pad", [PAD, END])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_greedy_utterances_are_those_of_an_utterance_actor(kind, pad):
    lm = tiny_lm(kind, seed=3)
    policy = WrapperActor(wrapper_of(lm, pad), CONTROL, K)
    out = policy(make_rows().reshape(4, 10)).reshape(-1)
    ours = UtteranceActor(language_actor(lm), CONTROL, K, method="greedy", forbidden=())(make_rows())
    assert {0, 1, 2, K - 1} <= set((out["action"] == END).int().argmax(-1).tolist())
    for key in KEYS:
        torch.testing.assert_close(out[key], ours[key], atol=1e-5, rtol=1e-5)
    done = torch.arange(40)[:, None] < 20
    found, empty = policy(make_rows().set("done", done)), policy(make_rows().set("done", done | True))
    assert empty["action"].tolist() == [[END, *[PAD] * (K - 1)]] * 40
    for key in KEYS:
        torch.testing.assert_close(found[key], torch.cat([empty[key][:20], out[key][20:]]))
    assert policy.state_dict().keys() == {f"wrapper.model.{name}" for name in lm.state_dict()}


def test_samples_have_the_log_probabilities_of_the_model():
    """By Hugging Face's own pass; a wrapper writes 0 for the first token and leaves training mode on."""
    lm = tiny_lm().train()
    wrapper = wrapper_of(lm, generate_kwargs={"do_sample": True, "temperature": 2.0})
    env = PromptEnv(["ab", "c"], lambda _, c: [1.0] * len(c), TOKENIZER, row_length=T, action_length=K, batch_size=[8])
    for row in env.rollout(1, WrapperActor(wrapper, CONTROL, K))[:, 0]:
        prompt, action = row["tokens"][row["attention_mask"]], row["action"]
        logits = lm(torch.cat([prompt, action])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = logits.gather(-1, action[:, None])[:, 0]
        expected[min(int((action == END).int().argmax()) + 1, K - 1) :] = 0  # a forced end and padding
        torch.testing.assert_close(row["token_log_prob"], expected.detach(), atol=1e-5, rtol=1e-5)
    assert lm.training


class Engine(LLMWrapperBase):
    """Reads and writes as TorchRL's wrappers of engines do."""

    model, input_mode, input_key, generate, num_samples = None, "tokens", ("tokens", "prompt"), True, None
    pad_output, return_log_probs, tokens_key, log_probs_key, padding_value = False, True, "tokens", "log_probs", PAD
    answers = ([2, 3, END], [1, 2, 3, 4, 5], [4, 4])
    __init__ = torch.nn.Module.__init__

    def forward(self, td):
        self.prompts = [prompt.tolist() for prompt in td.get(self.input_key, as_list=True)]
        ids = [torch.tensor(answer) for answer in self.answers]
        return lazy_stack([TensorDict(tokens={"response": x}, log_probs={"response": -1.0 - x}) for x in ids])


def test_an_engine_reads_rows_and_its_log_probabilities_are_kept():
    """It may stop at the end, at the greatest length or before."""
    engine, rows = Engine(), make_rows(3)
    out = WrapperActor(engine, CONTROL, K)(rows)
    assert engine.prompts == [row["tokens"][row["attention_mask"]].tolist() for row in rows]
    assert out["action"].tolist() == [[2, 3, END, *[PAD] * 3], [1, 2, 3, 4, 5, END], [4, 4, *[PAD] * 4]]
    assert out["token_log_prob"].tolist() == [
        [-3, -4, -1 - END, 0, 0, 0],
        [-2, -3, -4, -5, -6, 0],
        [-5, -5, 0, 0, 0, 0],
    ]
    engine.padding_value = END
    with pytest.raises(ValueError, match=f"one whose padding token has the id {PAD}"):
        WrapperActor(engine, CONTROL, K)


def test_errors_name_what_to_use():
    lm, wrong = tiny_lm(), {"max_new_tokens": K, "eos_token_id": [END, 2]}
    for options, advice in (
        ({"input_mode": "history", "pad_output": False}, "input_mode='tokens', pad_output=True"),
        ({"generate": False}, "generate=True"),
        ({"return_log_probs": False}, "return_log_probs=True"),
        ({"num_samples": 2, "generate_kwargs": wrong}, "num_samples=None, generate_kwargs={'max_new_tokens': 5, 'eos_"),
    ):
        with pytest.raises(ValueError, match=r"needs TransformersWrapper\(\.\.\.,") as raised:
            WrapperActor(wrapper_of(lm, **copy.deepcopy(options)), CONTROL, K)
        assert advice in str(raised.value)
    env = PromptEnv(["ab"], lambda _, c: [0.0] * len(c), TOKENIZER, row_length=T, action_length=K, batch_size=[2])
    for use in (lambda w: PPOLoss(w, None), lambda w: ILQLLoss(w, None, None), lambda w: env.rollout(1, w)):
        with pytest.raises(TypeError, match=r"language_actor\(wrapper.model\), act with modules.WrapperActor\(wrapper"):
            use(wrapper_of(lm))
    with pytest.raises(TypeError, match="takes a wrapper of TorchRL's LLM stack, got GPT2LMHeadModel"):
        WrapperActor(lm, CONTROL, K)
