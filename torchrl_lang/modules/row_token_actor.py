"""Actors beside TorchRL's LLM stack: one of rows for its losses, and its wrappers as policies of environments."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Annotated, Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase, dispatch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from torchrl_lang import schema
from torchrl_lang._checks import checked, have_shapes, is_wrapper, no_tokenizer
from torchrl_lang.functional import shift_left
from torchrl_lang.functional.precision import upcast_half
from torchrl_lang.modules.actor import language_actor, split_actor, vocabulary_size
from torchrl_lang.modules.decoding.sampling import Utterances
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.modules.row_scoring import DecisionBatch, RowScorer
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, TOKEN_LOG_PROB, TOKENS, ControlTokens, entry


class RowTokenDistribution(Distribution):
    """The distribution of the agent's tokens in rows ``[*B, T]``, each conditioned on the tokens before it.

    Args:
        scorer: computes the log-probabilities.
        rows: ``tokens``, ``attention_mask`` and ``agent_mask``.
        mask: bool ``[*B, T]``, True on tokens that count.
    """

    arg_constraints: dict[str, Any] = {}
    support = constraints.nonnegative_integer
    has_rsample = False

    def __init__(self, scorer: RowScorer, rows: TensorDictBase, mask: Tensor) -> None:
        self._scorer, self._batch = scorer, DecisionBatch.read(rows)
        super().__init__(self._batch.shape, torch.Size(), validate_args=False)
        self.mask = mask
        """bool ``[*B, T]``: True on tokens that count."""
        self._states = {} if self._batch.empty else scorer.states(self._batch)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of each token, ``[*B, T]``, at least float32; zero on tokens that the agent did not write.

        Args:
            value: int64 ``[*B, T]``: the rows' own tokens.
        """
        have_shapes((TOKENS, value, tuple(self._batch.shape)))
        batch = self._batch
        if batch.empty:
            return batch.zeros()
        written = value.reshape(-1, value.shape[-1])[:, : batch.tokens.shape[-1]].long()
        batch = replace(batch, action=shift_left(written).flatten()[batch.place])
        return batch.at_tokens(self._scorer.log_prob(batch, self._states))

    def entropy(self) -> Tensor:
        """Entropy in nats of each token's distribution, ``[*B, T]``."""
        batch = self._batch
        return batch.zeros() if batch.empty else batch.at_tokens(self._scorer.entropy(batch, self._states))


