"""TorchRL's wrappers of language models as policies of language environments."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tokenizers import Tokenizer, models, pre_tokenizers
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import LLMWrapperBase, LogProbs, Tokens
from transformers import PreTrainedTokenizerFast

from tests.modules.toys import CONTROL, TOKENIZER, tiny_lm
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs import PromptEnv
from torchrl_lang.modules import UtteranceActor, ValueHead, WrapperActor, language_actor, row_log_prob, value_module
from torchrl_lang.objectives import BCLoss, ILQLLoss, PPOLoss

K, T = 6, 18
END, PAD = CONTROL.end_of_action, CONTROL.pad


def hugging_face_tokenizer(pad=PAD):
    """One with the ids of the toys' tokenizer."""
    words = {f"<{i}>": i for i in range(TOKENIZER.vocab_size)}
    symbols = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    symbols.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=symbols, pad_token=f"<{pad}>", eos_token=f"<{END}>")


def wrapper_of(lm, pad=PAD, **options):
    kwargs = {"max_new_tokens": K - 1, "eos_token_id": END, "do_sample": False} | options.pop("generate_kwargs", {})
    options = {"input_mode": "tokens", "pad_output": True, "return_log_probs": True} | options
    return TransformersWrapper(lm, tokenizer=hugging_face_tokenizer(pad), generate_kwargs=kwargs, **options)


