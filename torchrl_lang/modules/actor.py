"""Language models as TorchRL actors, in parts that a loss can run separately."""

from __future__ import annotations

from typing import Literal, NamedTuple

from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical
from transformers import PreTrainedModel

from torchrl_lang.modules.action_values import ActionValueHead
from torchrl_lang.modules.trunk import HIDDEN, Trunk, trunk_module, unwrapped
from torchrl_lang.modules.utterance_qvalue_head import UtteranceQValueHead
from torchrl_lang.modules.value_head import ValueHead

__all__ = [
    "ACTION_VALUE",
    "LOGITS",
    "NEXT_TOKEN",
    "STATE_VALUE",
    "UTTERANCE_VALUE",
    "ActorParts",
    "language_actor",
    "linear_layer",
    "qvalue_module",
    "split_actor",
    "value_module",
    "vocabulary_size",
    "with_heads",
]

LOGITS = "logits"
NEXT_TOKEN = "next_token"
ACTION_VALUE = "action_value"
STATE_VALUE = "state_value"
UTTERANCE_VALUE = "utterance_value"

# Models that change the logits after the linear head, so evaluating the head alone would be wrong.
_LOGIT_CHANGES = ("logit_scale", "logits_scaling", "final_logit_softcapping", "lm_head_multiplier")


def language_actor(
    lm: PreTrainedModel | Trunk,
    *,
    head: nn.Module | None = None,
    expose_pre_norm: bool = False,
    length_groups: int | Literal["auto"] = "auto",
    compile: bool = False,
    out_key: str = NEXT_TOKEN,
) -> ProbabilisticTensorDictSequential:
    """A causal language model as an actor in three parts: trunk, language-model head, distribution.

    ``get_dist`` on a batch of rows is a :class:`~torch.distributions.Categorical` with batch shape ``[*B, T]``, the
    distribution of the *next* token at each position. The sample is therefore called ``next_token`` ``[*B, T]``, not
    ``action``; to generate whole utterances in a rollout use an
    :class:`~torchrl_lang.modules.UtteranceActor`. The parts share the model's weights, and tied embeddings
    stay tied.

    Args:
        lm: a causal language model, with or without PEFT adapters, or a :class:`Trunk` together with ``head``.
        head: maps ``hidden [*N, H]`` to ``logits [*N, V]``; default the language model's own head.
        length_groups: see :class:`Trunk`.
        compile: compile the trunk, see :meth:`Trunk.compile`. Useful on GPUs; on a CPU GPT-2 is as fast without.
        expose_pre_norm: the trunk also writes ``hidden_pre_norm``, for ``"residual"`` value heads.
        out_key: name of the sample; its log-prob is ``<out_key>_log_prob``.

    Raises:
        TypeError: ``lm`` is not a Hugging Face model.
        ValueError: options of the trunk are given with a trunk; there is no head or it has the wrong width; or the
            model changes its logits after the head.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> actor = language_actor(causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16))
        >>> rows = TensorDict(tokens=torch.zeros(2, 5, dtype=torch.int64),
        ...                   attention_mask=torch.ones(2, 5, dtype=torch.bool), batch_size=[2])
        >>> actor.get_dist(rows).logits.shape
        torch.Size([2, 5, 11])
    """
    if isinstance(lm, Trunk) and (expose_pre_norm or length_groups != "auto" or compile):
        raise ValueError(
            "expose_pre_norm, length_groups and compile are options of the trunk, which exists already: pass them to "
            "Trunk(...), or call trunk.compile()."
        )
    trunk = lm if isinstance(lm, Trunk) else Trunk(lm, expose_pre_norm=expose_pre_norm, length_groups=length_groups)
    if compile:
        trunk.compile()
    width = getattr(head, "in_features", trunk.width)
    if width != trunk.width:
        raise ValueError(f"The head's input width is {width}, but the trunk's states have width {trunk.width}.")
    if head is None:
        head = None if isinstance(lm, Trunk) else unwrapped(lm).get_output_embeddings()
        changes = [name for name in _LOGIT_CHANGES if getattr(trunk.model.config, name, None) not in (None, 1)]
        if head is None or changes:
            reason = f"its configuration sets {changes}" if changes else "it has no language-model head"
            raise ValueError(
                f"{type(lm).__name__} needs its own head: {reason}. Pass head=, a module hidden -> logits."
            )
    return ProbabilisticTensorDictSequential(
        trunk_module(trunk),
        TensorDictModule(head, in_keys=[HIDDEN], out_keys=[LOGITS]),
        ProbabilisticTensorDictModule(
            in_keys=[LOGITS],
            out_keys=[out_key],
            distribution_class=Categorical,
            return_log_prob=True,
            log_prob_key=f"{out_key}_log_prob",
        ),
    )


