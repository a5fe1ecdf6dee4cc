"""Checks of an utterance actor's arguments at construction, before the first token."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from torchrl_lang._checks import at_least_one
from torchrl_lang.modules.action_values import ActionValueHead
from torchrl_lang.modules.actor import ACTION_VALUE, STATE_VALUE, ActorParts, vocabulary_size
from torchrl_lang.modules.decoding.guidance import ValueGuidance
from torchrl_lang.modules.decoding.model_runner import apply_head, check_writes, missing_state
from torchrl_lang.modules.decoding.next_token import NextTokenDistribution
from torchrl_lang.modules.eval_mode import eval_mode
from torchrl_lang.modules.head_values import checked_values, zero_states
from torchrl_lang.modules.stacked_heads import StackedHeads
from torchrl_lang.modules.trunk import HIDDEN, trunk_of
from torchrl_lang.schema import ControlTokens

__all__ = ["check_control", "check_count", "check_model"]


def check_count(name: str, value: Any) -> None:
    """Raise unless ``value`` is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}.")
    at_least_one(name, value)


def check_control(control: Any) -> None:
    """Raise unless ``control`` holds the ids of control tokens."""
    if not isinstance(control, ControlTokens):
        raise TypeError(f"control must be ControlTokens, got {type(control).__name__}: pass tokenizer.control.")


def check_model(
    parts: ActorParts, rule: NextTokenDistribution, control: ControlTokens, value: nn.Module | None
) -> None:
    """Raise unless model, tokens and heads match."""
    _check_ids(vocabulary_size(parts), rule, control)
    if value is not None:
        check_writes("value", value, STATE_VALUE)
        _check_head("value", value, STATE_VALUE, parts.trunk)
    if rule.guidance is not None:
        _check_guidance(parts, rule.guidance)


def _check_ids(vocabulary: int | None, rule: NextTokenDistribution, control: ControlTokens) -> None:
    ids, forbidden = set(control.ids()), set(rule.forbidden.tolist())
    allowed = vocabulary if rule.vocab_size is None else rule.vocab_size
    if vocabulary is not None:
        if allowed is not None and allowed > vocabulary:
            raise ValueError(
                f"The tokenizer has {allowed} ids, but the model's vocabulary only {vocabulary}: give the model "
                "embeddings for all of them with fit_vocabulary(lm, tokenizer.vocab_size)."
            )
        _check_range("forbidden", forbidden, vocabulary)
        _check_range("control", ids, vocabulary)
    if allowed is None:
        return
    if control.end_of_action >= allowed:
        raise ValueError(
            f"vocab_size={allowed} excludes the end-of-action token {control.end_of_action}: it must be at least the "
            "number of the tokenizer's ids."
        )
    if len({token for token in forbidden if token < allowed}) == allowed:
        raise ValueError(f"forbidden contains all {allowed} ids: no token is left to generate.")


def _check_range(name: str, ids: Collection[int], vocabulary: int) -> None:
    beyond = sorted(token for token in ids if not 0 <= token < vocabulary)
    if beyond:
        raise ValueError(
            f"{name} contains the ids {beyond}, outside the model's vocabulary of {vocabulary}: ids must lie in "
            f"[0, {vocabulary})."
        )


def _check_reads(trunk: TensorDictModuleBase, head: nn.Module) -> None:
    model, own = trunk_of(trunk), getattr(head, "module", head)
    for key in head.in_keys if isinstance(head, TensorDictModuleBase) else [getattr(head, "in_key", HIDDEN)]:
        if key not in trunk.out_keys:
            raise missing_state(key, trunk.out_keys, own)
    if model is not None and isinstance(own, StackedHeads) and own.width != model.width:
        raise ValueError(
            f"{type(own).__name__} reads states of width {own.width}, but the trunk's have {model.width}: build it "
            f"with width={model.width}."
        )


def _check_head(name: str, head: nn.Module, kind: str, trunk: TensorDictModuleBase) -> Tensor | None:
    """Raise unless the head reads states of the trunk; returns the values of one of another library, for zeros."""
    _check_reads(trunk, head)
    if isinstance(getattr(head, "module", head), StackedHeads):
        return None
    model = trunk_of(trunk)
    keys = head.in_keys if isinstance(head, TensorDictModuleBase) else [getattr(head, "in_key", HIDDEN)]
    states = None if model is None else zero_states(keys, model.width, [model, head])
    if states is None:
        return None
    with torch.no_grad(), eval_mode(head):
        return checked_values(f"The module {name}", kind, states, lambda: apply_head(head, dict(states.items()), kind))


def _check_guidance(parts: ActorParts, guidance: ValueGuidance) -> None:
    trunk = parts.trunk if guidance.value_trunk is None else guidance.value_trunk
    if guidance.value is not None:
        _check_head("value", guidance.value, STATE_VALUE, trunk)
    tried = _check_head("qvalue", guidance.qvalue, guidance._values, trunk)
    head = getattr(guidance.qvalue, "module", guidance.qvalue)
    known = head.vocab_size if isinstance(head, ActionValueHead) else None
    if tried is not None and guidance._values == ACTION_VALUE:
        known = tried.shape[-1]
    vocabulary = vocabulary_size(parts)
    if known is not None and vocabulary is not None and known != vocabulary:
        raise ValueError(
            f"The Q head has values for {known} tokens, but the model logits for {vocabulary}: build it with "
            f"vocab_size={vocabulary}."
        )
