"""Inference engines of online recipes: they play the games, and the trainer scores what they wrote."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from torchrl.weight_update import WeightStrategy
from transformers import GenerationConfig, PreTrainedTokenizerFast

from torchrl_lang.modules import UtteranceActor, WrapperActor
from torchrl_lang.modules.actor import LOGITS
from torchrl_lang.modules.decoding.next_token import NextTokenDistribution
from torchrl_lang.modules.head_values import STATE_VALUE, apply_head
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.modules.language_model import quiet_transformers
from torchrl_lang.modules.row_scoring import DecisionBatch, RowScorer
from torchrl_lang.recipes.algorithms.online import OnlineOptions
from torchrl_lang.schema import AGENT_MASK, ENGINE_LOG_PROB, TOKEN_LOG_PROB, TRAIN_MASK, ControlTokens


class Engine(NamedTuple):
    """A policy that acts by a copy of the trainer's weights."""

    policy: WrapperActor
    send_weights: Callable[[], None]
    """Copies the trainer's weights to it."""


def open_engine(options: OnlineOptions, lm: Any, policy: UtteranceActor) -> Engine | None:
    """The engine that the options ask for, with the distribution of a policy over the Hugging Face model ``lm``.

    Raises:
        ValueError: the policy reads features, or an option of the engine is unknown.
        ImportError: vLLM is missing.
    """
    if options.engine is None:
        return None
    if policy.decoder.reads_features:
        raise ValueError(f"--engine {options.engine} reads no features, and this model does: leave it out.")
    opened = {"transformers": _transformers, "vllm": _vllm}[options.engine]
    wrapper, send_weights = opened(lm, policy, options)
    return Engine(WrapperActor(wrapper, policy.decoder.control, policy.decoder.action_length), send_weights)


def _transformers(lm: Any, policy: UtteranceActor, options: OnlineOptions) -> tuple[Any, Callable[[], None]]:
    """A copy of the model in this process that writes by ``generate``."""
    from torchrl.modules.llm import TransformersWrapper

    given = dict(options.engine_option)
    dtype = getattr(torch, str(given.pop("dtype")), None) if "dtype" in given else lm.dtype
    if given or not isinstance(dtype, torch.dtype):
        raise ValueError(f"--engine-option {options.engine_option}: transformers takes dtype alone, such as bfloat16.")
    copied, rule, strategy = deepcopy(lm).to(dtype).requires_grad_(False), policy.decoder.rule, WeightStrategy()
    copied.config.pad_token_id = None  # rows that have ended are padded, of which it would warn
    copied.register_forward_hook(partial(_as_sampled, rule))
    control, limit = policy.decoder.control, policy.decoder.action_length - 1
    # In place of the model's own filters and penalties; the wrapper has no word for "no top_k", whose default is 50.
    copied.generation_config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=control.pad)
    wrapper = TransformersWrapper(
        copied,
        tokenizer=_token_ids(control),
        input_mode="tokens",
        pad_output=True,
        return_log_probs=True,
        generate_kwargs={"max_new_tokens": limit, "eos_token_id": control.end_of_action},
    )
    return wrapper, lambda: strategy.apply_weights(copied, strategy.extract_weights(lm))


def _as_sampled(rule: NextTokenDistribution, model: nn.Module, args: Any, output: Any) -> Any:
    """A hook: the policy's own log-probabilities in place of the logits, so that ``generate`` samples from them."""
    output.logits = rule({LOGITS: output.logits.flatten(0, -2)}).reshape(output.logits.shape)
    return output


