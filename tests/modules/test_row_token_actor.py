"""The actor of the tokens of rows, for the losses of TorchRL, and its wrappers as policies of environments."""

from __future__ import annotations

import itertools

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tokenizers import Tokenizer, models
from torchrl.collectors import Collector
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import LLMWrapperBase
from torchrl.objectives.llm import DAPO, CISPOLoss, DistillationLoss, GRPOLoss, SFTLoss
from transformers import PreTrainedTokenizerFast

from tests.modules.toys import CONTROL, TOKENIZER, games, tiny_lm
from torchrl_lang.envs import PromptEnv
from torchrl_lang.modules import (
    RowTokenActor,
    UtteranceActor,
    ValueHead,
    WrapperActor,
    language_actor,
    row_log_prob,
    value_module,
)
from torchrl_lang.objectives import ILQLLoss, PPOLoss

T = 12


@pytest.fixture(params=["plain", "utterances"])
def actor(request):
    plain = language_actor(tiny_lm())
    return plain if request.param == "plain" else UtteranceActor(plain, CONTROL, 3, temperature=0.8, seed=0)


def loss_of(actor, kind=GRPOLoss, **options):
    loss = kind(RowTokenActor(actor), **{"entropy_bonus": False, **options})
    loss.set_keys(action="tokens", sample_log_prob="token_log_prob", ref_log_probs="ref_log_prob")
    return loss


def test_the_distribution_is_the_one_that_acted(actor):
    rows = games()
    dist = RowTokenActor(actor).get_dist(rows)
    found = dist.log_prob(rows["tokens"])
    torch.testing.assert_close(found, row_log_prob(actor, rows))
    assert dist.batch_shape == found.shape == rows["tokens"].shape
    assert torch.equal(dist.mask, rows["agent_mask"])
    assert (found[~rows["agent_mask"]] == 0).all()
    written = RowTokenActor(actor)(rows.clone())["token_log_prob"]
    assert torch.equal(written, found)


def test_the_entropy_by_hand():
    rows, lm = games(), tiny_lm()
    found = RowTokenActor(language_actor(lm)).get_dist(rows).entropy()
    with torch.no_grad():
        logits = lm(input_ids=rows["tokens"], attention_mask=rows["attention_mask"].long()).logits
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    expected = torch.nn.functional.pad(entropy[:, :-1], (1, 0)) * rows["agent_mask"]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [GRPOLoss, DAPO, CISPOLoss])
def test_the_loss_by_hand(kind, actor):
    rows, low, high = games(), 0.2, 0.28
    loss = loss_of(actor, kind, clip_epsilon=(low, high))
    ratio = (row_log_prob(actor, rows) - rows["token_log_prob"]).exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    gain = torch.minimum(ratio * rows["advantage"][..., 0], clipped * rows["advantage"][..., 0])
    if kind is CISPOLoss:
        gain = clipped * rows["advantage"][..., 0]
    expected = -gain[rows["agent_mask"]].mean()
    torch.testing.assert_close(loss(rows).loss_objective, expected)


def gradients(loss, value):
    loss.zero_grad(set_to_none=True)
    value.backward()
    return {name: p.grad.clone() for name, p in loss.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("kind", "clip"), [(GRPOLoss, (0.2, 0.2)), (DAPO, (0.2, 0.28)), (CISPOLoss, (0.999, 50.0))])
def test_gradients_are_those_of_our_own_loss(actor, kind, clip):
    """CISPO's where no ratio is clipped: elsewhere it clips the ratio of tokens that PPO leaves alone."""
    rows = games()
    theirs = loss_of(actor, kind, entropy_bonus=True, entropy_coeff=0.1, clip_epsilon=clip)
    found = theirs(rows)
    options = {"value_weight": 0.0, "entropy_weight": 0.1, "normalize_advantage": False, "clip_epsilon": clip}
    ours = PPOLoss(actor, value_module(ValueHead(16)), **options)
    expected = ours(rows.clone().set("advantage", rows["advantage"].squeeze(-1).expand(-1, T)))
    torch.testing.assert_close(found.loss_objective, expected["loss_objective"])
    torch.testing.assert_close(found.loss_entropy, expected["loss_entropy"])
    one = gradients(theirs, found.loss_objective + found.loss_entropy)
    other = gradients(ours, expected["loss_objective"] + expected["loss_entropy"])
    mine = {name.split(".", 2)[2] if name.startswith("actor_network.actor.") else name: g for name, g in one.items()}
    other = {name.split(".", 1)[1]: g for name, g in other.items()}
    assert mine
    assert mine.keys() == other.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, other[name], atol=1e-6, rtol=1e-4)


