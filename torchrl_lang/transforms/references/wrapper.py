"""The model of a TorchRL language-model wrapper as reference of TorchRL's conversations, in tokens."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_lang.modules import language_actor
from torchrl_lang.modules.frozen.frozen_copy import HeldActor, frozen_copy
from torchrl_lang.modules.row_scoring import row_log_prob
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, REWARD, TOKENS
from torchrl_lang.transforms.base import required
from torchrl_lang.transforms.keys import ActionKeys
from torchrl_lang.transforms.references.base import Reference

__all__ = ["WrapperReference", "is_wrapper"]

_TOKENS = ("tokens", "full")
_ATTENTION = ("masks", "all_attention_mask")
_ASSISTANT = ("masks", "all_assistant_mask")


class WrapperReference(Reference):
    """The model of a ``TransformersWrapper``, on TorchRL's layout of conversations.

    It reads ``("tokens", "full")``, ``("masks", "all_attention_mask")`` and, with ``assistant_only``,
    ``("masks", "all_assistant_mask")``, each dense and padded on either side. The log-probability is float ``[*B, T]``
    as TorchRL's ``("log_probs", "full")`` is, zero on padding, on the first token and on tokens that are not scored.
    The wrapper itself is not called: its model runs as a :func:`~torchrl_lang.modules.language_actor`, with logits at
    the scored tokens only.

    For the rows of this library pass ``RowReference(frozen_copy(language_actor(wrapper.model)))``; for an engine that
    is no ``nn.Module`` (vLLM, SGLang) a :class:`FunctionReference` that calls the wrapper.

    Args:
        wrapper: one of TorchRL's wrappers, of which the model is frozen; or a :class:`FrozenActor` of a language actor,
            e.g. ``adapters_off(language_actor(wrapper.model))``.
        assistant_only: score the tokens of ``("masks", "all_assistant_mask")`` only.

    Raises:
        TypeError: the wrapper's model is no module.
        KeyError: on calls, an entry is missing.
        ValueError: on calls, the data are no conversations padded to one length.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tokenizers import Tokenizer, models
        >>> from torchrl.modules.llm import TransformersWrapper
        >>> from torchrl_lang.modules import causal_lm
        >>> from torchrl_lang.transforms import ReferenceModelLogProbTransform
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "b": 2}, unk_token="<pad>"))
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
        >>> lm = causal_lm("qwen2", vocab_size=3, layers=1, width=8, heads=2, max_length=8)
        >>> wrapper = TransformersWrapper(lm, tokenizer=tokenizer, input_mode="tokens", generate=False)
        >>> tokens, mask = torch.tensor([[0, 1, 2, 1]]), torch.tensor([[False, True, True, True]])
        >>> masks = {"all_attention_mask": mask, "all_assistant_mask": torch.tensor([[False, False, True, True]])}
        >>> data = TensorDict(tokens={"full": tokens}, masks=masks, batch_size=[1])
        >>> ReferenceModelLogProbTransform(wrapper)(data)["ref_log_probs", "full"] < 0
        tensor([[False, False,  True,  True]])
    """

    frozen: HeldActor
    _why_no_env = (
        "TorchRL's language-model wrappers score conversations whose length changes from step to step: use the "
        "transform in a replay buffer or as postproc of a collector. In an environment pass an UtteranceActor."
    )

    def __init__(self, wrapper: Any, *, assistant_only: bool = True) -> None:
        if not isinstance(wrapper, HeldActor):
            model = getattr(wrapper, "model", None)
            if not is_wrapper(wrapper) or not isinstance(model, nn.Module):
                raise TypeError(
                    "A WrapperReference needs one of TorchRL's wrappers (torchrl.modules.llm) around an nn.Module, got "
                    f"a {type(wrapper).__name__} around a {type(model).__name__}. For an engine that is no module pass "
                    "FunctionReference(lambda td: wrapper(td)['log_probs', 'full'])."
                )
            wrapper = frozen_copy(language_actor(model))
        self.frozen = wrapper
        self.mask = _ASSISTANT if assistant_only else _ATTENTION
        kept = _ASSISTANT if assistant_only else None
        self.action_keys = ActionKeys(
            (_TOKENS,), (("log_probs", "full"),), REWARD, ("ref_log_probs", "full"), mask=kept
        )
        self.in_keys = [_TOKENS, _ATTENTION, self.mask]

    def log_prob(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Tensor:
        """See :class:`Reference`."""
        advice = "It is part of TorchRL's layout of conversations."
        try:
            tokens, attention, scored = (required(type(self).__name__, key, advice, tensordict) for key in self.in_keys)
        except (RuntimeError, ValueError) as error:  # a lazy stack without a common shape; "tokens" is a tensor
            raise ValueError(
                "These are no TorchRL conversations padded to one length: build the wrapper that made them with "
                "pad_output=True; for rows of this library pass RowReference(frozen_copy(language_actor(model)))."
            ) from error
        order = (~attention.bool()).long().argsort(dim=-1, stable=True)  # [*B, T], moves padding behind the tokens
        entries = {TOKENS: tokens, ATTENTION_MASK: attention.bool(), AGENT_MASK: scored.bool() & attention.bool()}
        rows = TensorDict(
            {key: value.gather(-1, order) for key, value in entries.items()}, batch_size=tokens.shape[:-1]
        )
        with self.frozen.eval_mode():
            log_prob = row_log_prob(self.frozen.actor, rows)
        return torch.zeros_like(log_prob).scatter(-1, order, log_prob)


def is_wrapper(module: object) -> bool:
    """Whether it is one of TorchRL's language-model wrappers, recognized by name: importing them is optional."""
    return any(base.__name__ == "LLMWrapperBase" for base in type(module).__mro__)