def _vllm(lm: Any, policy: UtteranceActor, options: OnlineOptions) -> tuple[Any, Callable[[], None]]:
    """An LLM of vLLM in this process, beside the trainer on its GPU, with the temperature and tokens of the policy."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are copied within this process
    from torchrl.modules.llm import vLLMWrapper
    from vllm import LLM, SamplingParams

    control, rule, size = policy.decoder.control, policy.decoder.rule, lm.config.vocab_size
    settings: Mapping[str, Any] = {
        "gpu_memory_utilization": 0.4,
        "seed": options.seed,
        **options.engine_option,
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",  # those of the distribution that is sampled from
    }
    with tempfile.TemporaryDirectory() as folder:
        with quiet_transformers():
            lm.save_pretrained(folder)
        engine = LLM(folder, **settings)
    engine.generate, dtype = partial(engine.generate, use_tqdm=False), engine.llm_engine.model_config.dtype
    unwritable = {*rule.forbidden.tolist(), *range(rule.vocab_size or size, size)}
    wrapper = vLLMWrapper(engine, tokenizer=_token_ids(control), input_mode="tokens", return_log_probs=True)
    # Set here, because the wrapper ignores some generate_kwargs, such as the ids to stop at.
    wrapper.sampling_params = SamplingParams(
        max_tokens=policy.decoder.action_length - 1,
        temperature=rule.temperature,
        logit_bias=dict.fromkeys(unwritable, -100.0),  # the least that vLLM takes
        stop_token_ids=[control.end_of_action],
        ignore_eos=True,
        detokenize=False,
        logprobs=0,  # of the sampled token alone
    )

    def send_weights() -> None:
        every = lm.named_parameters(remove_duplicate=False)  # an output layer too that shares the weights of the input
        weights = ((name, weight.detach().to(dtype)) for name, weight in every)
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        engine.reset_prefix_cache()

    return wrapper, send_weights


def _token_ids(control: ControlTokens) -> PreTrainedTokenizerFast:
    """Make the tokenizer that wrappers ask for the ids of the padding and of the end of a text."""
    words = Tokenizer(models.WordLevel({"<pad>": control.pad, "<end>": control.end_of_action}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


@torch.no_grad()
def score_as_trainer(policy: UtteranceActor, rows: TensorDictBase) -> TensorDictBase:
    """Rows of an engine with the log-probabilities and values of the trainer's policy, from one pass.

    Args:
        policy: the trainer's; its ``value`` head, if it has one, writes ``state_value``.
        rows: ``[N]``, with ``token_log_prob`` of the engine, and ``train_mask`` if another player wrote some turns.

    Returns:
        A copy with ``token_log_prob`` and ``state_value`` float ``[N, T]`` as the policy would have written them while
        acting, and ``engine_log_prob``, what ``token_log_prob`` was.
    """
    rows = rows.copy().set(ENGINE_LOG_PROB, rows.get(TOKEN_LOG_PROB))
    agent = rows.get(AGENT_MASK)
    own = agent & rows.get(TRAIN_MASK, agent)
    scorer, batch = RowScorer(policy), DecisionBatch.read(rows.copy().set(AGENT_MASK, own))
    head, value = policy.decoder.value, batch.zeros()
    if batch.empty:
        return rows
    with eval_mode(policy):
        states = scorer.states(batch)
        rows.set(TOKEN_LOG_PROB, batch.at_tokens(scorer.log_prob(batch, states)))
        if head is not None:
            at_decisions = {key: state.flatten(0, 1)[batch.place] for key, state in states.items()}
            found = apply_head(head, at_decisions, STATE_VALUE).squeeze(-1).float()
            value = batch.at_tokens(found.masked_fill(scorer.certain(batch), torch.nan))
            rows.set(STATE_VALUE, value.masked_fill(agent & ~own, torch.nan))
    return rows


def engine_figures(rows: TensorDictBase) -> dict[str, Tensor]:
    """How far the engine's log-probabilities are from the trainer's in rows of :func:`score_as_trainer`.

    ``engine_gap`` and ``engine_gap_max`` are the mean and the greatest absolute difference of a token, in nats, and
    ``engine_ratio`` is the mean of the trainer's probability over the engine's: its expectation is 1 if the engine
    samples from what it reports, and its distribution covers the trainer's.
    """
    agent = rows.get(AGENT_MASK)
    written = agent & rows.get(TRAIN_MASK, agent)
    log_ratio = (rows.get(TOKEN_LOG_PROB) - rows.get(ENGINE_LOG_PROB))[written]
    gap = log_ratio.abs()
    greatest = gap.max() if len(gap) else gap.sum()
    return {"engine_gap": gap.mean(), "engine_gap_max": greatest, "engine_ratio": log_ratio.exp().mean()}