def test_tokens_that_are_not_learned_are_left_out(actor):
    rows = games()
    rows["train_mask"] = rows["agent_mask"] & (torch.arange(T) > 4)
    loss = GRPOLoss(RowTokenActor(actor, mask_key="train_mask"), entropy_bonus=False)
    loss.set_keys(action="tokens", sample_log_prob="token_log_prob")
    found = loss(rows).loss_objective
    rows["token_log_prob"] = torch.where(rows["train_mask"], rows["token_log_prob"], -9.0)
    torch.testing.assert_close(loss(rows).loss_objective, found)
    assert not torch.isclose(found, loss_of(actor)(games()).loss_objective)


K, END, PAD = 6, CONTROL.end_of_action, CONTROL.pad


def wrapper_of(lm, pad=PAD, generate_kwargs=None, **options):
    kwargs = {"max_new_tokens": K - 1, "eos_token_id": END, "do_sample": False} | (generate_kwargs or {})
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(TOKENIZER.vocab_size)}, unk_token="<0>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=f"<{pad}>", eos_token=f"<{END}>")
    options = {"input_mode": "tokens", "pad_output": True, "return_log_probs": True} | options
    return TransformersWrapper(lm, tokenizer=tokenizer, generate_kwargs=kwargs, **options)


@pytest.mark.parametrize("pad", [PAD, END])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_greedy_utterances_of_a_wrapper_are_those_of_an_utterance_actor(kind, pad):
    lm, rows = tiny_lm(kind, seed=3), games(40)
    wrapper, done = wrapper_of(lm, pad, {"pad_token_id": pad}), torch.arange(40)[:, None] < 10
    policy = WrapperActor(wrapper, CONTROL, K)
    out = policy(rows.clone().set("done", done).reshape(4, 10)).reshape(-1)
    ours = UtteranceActor(language_actor(lm), CONTROL, K, method="greedy", forbidden=())(rows.set("done", done))
    assert {0, 1, K - 1} <= set((out["action"] == END).int().argmax(-1)[10:].tolist())
    for key in ("action", "token_log_prob", "action_log_prob"):
        torch.testing.assert_close(out[key], ours[key], atol=1e-5, rtol=1e-5)
    assert policy.state_dict().keys() == {f"wrapper.model.{name}" for name in lm.state_dict()}
    assert policy(rows[:0].select("tokens", "attention_mask"))["action"].shape == (0, K)


def test_a_wrapper_plays_and_has_the_log_probabilities_of_the_model():
    """By Hugging Face's own pass, without dropout; a wrapper itself writes 0 for the first token."""
    lm = tiny_lm(resid_pdrop=0.5).train()
    policy = WrapperActor(wrapper_of(lm, generate_kwargs={"do_sample": True, "temperature": 2.0}), CONTROL, K)
    env = PromptEnv(["ab", "c"], lambda _, c: [1.0] * len(c), TOKENIZER, row_length=18, action_length=K, batch_size=[8])
    steps = env.rollout(1, policy)[:, 0]
    assert lm.training
    lm.eval()
    for row in steps:
        prompt, action = row["tokens"][row["attention_mask"]], row["action"]
        logits = lm(torch.cat([prompt, action])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = logits.gather(-1, action[:, None])[:, 0]
        expected[min(int((action == END).int().argmax()) + 1, K - 1) :] = 0  # a forced end and padding
        torch.testing.assert_close(row["token_log_prob"], expected.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"do_sample": True}, {"prompt_lookup_num_tokens": 3}])
def test_log_probabilities_are_read_off_the_passes_that_sample(options):
    """But for guesses of several tokens a pass, of which some are kept: these take a further pass of the trunk."""
    lm, passes, guesses = tiny_lm(seed=3), [], "prompt_lookup_num_tokens" in options
    rows = games(6)[3:4] if guesses else games(40)
    policy = WrapperActor(wrapper_of(lm, generate_kwargs=options), CONTROL, K)
    lm.transformer.register_forward_hook(lambda *args: passes.append(1))
    with torch.random.fork_rng():
        out = policy(rows.clone())
    assert guesses or len(passes) == K - 1
    dist = UtteranceActor(language_actor(lm), CONTROL, K, forbidden=()).get_dist(rows)
    torch.testing.assert_close(out["token_log_prob"], dist.token_log_prob(out["action"]), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_sampled_utterances_of_a_wrapper_have_the_distribution_of_an_utterance_actor():
    """Chi-square of 4,000 utterances of each against the probabilities of all utterances of up to two tokens."""
    lm, n, ids = tiny_lm(seed=3), 4000, {*range(TOKENIZER.vocab_size)} - {END, PAD}
    every = torch.tensor([[END, PAD, PAD], *([a, END, PAD] for a in ids), *([a, b, END] for a in ids for b in ids)])
    row = TensorDict(tokens=torch.tensor([[0, 3, 1]]), attention_mask=torch.ones(1, 3).bool(), batch_size=[1]).expand(n)
    ours = UtteranceActor(language_actor(lm), CONTROL, 3, forbidden=(PAD,), seed=0)
    expected = n * ours.get_dist(row[: len(every)]).log_prob(every).exp().detach()
    torch.testing.assert_close(expected.sum(), torch.tensor(float(n)), atol=0.1, rtol=0)
    kwargs = {"max_new_tokens": 2, "do_sample": True, "bad_words_ids": [[PAD]]}
    wrapper = wrapper_of(lm, generate_kwargs=kwargs)
    torch.manual_seed(0)
    for policy in (WrapperActor(wrapper, CONTROL, 3), ours):
        drawn = policy(row.clone())["action"]
        found = (drawn[:, None] == every).all(-1).sum(0)
        assert found.sum() == n
        rare = expected < 5
        counts = [torch.cat([x[~rare], x[rare].sum(0, keepdim=True)]) for x in (found.float(), expected)]
        statistic, freedom = float((counts[0] - counts[1]).square().div(counts[1]).sum()), len(counts[0]) - 1
        assert freedom > 8
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)


