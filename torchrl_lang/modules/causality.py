"""Check by a forward pass that a model is causal: a token's state must not depend on later tokens."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from torchrl_lang.modules.eval_mode import eval_mode

__all__ = ["check_causal"]

_LENGTH = 8
# Relative difference of states that counts as rounding. New bidirectional models of a few units differ by at least
# 2e-3, trained ones by far more. Causal models do not differ, unless kernels depend on the tokens, as with experts.
_ROUNDING, _HALF_ROUNDING = 1e-4, 1.5e-3

_checked: WeakSet[nn.Module] = WeakSet()


def check_causal(lm: PreTrainedModel, states: Callable[[Tensor], Tensor] | None = None) -> bool:
    """Raise if a token's state depends on later tokens.

    Runs the model once, in evaluation mode and without gradients, on two short rows with a common beginning; further
    calls with the same model do nothing. It uses no random numbers. Models that cannot run where they are (on the meta
    device, sharded over processes, without their kernels) are not checked.

    Args:
        lm: the model, with or without its head.
        states: int64 ``[N, q]`` to ``[N, q, H]``, another way to run the model, which is then run in any case.

    Returns:
        Whether the model was checked.

    Raises:
        ValueError: the model is not causal.

    Examples:
        >>> from transformers import AutoConfig, AutoModel
        >>> from torchrl_lang.modules.causality import check_causal
        >>> shape = {"vocab_size": 9, "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
        >>> check_causal(AutoModel.from_config(AutoConfig.for_model("gpt2", **shape)))
        True
        >>> check_causal(AutoModel.from_config(AutoConfig.for_model("bert", **shape, intermediate_size=8)))
        Traceback (most recent call last):
            ...
        ValueError: BertModel is not causal: the state of a token changes with the tokens after it, so it would be ...
    """
    model = lm.base_model
    if model in _checked:
        return True
    if states is None:
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return False  # a forward pass of a part of a sharded model would make this part its root

        def states(rows: Tensor) -> Tensor:
            return model(inputs_embeds=model.get_input_embeddings()(rows), use_cache=False).last_hidden_state

    vocabulary, device = model.get_input_embeddings().weight.shape[0], model.get_input_embeddings().weight.device
    length = min(_LENGTH, getattr(model.config, "max_position_embeddings", None) or _LENGTH)
    if min(vocabulary, length) < 2:
        return True
    try:
        with torch.no_grad(), eval_mode(model), torch.autocast(device.type, enabled=False):
            difference, limit = _difference(states, length, device)
    except (RuntimeError, NotImplementedError):
        return False
    if difference > limit:
        raise ValueError(
            f"{type(model).__name__} is not causal: the state of a token changes with the tokens after it, so it would "
            "be trained on what it has to predict. Use a decoder such as 'gpt2', 'llama' or 'qwen2'; some kinds have a "
            "setting, as in causal_lm('bert', is_decoder=True)."
        )
    _checked.add(model)
    return True


def _difference(states: Callable[[Tensor], Tensor], length: int, device: torch.device) -> tuple[float, float]:
    """The mean difference of the states of a common beginning, relative to their size, and the tolerance."""
    alike = length // 2
    tokens = torch.arange(length, device=device).remainder(2).expand(2, length).clone()
    tokens[0, alike:], tokens[1, alike:] = 0, 1
    hidden = states(tokens)[:, :alike]
    limit = _HALF_ROUNDING if hidden.dtype.itemsize < 4 else _ROUNDING
    one, other = hidden.double()
    return float((one - other).abs().mean() / one.abs().mean().clamp_min(1e-30)), limit