class RowTokenActor(TensorDictModuleBase):
    """An actor whose action is all of the agent's tokens in a row, for TorchRL's GRPOLoss, DAPO and CISPOLoss.

    ``get_dist`` is the distribution that acting sampled from, computed in one forward pass, with gradients. Set the
    loss's keys as follows; one advantage per row is enough::

        loss = GRPOLoss(RowTokenActor(policy), entropy_bonus=False)
        loss.set_keys(action="tokens", sample_log_prob="token_log_prob")
        rows["advantage"] = group_advantages(row_returns(rows), group)[:, None, None]

    Train a model with dropout in evaluation mode, because it acts in it. The metrics ``clip_fraction``, ``kl_approx``
    and the divergences of these losses are means over all positions, including padding. For large vocabularies
    :class:`~torchrl_lang.objectives.PPOLoss` needs less memory; it takes the same advantages as ``[N, T]``.

    Args:
        actor: an :class:`~torchrl_lang.modules.UtteranceActor`, or a language actor whose tokens were sampled at
            temperature 1 over the whole vocabulary.
        mask_key: bool ``[*B, T]``, True on tokens that count in the loss, e.g. ``"train_mask"`` of
            :class:`~torchrl_lang.modules.MixedPolicy`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import RowTokenActor, causal_lm, language_actor
        >>> actor = RowTokenActor(language_actor(causal_lm(vocab_size=12, layers=1, width=16, heads=2, max_length=8)))
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[4, 1, 2, 9, 0]]),
        ...     attention_mask=torch.tensor([[True, True, True, True, False]]),
        ...     agent_mask=torch.tensor([[False, True, True, False, False]]),
        ...     batch_size=[1],
        ... )
        >>> dist = actor.get_dist(rows)
        >>> dist.log_prob(rows["tokens"]) < 0, dist.mask
        (tensor([[False,  True,  True, False, False]]), tensor([[False,  True,  True, False, False]]))
    """

    tokenizer = no_tokenizer

    def __init__(
        self, actor: UtteranceActor | ProbabilisticTensorDictSequential, *, mask_key: str = AGENT_MASK
    ) -> None:
        super().__init__()
        RowScorer(actor)  # raises now rather than at the first row
        self.actor, self.mask_key = actor, mask_key
        self.in_keys = list(dict.fromkeys([*actor.in_keys, AGENT_MASK, mask_key]))
        self.out_keys = [TOKEN_LOG_PROB]

    def get_dist(self, tensordict: TensorDictBase, **_: Any) -> RowTokenDistribution:
        """The distribution over the tokens of rows ``[*B]``.

        Raises:
            KeyError: an entry is missing.
            ValueError: ``tensordict`` holds steps of a rollout instead of rows.
        """
        return RowTokenDistribution(RowScorer(self.actor), tensordict, entry(tensordict, self.mask_key))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``token_log_prob`` ``[*B, T]`` of the rows."""
        return tensordict.set(TOKEN_LOG_PROB, self.get_dist(tensordict).log_prob(entry(tensordict, TOKENS)))


class WrapperActor(TensorDictModuleBase):
    """One of TorchRL's wrappers of language models as the policy of a language environment.

    Reads ``tokens`` and ``attention_mask`` ``[*B, T]`` and writes ``action`` int64 ``[*B, K]``, ``token_log_prob``
    float32 ``[*B, K]`` and ``action_log_prob`` float32 ``[*B]``, as an :class:`~torchrl_lang.modules.UtteranceActor`
    does. The wrapper gets the tokens of each row and returns tokens: no ids are made from text. Every
    utterance ends: an end-of-action token with probability one follows ``K - 1`` tokens without one. Rows that are
    done, if the tensordict has ``done``, get an empty utterance. No gradients and evaluation mode.

    Log-probabilities are those of the language model at temperature 1 over its whole vocabulary, whatever the
    temperature and the filters of ``generate_kwargs``: sample without them where a loss compares these with its own.
    Those of a ``TransformersWrapper`` are read off the passes in which ``generate`` samples (it writes 0 for the first
    token of each response), or computed by a further pass where these are not one for each token, as with
    ``prompt_lookup_num_tokens``; an engine's are read as it wrote them.

    The wrapper decides about sampling by ``do_sample``, not by ``set_exploration_type``, and draws from torch's global
    generator. It may write control tokens; ``generate_kwargs={"bad_words_ids": [[i] for i in
    control.forbidden_in_action()]}`` forbids them.

    Args:
        wrapper: a ``TransformersWrapper(..., input_mode="tokens", pad_output=True, return_log_probs=True)`` with
            ``generate_kwargs={"max_new_tokens": K - 1, "eos_token_id": control.end_of_action}``; or a ``vLLMWrapper``
            or ``SGLangWrapper`` with ``pad_output=False``, whose engine stops at this token and after ``K - 1`` tokens
            (set the ``sampling_params`` of a ``vLLMWrapper``: it drops ``stop_token_ids`` among ``generate_kwargs``).
            An engine that stops earlier leaves an utterance without an end, which the environment writes.
        control: ids of the control tokens, ``tokenizer.control``.
        action_length: ``K``, the environment's ``action_length``, at least 2.

    Raises:
        TypeError: ``wrapper`` is not one of TorchRL's wrappers, or ``control`` is not the control tokens.
        ValueError: an option of the wrapper has another value; or see
            :func:`~torchrl_lang.modules.language_actor`.
        KeyError: on calls, ``tokens`` or ``attention_mask`` is missing.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tokenizers import Tokenizer, models
        >>> from torchrl.modules.llm import TransformersWrapper
        >>> from torchrl_lang.modules import WrapperActor, causal_lm
        >>> from torchrl_lang.schema import ControlTokens
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1, "a": 2}, unk_token="<pad>"))
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
        >>> lm = causal_lm(vocab_size=3, layers=1, width=8, heads=2, max_length=8)
        >>> wrapper = TransformersWrapper(lm, tokenizer=tokenizer, input_mode="tokens", pad_output=True,
        ...     return_log_probs=True, generate_kwargs={"max_new_tokens": 3, "eos_token_id": 1, "do_sample": True})
        >>> policy = WrapperActor(wrapper, ControlTokens(pad=0, end_of_action=1), 4)
        >>> rows = TensorDict(tokens=torch.tensor([[2, 2], [2, 0]]), batch_size=[2])
        >>> rows["attention_mask"] = rows["tokens"] != 0
        >>> policy(rows)["action"].shape, rows["action_log_prob"].shape
        (torch.Size([2, 4]), torch.Size([2]))
    """

    tokenizer = no_tokenizer

    @checked
    def __init__(self, wrapper: Any, control: ControlTokens, action_length: Annotated[int, 2]) -> None:
        super().__init__()
        if not is_wrapper(wrapper):
            raise TypeError(f"WrapperActor takes a wrapper of TorchRL's LLM stack, got {type(wrapper).__name__}.")
        if not isinstance(control, ControlTokens):
            raise TypeError(f"control is a {type(control).__name__}: pass tokenizer.control.")
        self.wrapper, self.control, self.action_length = wrapper, control, action_length
        self._scorers: tuple[UtteranceActor, ...] = ()
        if isinstance(wrapper.model, nn.Module):
            actor = language_actor(wrapper.model)
            options: Any = {"forbidden": (), "cached": False, "vocab_size": vocabulary_size(split_actor(actor))}
            # Not a submodule: state_dict has these weights once, as the wrapper's.
            self._scorers = (UtteranceActor(actor, control, action_length, **options),)
        self._check_settings()
        self.in_keys, self.out_keys = [TOKENS, ATTENTION_MASK], [schema.ACTION, schema.ACTION_LOG_PROB, TOKEN_LOG_PROB]

    def _check_settings(self) -> None:
        """Raise ValueError unless the wrapper writes what the environment reads."""
        wrapper, is_module, control = self.wrapper, bool(self._scorers), self.control
        needed = {"input_mode": "tokens", "generate": True, "return_log_probs": True, "pad_output": is_module}
        wrong = [f"{name}={value!r}" for name, value in needed.items() if getattr(wrapper, name) != value]
        wrong += ["num_samples=None"] if wrapper.num_samples is not None else []
        if is_module:
            given = {**wrapper.model.generation_config.to_dict(), **wrapper.generate_kwargs}
            limits = {"max_new_tokens": self.action_length - 1, "eos_token_id": control.end_of_action}
            limits = {name: value for name, value in limits.items() if given.get(name) not in (value, [value])}
            wrong += [f"generate_kwargs={limits}"] if limits else []
        elif wrapper.padding_value not in (None, control.pad):  # vLLM's wrapper drops it from rows
            wrong.append(f"tokenizer=one whose padding token has the id {control.pad}")
        if wrong:
            raise ValueError(f"WrapperActor needs {type(wrapper).__name__}(..., {', '.join(wrong)}).")

    @dispatch(auto_batch_size=False)
    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write an utterance for every row into ``tensordict``."""
        tokens, attention_mask = entry(tensordict, TOKENS), entry(tensordict, ATTENTION_MASK)
        *batch, width = tokens.shape
        rows = TensorDict(tokens=tokens.reshape(-1, width).long(), attention_mask=attention_mask.reshape(-1, width))
        done = tensordict.get(schema.DONE, torch.zeros(batch, dtype=torch.bool, device=tokens.device)).reshape(-1)
        found = Utterances.empty(len(done), self.action_length, self.control, tokens.device)
        if not done.all():
            with eval_mode(self):
                found.action[~done], found.token_log_prob[~done] = self._write(rows.auto_batch_size_(1)[~done])
        return found.write(tensordict)

    def _write(self, rows: TensorDictBase) -> tuple[Tensor, Tensor]:
        """The utterances after rows ``[n]``, int64 ``[n, K]``, and their log-probabilities, float32 ``[n, K]``."""
        wrapper, pad, end = self.wrapper, self.control.pad, self.control.end_of_action
        prompts = [row.get(TOKENS)[row.get(ATTENTION_MASK)] for row in rows.unbind(0)]
        key, mask = wrapper.input_key, ("masks", "all_attention_mask")
        read = [TensorDict().set(key, prompt).set(mask, torch.ones_like(prompt).bool()) for prompt in prompts]
        passes = _Passes()
        with wrapper.model.register_forward_hook(passes, with_kwargs=True) if self._scorers else nullcontext():
            out = wrapper(lazy_stack(read))
        action = self._response(out, wrapper.tokens_key, pad).to(rows.get(TOKENS).device)
        is_end = action == end
        behind = is_end.cumsum(-1) > is_end.long()  # the first end
        action, full = action.masked_fill(behind, pad), ~is_end.any(-1)
        if self._scorers:
            log_prob = passes.log_prob(action, out.get((wrapper.tokens_key, "response")).shape[-1])
            action[:, -1] = torch.where(full, end, pad)
            if log_prob is None:
                log_prob = self._scorers[0].get_dist(rows).token_log_prob(action)
            return action, log_prob.float().masked_fill(behind, 0.0)
        log_prob = self._response(out, wrapper.log_probs_key, 0.0).to(action.device).float()
        log_prob = log_prob.masked_fill(action == pad, 0.0)
        action[:, -1] = torch.where(full & (action[:, -2] != pad), end, pad)  # engines may stop before
        return action, log_prob

    def _response(self, out: TensorDictBase, key: Any, fill: float) -> Tensor:
        """The first ``K - 1`` entries of each response, and a slot for the end, ``[n, K]``."""
        value = out.get((key, "response"), as_padded_tensor=True, padding_value=fill, padding_side="right")
        value = value[:, : self.action_length - 1]
        return nn.functional.pad(value, (0, self.action_length - value.shape[-1]), value=fill)


class _Passes:
    """A hook that records the log-probabilities of the tokens that ``generate`` samples, from its own passes."""

    def __init__(self) -> None:
        self._read = list[Tensor]()
        self._logits: Tensor | None = None  # of the last pass: only one is kept

    def __call__(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        read = kwargs["input_ids"][:, -1:]
        if self._logits is not None and len(read) == len(self._logits):
            self._read.append(self._logits.log_softmax(-1).gather(-1, read))
        self._logits = upcast_half(output.logits[:, -1])

    def log_prob(self, action: Tensor, number: int) -> Tensor | None:
        """Float ``[n, K]``, zero from the token ``number`` on; None if the passes were not one for each token."""
        if self._logits is None or len(self._logits) != len(action) or len(self._read) != number - 1:
            return None
        last = self._logits.log_softmax(-1).gather(-1, action[:, number - 1 : number].to(self._logits.device))
        log_prob = torch.cat([*self._read, last], -1)
        return nn.functional.pad(log_prob, (0, action.shape[-1] - number)).to(action.device)