class Engine(LLMWrapperBase):
    """Reads and writes as TorchRL's wrappers of engines do; it stops behind the end, too late or before."""

    model, input_mode, input_key, generate, num_samples = None, "tokens", ("tokens", "prompt"), True, None
    pad_output, return_log_probs, tokens_key, log_probs_key, padding_value = False, True, "tokens", "log_probs", PAD
    __init__ = torch.nn.Module.__init__

    def forward(self, td):
        self.prompts = [prompt.tolist() for prompt in td.get(self.input_key, as_list=True)]
        ids = [torch.tensor(answer) for answer in ([2, 3, END, 4, END], [1, 2, 3, 4, 5, 0], [4, 4])]
        return lazy_stack([TensorDict(tokens={"response": x}, log_probs={"response": -1.0 - x}) for x in ids])


def test_an_engine_reads_rows_and_its_log_probabilities_are_kept():
    engine, rows = Engine(), games(3)
    out = WrapperActor(engine, CONTROL, K)(rows)
    assert engine.prompts == [row["tokens"][row["attention_mask"]].tolist() for row in rows]
    assert out["action"].tolist() == [[2, 3, END, *[PAD] * 3], [1, 2, 3, 4, 5, END], [4, 4, *[PAD] * 4]]
    expected = [[-3, -4, -1 - END, 0, 0, 0], [-2, -3, -4, -5, -6, 0], [-5, -5, 0, 0, 0, 0]]
    assert out["token_log_prob"].tolist() == expected
    engine.padding_value = END
    with pytest.raises(ValueError, match=f"one whose padding token has the id {PAD}"):
        WrapperActor(engine, CONTROL, K)


def test_errors_of_wrappers_name_what_to_use():
    lm, limits = tiny_lm(), {"max_new_tokens": K, "eos_token_id": [END, 2]}
    for options, advice in (
        ({"input_mode": "history", "pad_output": False}, "input_mode='tokens', pad_output=True"),
        ({"generate": False}, "generate=True"),
        ({"return_log_probs": False, "num_samples": 2}, "return_log_probs=True, num_samples=None"),
        ({"generate_kwargs": limits}, f"generate_kwargs={{'max_new_tokens': 5, 'eos_token_id': {END}}}"),
    ):
        with pytest.raises(ValueError, match="needs TransformersWrapper") as raised:
            WrapperActor(wrapper_of(lm, **options), CONTROL, K)
        assert advice in str(raised.value)
    env = PromptEnv(["ab"], lambda _, c: [0.0] * len(c), TOKENIZER, row_length=18, action_length=K, batch_size=[2])
    losses = (lambda w: PPOLoss(w, None), lambda w: ILQLLoss(w, None, None))
    collect = lambda w: Collector(env, w, frames_per_batch=2, total_frames=2)  # noqa: E731
    for use in (*losses, language_actor, lambda w: env.rollout(1, w), collect):
        with pytest.raises(TypeError, match=r"language_actor\(wrapper.model\), act with modules.WrapperActor\(wrapper"):
            use(wrapper_of(lm))
    actor = language_actor(lm)
    readers = (actor, UtteranceActor(actor, CONTROL, K), RowTokenActor(actor), WrapperActor(wrapper_of(lm), CONTROL, K))
    for loss, reader in itertools.product((SFTLoss, DistillationLoss), readers):
        of_rows = rf"reads chats, and {type(reader).__name__} reads rows: .*chat_from_rows\(rows\), or use BC"
        with pytest.raises(TypeError, match=of_rows):
            loss(reader)
    with pytest.raises(TypeError, match="takes a wrapper of TorchRL's LLM stack, got GPT2LMHeadModel"):
        WrapperActor(lm, CONTROL, K)
    with pytest.raises(TypeError, match=r"control is a CharTokenizer: pass tokenizer\.control"):
        WrapperActor(wrapper_of(lm), TOKENIZER, K)
