"""TorchRL's own language-model wrappers as reference, on tokens: of TorchRL's conversations, or of whole rows."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.data import Composite, TensorSpec
from torchrl.envs import EnvBase

from torchrl_lang.modules.decision_batch import DecisionBatch
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor, frozen_copy
from torchrl_lang.schema import ATTENTION_MASK, REWARD, TOKENS
from torchrl_lang.transforms.base import required
from torchrl_lang.transforms.keys import ActionKeys
from torchrl_lang.transforms.references.base import Reference
from torchrl_lang.transforms.references.wrapper_calls import (
    check_wrapper,
    mask_by_name,
    placed,
    rows_of,
    without_batching,
)

__all__ = ["WrapperReference"]

_ATTENTION = ("masks", "all_attention_mask")
_ASSISTANT = ("masks", "all_assistant_mask")


class WrapperReference(Reference):
    """A scoring ``TransformersWrapper`` (``generate=False, input_mode="tokens"``), or another wrapper of its kind.

    It reads TorchRL's conversations, ``("tokens", "full")`` and ``("masks", "all_attention_mask")``, both dense. The
    log-probability is float ``[*B, T]`` as ``("log_probs", "full")`` is, zero on padding, on the first token and, with
    ``assistant_only``, on the tokens of others.

    With ``rows`` it reads the rows of this library: the wrapper gets ``tokens`` and ``attention_mask`` under TorchRL's
    names, and the log-probability is zero but at ``action_mask``. It is that of :class:`RowReference` on the same
    weights, which computes logits at decisions only; a wrapper computes all.

    The wrapper is frozen as :func:`~torchrl_lang.transforms.frozen_copy` does it, its batching of calls left out; one
    around an engine that is no ``nn.Module`` (vLLM, SGLang) is used as it is, so keep its weights as they are. While it
    is run here its model gets the attention mask by name, and positions that count from a row's first token.
    TorchRL 0.14 passes the mask as second positional argument, which is another one of GPT-2's, and so fails on it.

    Args:
        wrapper: scores, and has a tokenizer; or a :class:`FrozenActor` of such a wrapper.
        rows: the data are rows of this library.
        assistant_only: on TorchRL's layout: score tokens of ``("masks", "all_assistant_mask")`` alone.

    Raises:
        TypeError: it is no wrapper of TorchRL's.
        ValueError: it generates, reads a prompt, reads text or a history instead of tokens, or has no tokenizer; on
            calls, rows of unequal width.
        KeyError: on calls, an entry is missing.

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

    def __init__(
        self, wrapper: TensorDictModuleBase | FrozenActor, *, rows: bool = False, assistant_only: bool = True
    ) -> None:
        module: Any = wrapper.actor if isinstance(wrapper, FrozenActor) else wrapper
        check_wrapper(module)
        if isinstance(wrapper, FrozenActor):
            self.frozen = wrapper
        elif isinstance(module.model, nn.Module):
            self.frozen = frozen_copy(without_batching(module))
        self._engine: Any = module if self.frozen is None else None
        self.rows = rows
        self.assistant_only = assistant_only
        self.action_keys = ActionKeys.row() if rows else _action_keys(assistant_only)
        self.in_keys = [TOKENS, ATTENTION_MASK] if rows else [self._input_key, _ATTENTION]

    def log_prob(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Tensor:
        """See :class:`Reference`."""
        if self.rows:
            return self._of_rows(tensordict)
        if isinstance(tensordict.get(TOKENS, None), Tensor):
            raise ValueError(
                "These are rows of this library ('tokens' is a tensor), not TorchRL's layout of conversations: use "
                "WrapperReference(wrapper, rows=True)."
            )
        return self._of_conversations(tensordict)

    def log_prob_spec(self, parent: EnvBase, observation_spec: Composite) -> TensorSpec:
        """What a wrapper scores has another width at every step, and specs say one.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "TorchRL's language-model wrappers score conversations whose length changes from step to step: use the "
            "transform in a replay buffer or as postproc of a collector. In an environment pass an UtteranceActor."
        )

    def _of_rows(self, tensordict: TensorDictBase) -> Tensor:
        batch = DecisionBatch.read(tensordict)
        if batch.empty:
            return batch.zeros()
        scores = placed(self._run_on_tokens(batch.tokens, batch.attention_mask), batch.attention_mask)
        return batch.at_tokens(scores.flatten()[batch.place + 1])

    def _of_conversations(self, tensordict: TensorDictBase) -> Tensor:
        tokens, mask = self._dense(tensordict, self._input_key), self._dense(tensordict, _ATTENTION).bool()
        flat = mask.reshape(-1, mask.shape[-1])
        scores = placed(self._run_on_tokens(tokens.reshape(flat.shape), flat), flat).reshape(mask.shape)
        if not self.assistant_only:
            return scores
        advice = "It says which tokens the agent wrote; assistant_only=False scores all."
        required(type(self).__name__, _ASSISTANT, advice, tensordict)
        return torch.where(self._dense(tensordict, _ASSISTANT).bool(), scores, 0)

    def _dense(self, tensordict: TensorDictBase, key: NestedKey) -> Tensor:
        """An entry ``[*B, T]``."""
        advice = "This is TorchRL's layout of conversations; for rows of this library pass rows=True."
        try:
            return required(type(self).__name__, key, advice, tensordict)
        except RuntimeError as error:  # how tensordict says that a lazy stack has no common shape
            raise ValueError(
                f"The rows of {key!r} differ in length, and a log-probability needs one width: build the wrapper that "
                "made the data with pad_output=True."
            ) from error

    def _run_on_tokens(self, tokens: Tensor, attention_mask: Tensor) -> list[Tensor]:
        inputs = TensorDict(batch_size=tokens.shape[:1], device=tokens.device)
        inputs.set(self._input_key, tokens)
        inputs.set(_ATTENTION, attention_mask)
        mode: AbstractContextManager[Any] = torch.no_grad() if self.frozen is None else self.frozen.eval_mode()
        with mode, mask_by_name(self._wrapper.model):
            return rows_of(self._wrapper(inputs), unravel_key((self._wrapper.log_probs_key, "full")))

    @property
    def _wrapper(self) -> Any:
        return self._engine if self.frozen is None else self.frozen.actor

    @property
    def _input_key(self) -> NestedKey:
        return unravel_key(self._wrapper.in_keys[0])


def _action_keys(assistant_only: bool) -> ActionKeys:
    mask = _ASSISTANT if assistant_only else None
    return ActionKeys((("tokens", "full"),), (("log_probs", "full"),), REWARD, ("ref_log_probs", "full"), mask=mask)
