"""TorchRL's wrappers of language models as policies: one utterance for each row."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor, nn

from torchrl_lang._checks import check_options, is_wrapper
from torchrl_lang.modules.actor import language_actor
from torchrl_lang.modules.decoding.sampling import Utterances
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.modules.row_scoring import row_log_prob
from torchrl_lang.schema import (
    ACTION,
    ACTION_LOG_PROB,
    AGENT_MASK,
    ATTENTION_MASK,
    DONE,
    TOKEN_LOG_PROB,
    TOKENS,
    ControlTokens,
    entry,
)


class WrapperActor(TensorDictModuleBase):
    """One of TorchRL's wrappers of language models as the policy of a language environment.

    Reads ``tokens`` and ``attention_mask`` ``[*B, T]`` and writes ``action`` int64 ``[*B, K]``, ``token_log_prob`` float
    ``[*B, K]`` and ``action_log_prob`` float ``[*B]``, as an :class:`~torchrl_lang.modules.UtteranceActor` does. The
    wrapper gets the tokens of each row and returns tokens: no text is written or read on the way. Every utterance ends:
    an end-of-action token with probability one follows ``K - 1`` tokens without one. Rows that are done, if the
    tensordict has ``done``, get an empty utterance. No gradients and evaluation mode.

    Log-probabilities are those of the language model at temperature 1 over its whole vocabulary, whatever the
    temperature and the filters of ``generate_kwargs``: sample without them where a loss compares these with its own.
    Those of a ``TransformersWrapper`` are computed by a further pass over rows and utterances, because it writes 0 for
    the first token of each response; an engine's are read as it wrote them.

    The wrapper decides about sampling by ``do_sample``, not by ``set_exploration_type``, and draws from torch's global
    generator. It may write control tokens; ``generate_kwargs={"bad_words_ids": [[i] for i in
    control.forbidden_in_action()]}`` forbids them.

    Args:
        wrapper: a ``TransformersWrapper(..., input_mode="tokens", pad_output=True, return_log_probs=True)`` with
            ``generate_kwargs={"max_new_tokens": K - 1, "eos_token_id": control.end_of_action}``; or a ``vLLMWrapper`` or
            ``SGLangWrapper`` with ``pad_output=False``, whose engine stops at this token and after ``K - 1`` tokens. An
            engine that stops earlier leaves an utterance without an end, which the environment writes.
        control: ids of the control tokens, ``tokenizer.control``.
        action_length: ``K``, the environment's ``action_length``, at least 2.

    Raises:
        TypeError: ``wrapper`` is not one of TorchRL's wrappers.
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
        >>> rows = TensorDict(tokens=torch.tensor([[2, 2], [2, 0]]), attention_mask=torch.tensor([[1, 1], [1, 0]]).bool(),
        ...                   batch_size=[2])
        >>> policy(rows)["action"].shape, rows["action_log_prob"].shape
        (torch.Size([2, 4]), torch.Size([2]))
    """

    def __init__(self, wrapper: Any, control: ControlTokens, action_length: int) -> None:
        super().__init__()
        if not is_wrapper(wrapper):
            raise TypeError(f"WrapperActor takes a wrapper of TorchRL's LLM stack, got {type(wrapper).__name__}.")
        check_options(action_length=(action_length, 2))
        is_module = isinstance(wrapper.model, nn.Module)
        _check_settings(wrapper, is_module, control, action_length)
        self.wrapper, self.control, self.action_length = wrapper, control, action_length
        # Not a submodule: state_dict has these weights once, as the wrapper's.
        self._scorers = (language_actor(wrapper.model),) if is_module else ()
        self.in_keys = [TOKENS, ATTENTION_MASK]
        self.out_keys = [ACTION, ACTION_LOG_PROB, TOKEN_LOG_PROB]

    @dispatch(auto_batch_size=False)
    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write an utterance for every row into ``tensordict``."""
        tokens, attention_mask = entry(tensordict, TOKENS), entry(tensordict, ATTENTION_MASK)
        batch, done = tokens.shape[:-1], tensordict.get(DONE, None)
        rows = [row[mask].long() for row, mask in zip(tokens.flatten(0, -2), attention_mask.flatten(0, -2))]
        live = [i for i in range(len(rows)) if done is None or not done.flatten()[i]]
        empty = Utterances.empty(len(rows), self.action_length, self.control, tokens.device)
        action, log_prob = empty.action, empty.token_log_prob
        if live:
            with eval_mode(self):
                action[live], log_prob[live] = self._write([rows[i] for i in live])
        tensordict.set(ACTION, action.reshape(*batch, -1)).set(TOKEN_LOG_PROB, log_prob.reshape(*batch, -1))
        return tensordict.set(ACTION_LOG_PROB, log_prob.sum(-1).reshape(batch))

    def _write(self, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The utterances after rows of tokens, int64 ``[n, K]``, and their log-probabilities, float32 ``[n, K]``."""
        wrapper, pad, end = self.wrapper, self.control.pad, self.control.end_of_action
        prompts = [
            TensorDict().set(wrapper.input_key, row).set(_ATTENTION, torch.ones_like(row).bool()) for row in rows
        ]
        out = wrapper(lazy_stack(prompts))
        action = self._response(out, wrapper.tokens_key, pad).to(rows[0].device)
        is_end = action == end
        written = is_end.cumsum(-1) - is_end.long() == 0  # up to and including the first end
        written[:, -1] = False
        action = action.where(written, pad)
        if self._scorers:
            log_prob = _scores(self._scorers[0], rows, action, written, pad)
        else:
            log_prob = self._response(out, wrapper.log_probs_key, 0.0).to(rows[0].device)
        full = ~is_end.any(-1)
        if not self._scorers:  # an engine may stop before, at texts or at other tokens
            full &= action[:, -2] != pad
        action[:, -1] = torch.where(full, end, pad)
        return action, log_prob.float().where(written, 0.0)

    def _response(self, out: TensorDictBase, key: Any, fill: float) -> Tensor:
        """The first ``K - 1`` entries of each response, and a slot for the end, ``[n, K]``."""
        options: Any = {"as_padded_tensor": True, "padding_value": fill, "padding_side": "right"}
        value = out.get((key, "response"), **options)[:, : self.action_length - 1]
        return nn.functional.pad(value, (0, self.action_length - value.shape[-1]), value=fill)


_ATTENTION = ("masks", "all_attention_mask")


def _scores(actor: nn.Module, rows: list[Tensor], action: Tensor, written: Tensor, pad: int) -> Tensor:
    """The model's log-probabilities of the ``written`` tokens, bool ``[n, K]``, after rows of tokens; ``[n, K]``."""
    whole = [torch.cat([row, tokens[mask]]) for row, tokens, mask in zip(rows, action, written, strict=True)]
    tokens = nn.utils.rnn.pad_sequence([*whole], batch_first=True, padding_value=pad)
    start, length = (torch.tensor([len(x) for x in y], device=tokens.device)[:, None] for y in (rows, whole))
    place = torch.arange(tokens.shape[-1], device=tokens.device)
    entries = {TOKENS: tokens, ATTENTION_MASK: place < length, AGENT_MASK: (place >= start) & (place < length)}
    found = row_log_prob(actor, TensorDict(entries, batch_size=tokens.shape[:1]))
    return torch.zeros(action.shape, dtype=found.dtype, device=found.device).masked_scatter(
        written, found[entries[AGENT_MASK]]
    )


def _check_settings(wrapper: Any, is_module: bool, control: ControlTokens, action_length: int) -> None:
    """Raise ValueError unless the wrapper writes what the environment reads."""
    needed = {"input_mode": "tokens", "generate": True, "return_log_probs": True, "pad_output": is_module}
    found = {name: getattr(wrapper, name) for name in (*needed, "num_samples")}
    wrong = [f"{name}={value!r}" for name, value in (needed | {"num_samples": None}).items() if found[name] != value]
    if is_module:
        given, config, end = wrapper.generate_kwargs, wrapper.model.generation_config, control.end_of_action
        limits = {"max_new_tokens": (action_length - 1, [action_length - 1]), "eos_token_id": (end, [end, [end]])}
        other = {n: v for n, (v, allowed) in limits.items() if given.get(n, getattr(config, n, None)) not in allowed}
        wrong += [f"generate_kwargs={other}"] if other else []
    elif wrapper.padding_value is not None and wrapper.padding_value != control.pad:  # engines drop it from rows
        wrong.append(f"tokenizer=one whose padding token has the id {control.pad}")
    if wrong:
        raise ValueError(f"WrapperActor needs {type(wrapper).__name__}(..., {', '.join(wrong)}).")