def make_rows(n=40, seed=0):
    """Ragged beginnings of rows, which may contain the end of an earlier utterance."""
    g = torch.Generator().manual_seed(seed)
    attention = torch.arange(T - K) < torch.randint(1, T - K + 1, (n, 1), generator=g)
    tokens = torch.randint(TOKENIZER.vocab_size, (n, T - K), generator=g)
    tokens = tokens.masked_fill(tokens == PAD, END).masked_fill(~attention, PAD)
    return TensorDict(tokens=tokens, attention_mask=attention, batch_size=[n])


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("pad", [PAD, END])
def test_greedy_utterances_are_those_of_an_utterance_actor(kind, pad):
    """Also where the wrapper's tokenizer pads with the end of the action."""
    lm = tiny_lm(kind, seed=3)
    out = WrapperActor(wrapper_of(lm, pad), CONTROL, K)(make_rows())
    ours = UtteranceActor(language_actor(lm), CONTROL, K, method="greedy", forbidden=())(make_rows())
    length = (ours["action"] == END).int().argmax(-1)
    assert {0, 1, 2, K - 1} <= set(length.tolist())
    for key in ("action", "token_log_prob", "action_log_prob"):
        torch.testing.assert_close(out[key], ours[key], atol=1e-5, rtol=1e-5)
    assert (out["token_log_prob"][length > 0, 0] < 0).all()  # the wrapper itself writes 0 there


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_sampled_tokens_have_the_log_probabilities_of_the_model(kind):
    """Over whole rows by Hugging Face's own pass; in training mode, too, which stays on."""
    lm, rows = tiny_lm(kind).train(), make_rows(n=24).reshape(4, 6)
    policy = WrapperActor(wrapper_of(lm, generate_kwargs={"do_sample": True, "temperature": 2.0}), CONTROL, K)
    torch.manual_seed(0)
    out = policy(rows).reshape(-1)
    assert lm.training
    assert rows["action"].shape == rows["token_log_prob"].shape == (4, 6, K)
    for row in out:
        prompt, action = row["tokens"][row["attention_mask"]], row["action"]
        end = int((action == END).int().argmax())
        assert action[end] == END
        assert (action[end + 1 :] == PAD).all()
        with torch.no_grad():
            logits = lm.eval()(torch.cat([prompt, action])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = logits.gather(-1, action[:, None])[:, 0]
        expected[min(end + 1, K - 1) :] = 0  # a forced end and padding
        torch.testing.assert_close(row["token_log_prob"], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(row["action_log_prob"], expected.sum(), atol=1e-5, rtol=1e-5)


def test_a_rollout_trains():
    lm = tiny_lm()
    policy = WrapperActor(wrapper_of(lm, generate_kwargs={"do_sample": True}), CONTROL, K)
    env = PromptEnv(
        ["ab", "c"], lambda p, c: [1.0 for _ in c], TOKENIZER, row_length=T, action_length=K, batch_size=[8]
    )
    rows = rows_from_rollout(env.rollout(1, policy), unfinished="drop", carry=["token_log_prob"])
    actor = UtteranceActor(language_actor(lm), CONTROL, K, forbidden=(), vocab_size=TOKENIZER.vocab_size)
    torch.testing.assert_close(rows["token_log_prob"], row_log_prob(actor, rows), atol=1e-5, rtol=1e-5)
    assert sum(p.numel() for p in policy.state_dict().values()) == sum(p.numel() for p in lm.state_dict().values())
    assert torch.equal(copy.deepcopy(policy)(make_rows(3))["tokens"], make_rows(3)["tokens"])


def test_rows_that_are_done_get_an_empty_utterance():
    policy, rows = WrapperActor(wrapper_of(tiny_lm()), CONTROL, K), make_rows(4)
    whole = policy(rows.clone())["action"]
    done = torch.tensor([[True], [False], [True], [False]])
    found = policy(rows.clone().set("done", done))
    assert torch.equal(found["action"][[1, 3]], whole[[1, 3]])
    assert found["action"][[0, 2]].tolist() == [[END, *[PAD] * (K - 1)]] * 2
    assert (policy(rows.clone().set("done", ~done | done))["action_log_prob"] == 0).all()


class Engine(LLMWrapperBase):
    """Reads and writes as TorchRL's wrappers of vLLM and SGLang do; it answers with what it is given."""

    model, input_mode, input_key, generate, num_samples, inplace = (
        object(),
        "tokens",
        ("tokens", "prompt"),
        True,
        None,
        True,
    )
    pad_output, return_log_probs, tokens_key, log_probs_key, padding_value = False, True, "tokens", "log_probs", PAD

    def __init__(self, answers):
        torch.nn.Module.__init__(self)
        self.answers, self.prompts = answers, []

    def forward(self, td):
        self.prompts = [prompt.tolist() for prompt in td.get(self.input_key, as_list=True)]
        ids = [torch.tensor(answer) for answer in self.answers]
        tokens = lazy_stack([TensorDict(response=x) for x in ids])
        log_probs = lazy_stack([TensorDict(response=-x.double() - 1) for x in ids])
        return td.update({"tokens": Tokens.from_tensordict(tokens), "log_probs": LogProbs.from_tensordict(log_probs)})


def test_an_engine_gets_the_tokens_of_rows_and_its_log_probabilities_are_kept():
    """It may stop at the end, at the greatest length or before."""
    rows = make_rows(3)
    engine = Engine([[2, 3, END], [1, 2, 3, 4, 5], [4, 4]])
    out = WrapperActor(engine, CONTROL, K)(rows.clone())
    assert engine.prompts == [row["tokens"][row["attention_mask"]].tolist() for row in rows]
    assert out["action"].tolist() == [[2, 3, END, *[PAD] * 3], [1, 2, 3, 4, 5, END], [4, 4, *[PAD] * 4]]
    expected = [[-3.0, -4, -END - 1, 0, 0, 0], [-2.0, -3, -4, -5, -6, 0], [-5.0, -5, 0, 0, 0, 0]]
    assert out["token_log_prob"].tolist() == expected
    engine.padding_value = END
    with pytest.raises(ValueError, match=f"one whose padding token has the id {PAD}"):
        WrapperActor(engine, CONTROL, K)


WRONG = {
    "input_mode='tokens'": {"input_mode": "history"},
    "generate=True": {"generate": False},
    "return_log_probs=True": {"return_log_probs": False},
    "pad_output=True": {"pad_output": False},
    "num_samples=None": {"num_samples": 2, "generate_kwargs": {"do_sample": True}},
    "generate_kwargs={'max_new_tokens': 5}": {"generate_kwargs": {"max_new_tokens": K}},
    f"generate_kwargs={{'eos_token_id': {END}}}": {"generate_kwargs": {"eos_token_id": [END, 2]}},
}


@pytest.mark.parametrize("option", WRONG)
def test_the_error_names_the_option(option):
    wrapper = wrapper_of(tiny_lm(), **copy.deepcopy(WRONG[option]))
    with pytest.raises(ValueError, match="WrapperActor needs") as raised:
        WrapperActor(wrapper, CONTROL, K)
    assert str(raised.value).startswith(f"WrapperActor needs TransformersWrapper(..., {option}")


def test_other_places_name_the_actors_to_use():
    lm = tiny_lm()
    wrapper, head = wrapper_of(lm), value_module(ValueHead(16))
    env = PromptEnv(["ab"], lambda p, c: [0.0] * len(c), TOKENIZER, row_length=T, action_length=K, batch_size=[2])
    as_policy = wrapper_of(lm, input_key="tokens")
    for wrong in (
        lambda: PPOLoss(wrapper, head),
        lambda: ILQLLoss(wrapper, head, head),
        lambda: BCLoss(wrapper),
        lambda: UtteranceActor(wrapper, CONTROL, K),
        lambda: env.rollout(1, wrapper),
        lambda: env.step(as_policy(env.reset())),
    ):
        with pytest.raises(TypeError, match=r"language_actor\(wrapper.model\), act with modules.WrapperActor\(wrapper"):
            wrong()
    with pytest.raises(TypeError, match="takes a wrapper of TorchRL's LLM stack, got GPT2LMHeadModel"):
        WrapperActor(lm, CONTROL, K)