def qvalue_module(head: ActionValueHead | UtteranceQValueHead) -> TensorDictModule:
    """``hidden`` (or ``hidden_pre_norm``) ``[*N, H]`` -> ``action_value`` ``[*N, n_q, V]``.

    A :class:`UtteranceQValueHead` writes ``utterance_value`` ``[*N, n_q]``.

    Examples:
        >>> from torchrl_lang.modules import QValueHead, qvalue_module
        >>> qvalue_module(QValueHead(8, 5, kind="residual")).in_keys
        ['hidden_pre_norm']

    Raises:
        TypeError: ``head`` is not a Q head of this library; wrap other modules in a ``TensorDictModule``.
    """
    if isinstance(head, UtteranceQValueHead):
        return TensorDictModule(head, in_keys=[head.in_key], out_keys=[UTTERANCE_VALUE])
    _check_head("qvalue_module", head, ActionValueHead)
    return TensorDictModule(head, in_keys=[head.in_key], out_keys=[ACTION_VALUE])


def value_module(head: ValueHead) -> TensorDictModule:
    """``hidden`` (or ``hidden_pre_norm``) ``[*N, H]`` -> ``state_value`` ``[*N, 1]``.

    Raises:
        TypeError: ``head`` is not a value head of this library; wrap other modules in a ``TensorDictModule``.
    """
    _check_head("value_module", head, ValueHead)
    return TensorDictModule(head, in_keys=[head.in_key], out_keys=[STATE_VALUE])


def _check_head(function: str, head: nn.Module, kind: type[nn.Module]) -> None:
    if not isinstance(head, kind):
        raise TypeError(
            f"{function} needs a {kind.__name__}, got {type(head).__name__}: wrap another module in "
            "TensorDictModule(module, in_keys=[...], out_keys=[...])."
        )


def with_heads(values: Tensor, kind: str) -> Tensor:
    """Give the values of a head an axis of heads: ``[N, V]`` as one Q head, ``[N, 1, V]``, and ``[N]`` as ``[N, 1]``.

    ``kind`` is ``"action_value"``, ``"utterance_value"`` or ``"state_value"``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.actor import with_heads
        >>> with_heads(torch.zeros(3, 5), "action_value").shape, with_heads(torch.zeros(3, 1), "state_value").shape
        (torch.Size([3, 1, 5]), torch.Size([3, 1]))
    """
    return values.unsqueeze(1) if values.ndim == (2 if kind == ACTION_VALUE else 1) else values


class ActorParts(NamedTuple):
    """The parts of a language actor."""

    trunk: TensorDictModuleBase
    """Writes ``hidden`` ``[*B, T, H]``, or ``logits`` ``[*B, T, V]`` if there is no separate head."""
    head: TensorDictModuleBase | None
    """``hidden [*N, H] -> logits [*N, V]``, or ``None`` if the trunk writes the logits."""
    prob: ProbabilisticTensorDictModule
    """The distribution over ``logits``."""


def split_actor(actor: ProbabilisticTensorDictSequential) -> ActorParts:
    """Find the trunk, head and distribution of an actor by its keys, without copying.

    The trunk is everything up to the module that writes ``hidden``, the head everything between it and the
    distribution. If no module writes ``hidden``, there is no head and the trunk writes ``logits``.

    Raises:
        TypeError: ``actor`` is not a :class:`~tensordict.nn.ProbabilisticTensorDictSequential`.
        ValueError: no module writes ``logits``, or no distribution reads them.

    Examples:
        >>> from torchrl_lang.modules import causal_lm, language_actor, split_actor
        >>> parts = split_actor(language_actor(causal_lm(vocab_size=5, layers=1, width=8, heads=2, max_length=8)))
        >>> parts.trunk.out_keys, parts.head.out_keys
        (['hidden'], ['logits'])
    """
    if not isinstance(actor, ProbabilisticTensorDictSequential):
        raise TypeError(
            f"An actor must be a ProbabilisticTensorDictSequential (trunk, head, distribution), got "
            f"{type(actor).__name__}: build one with language_actor()."
        )
    modules = list(actor.module)
    prob = next((m for m in modules if isinstance(m, ProbabilisticTensorDictModule) and LOGITS in m.in_keys), None)
    before = [] if prob is None else modules[: modules.index(prob)]
    if prob is None or not any(LOGITS in module.out_keys for module in before):
        keys = [(type(m).__name__, list(m.in_keys), list(m.out_keys)) for m in modules]
        raise ValueError(
            f"An actor needs a module that writes 'logits' and a distribution that reads them, got {keys}."
        )
    border = next((i for i, module in enumerate(before) if HIDDEN in module.out_keys), len(before) - 1) + 1
    head = before[border:]
    return ActorParts(_joined(before[:border]), _joined(head) if head else None, prob)


def linear_layer(head: TensorDictModuleBase | None) -> nn.Linear | None:
    """The linear layer that is all of a head; None if there is more to it, adapters and hooks included."""
    module = getattr(head, "module", None)
    if head is None or type(head) is not TensorDictModule or type(module) is not nn.Linear or len(head.in_keys) != 1:
        return None
    return None if module._forward_hooks or module._forward_pre_hooks else module


def vocabulary_size(parts: ActorParts) -> int | None:
    """``V`` of an actor whose head is a linear layer, with or without adapters; otherwise ``None``."""
    return getattr(getattr(parts.head, "module", None), "out_features", None)


def _joined(modules: list[TensorDictModuleBase]) -> TensorDictModuleBase:
    return modules[0] if len(modules) == 1 else TensorDictSequential(*modules)
