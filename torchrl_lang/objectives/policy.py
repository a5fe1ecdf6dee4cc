"""The policy's part of a loss: imitation, scores of what was written, and frozen policies that targets read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchrl_lang._checks import check_options
from torchrl_lang.functional import advantage_weight, categorical_kl, shift_left
from torchrl_lang.functional.kl import categorical_entropy
from torchrl_lang.functional.linear import linear_cross_entropy
from torchrl_lang.functional.precision import upcast_half
from torchrl_lang.functional.value_terms import divisor
from torchrl_lang.modules.actor import LOGITS, linear_layer
from torchrl_lang.modules.controllers import KLController, as_controller
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor
from torchrl_lang.modules.head_values import States
from torchrl_lang.modules.hugging_face import adapter_layers
from torchrl_lang.modules.row_scoring import DecisionBatch, RowScorer
from torchrl_lang.objectives.base import RowLoss, TransitionBatch, in_chunks
from torchrl_lang.objectives.networks import gather_inputs, vocabulary

# Values over the vocabulary in memory at a time: 16 MB of float32.
_VALUES_AT_ONCE = 2**22
# Where pieces are computed again in the backward pass each adds to the whole gradient of the output layer: 64 MB.
_SCORES_AT_ONCE = 2**24

# -- imitation ---------------------------------------------------------------------------------------------------------


def actor_loss(
    loss: RowLoss,
    batch: TransitionBatch,
    rows: TensorDictBase,
    weight: Tensor | None = None,
    *,
    detach: bool = False,
    environment_only: bool = False,
) -> Tensor:
    """Compute ``sum_t w_t CE(pi(. | x_<=t), x_t+1) / n`` (ILQL, arXiv 2206.11871, sec. 4.3), only where ``w_t > 0``.

    Args:
        loss: whose policy it is, with its ``transition_weight``, ``weight_clip``, ``actor_normalizer``, ``reduction``
            and ``logits_chunk``: ``n`` is the number of real tokens but the first of each row, as in the paper's code
            (``"all"``), or that of decisions (``"action"``).
        batch: the decisions of the rows.
        rows: the rows with what the trunk wrote: the head's inputs ``[B, T, H]``, or ``logits`` ``[B, T, V]``.
        weight: float ``[N]``, the weight of each decision; default 1.
        detach: no gradient flows from here into the trunk.
        environment_only: the sum is over the environment's tokens alone; ``n`` is the same.

    Returns:
        float ``[]``, or ``[*B, T]`` where nothing is reduced.
    """
    head = loss.scorer.actor_parts.head
    keys = [LOGITS] if head is None else head.in_keys
    if weight is None:
        weight = torch.ones_like(batch.reward, dtype=torch.promote_types(rows.get(keys[0]).dtype, torch.float32))
    index, elsewhere = batch.place, loss.transition_weight
    if elsewhere:
        elsewhere = elsewhere if loss.weight_clip is None else min(elsewhere, loss.weight_clip)
        real = shift_left(batch.attention_mask)
        index = (real & ~batch.decision if environment_only else real).flatten().nonzero().squeeze(-1)
        weight = batch.at_decisions(weight, fill=elsewhere).flatten()[index]
    if batch.mask is not None:  # left out rather than multiplied: a masked value may be infinite
        kept = batch.mask.flatten()[index].nonzero().squeeze(-1)
        index, weight = index[kept], weight[kept]
    target = shift_left(batch.tokens).flatten()[index]
    inputs = gather_inputs(keys, rows, index)
    inputs = inputs.detach() if detach else inputs
    layer = linear_layer(head)
    if head is not None and layer is not None and in_chunks(loss.logits_chunk, layer.out_features):
        chunk = loss.logits_chunk if isinstance(loss.logits_chunk, int) else None
        total, losses, _ = linear_cross_entropy(
            inputs.get(head.in_keys[0]),
            layer.weight,
            layer.bias,
            target,
            position_weight=weight,
            chunk_size=chunk,
            recompute=loss.reduction == "none",
        )
    else:
        logits = (inputs if head is None else head(inputs)).get(LOGITS)
        losses = F.cross_entropy(upcast_half(logits), target, reduction="none")
        total = (weight * losses).sum()
    if loss.reduction == "none":
        return batch.at_decisions(weight * losses, index).reshape(batch.shape)
    if loss.reduction == "sum":
        return total
    counts = shift_left(batch.attention_mask) if loss.actor_normalizer == "all" else batch.decision
    counts = counts if batch.mask is None else counts & batch.mask
    return total / divisor(counts)


def environment_loss(loss: RowLoss, batch: TransitionBatch, rows: TensorDictBase) -> Tensor:
    """The part of :func:`actor_loss` of the environment's tokens; zero without a ``transition_weight``."""
    if not loss.transition_weight:
        return batch.reward.new_zeros(batch.shape if loss.reduction == "none" else ())
    return actor_loss(loss, batch, rows, environment_only=True)


def weighs_advantages(loss: RowLoss) -> bool:
    """Whether advantages weigh the policy's term, by the options of a loss with Q and V."""
    return bool(loss.actor_weight) and (loss.advantage_weighting == "sign" or loss.advantage_temperature != 0)


def policy_weight(loss: RowLoss, advantage: Tensor) -> Tensor:
    """The weight of each decision in the policy's term by its advantage, both ``[N]``."""
    return advantage_weight(advantage, loss.advantage_temperature, loss.advantage_weighting, loss.weight_clip)


# -- scores of what was written ----------------------------------------------------------------------------------------


class TokenScores(NamedTuple):
    """At the ``N`` decisions of a batch, at least float32; without a reference the last two are None."""

    log_prob: Tensor
    """``[N]``: log-probability of the token that was written."""
    entropy: Tensor
    """``[N]``: of the distribution that it would be drawn from."""
    kl: Any
    """``[N]``: exact divergence from the reference."""
    ref_log_prob: Any
    """``[N]``: log-probability of the token under the reference."""


def score_decisions(
    loss: RowLoss, batch: DecisionBatch, rows: TensorDictBase, *, entropy_gradient: bool = False
) -> TokenScores:
    """Compute log-probability, entropy and divergence of each decision, under the distribution that the policy acts by.

    Logits exist for one chunk of decisions at a time and, with several chunks, are computed again in the backward pass.

    Args:
        loss: of the policy, with its ``logits_chunk`` and, for the exact divergence, its ``reference``, a frozen model
            of the same kind; a RuntimeError if that has changed.
        batch: the rows' decisions.
        rows: the rows with what the policy's trunk wrote.
        entropy_gradient: whether gradients are to flow through the entropy.
    """
    scorer, reference, states = loss.scorer, loss.reference, loss._policy_states(rows)
    if reference is not None:
        reference.check_unchanged()
        ref_scorer = loss._scorer(reference.actor)
        with reference.eval_mode(), torch.no_grad():
            ref_states = ref_scorer.states(batch)

    def score(place: Tensor, action: Tensor) -> tuple[Tensor, ...]:
        log_prob = scorer.log_softmax(states, place)
        out = [log_prob.gather(-1, action[:, None]).squeeze(-1)]
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            out.append(categorical_entropy(log_prob))
        if reference is not None:
            with torch.no_grad():
                ref_log_prob = ref_scorer.log_softmax(ref_states, place)
            out.append(categorical_kl(log_prob, ref_log_prob))
            out.append(ref_log_prob.gather(-1, action[:, None]).squeeze(-1))
        return tuple(out)

    log_prob, entropy, *of_reference = over_decisions(loss, batch, score)
    # The last slot of an utterance admits its end alone: nothing is left to chance there, nor to learn.
    forced = scorer.certain(batch)
    log_prob, entropy = scorer.with_certain_ends(batch, log_prob), torch.where(forced, 0.0, entropy)
    if not of_reference:
        return TokenScores(log_prob, entropy, None, None)
    kl, ref_log_prob = of_reference
    ref_log_prob = ref_scorer.with_certain_ends(batch, ref_log_prob)
    return TokenScores(log_prob, entropy, torch.where(forced, 0.0, kl), ref_log_prob)


def over_decisions(
    loss: RowLoss, batch: DecisionBatch, score: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Compute ``score(place, action)`` at the decisions, ``[N]`` each.

    By pieces, each of which, where there are several, the backward pass computes again.
    """
    parts = pieces(loss, batch.place.shape[0], _SCORES_AT_ONCE)
    if len(parts) == 1:
        return score(batch.place, batch.action)
    found = [checkpoint(score, batch.place[part], batch.action[part], use_reentrant=False) for part in parts]
    return tuple(torch.cat(column) for column in zip(*found, strict=True))


def pieces(loss: RowLoss, number: int, at_once: int = _VALUES_AT_ONCE) -> list[slice]:
    """Slices of the positions whose values over the vocabulary exist at a time; one where there are none."""
    size = loss.logits_chunk
    if size == "auto":
        known = vocabulary(loss.actor_network)
        size = None if known is None else max(at_once // known, 1)
    size = size or max(number, 1)
    return [slice(start, start + size) for start in range(0, max(number, 1), size)]


def unwritable(scorer: RowScorer, batch: DecisionBatch) -> list[tuple[Tensor, str]]:
    """Where a token was written that the actor cannot write, bool ``[N]``, and what a row has there.

    Filters, which depend on the logits, do not count.
    """
    if scorer.decoder is None:
        return []
    end, length = scorer.decoder.control.end_of_action, scorer.decoder.action_length
    last, forbidden = scorer.certain(batch), scorer.decoder.rule.forbidden_beside(batch.action)
    text = "the token {token} at position {position}, which the policy cannot write:"
    advice = "leave such rows out, or exclude the token with a train_mask"
    too_long = f"its actor ends an utterance within action_length={length} tokens; give it a larger action_length"
    not_allowed, late = ~last & torch.isin(batch.action, forbidden), last & (batch.action != end)
    return [(not_allowed, f"{text} it is forbidden; {advice}"), (late, f"{text} {too_long}, {advice}")]


# -- references --------------------------------------------------------------------------------------------------------


def kl_controller(kl_weight: float | KLController) -> KLController | None:
    """KL controller of a loss; None for a weight of zero, whose divergence is not computed."""
    if isinstance(kl_weight, KLController):
        return kl_weight
    check_options(kl_weight=(kl_weight, "[0, inf)"))
    return as_controller(kl_weight) if kl_weight else None


def reference_of(actor: TensorDictModuleBase, reference: Any, *, is_read: bool) -> FrozenActor | None:
    """The reference, if there is an exact divergence of ``actor`` from it; None where no term reads one."""
    if not is_read:
        if reference is not None:
            raise ValueError("A reference and the kl_weight of an exact divergence go together: give both or none.")
        return None
    check_frozen("An exact divergence", "reference", reference, actor)
    scorer = RowScorer(reference.actor)
    if scorer.has_values or _utterances(reference.actor) != _utterances(actor):
        same = "action_length and forbidden tokens, without guidance: frozen_copy(actor) or adapters_off(actor)"
        raise ValueError(f"Policy and reference must be the same kind of actor, with the same {same}.")
    head = scorer.actor_parts.head
    if reference.actor is actor and head is not None and adapter_layers(head):
        raise ValueError("The head has adapters, which cannot be off and on at a time: use frozen_copy(actor).")
    return reference


def _utterances(actor: object) -> tuple[object, ...] | None:
    """The end, the greatest length and the forbidden tokens of utterances; None where an actor writes single tokens."""
    if not isinstance(actor, UtteranceActor):
        return None
    decoder = actor.decoder
    return decoder.control.end_of_action, decoder.action_length, sorted(set(decoder.rule.forbidden.tolist()))


def only_scaled(loss: RowLoss, *actors: Any) -> None:
    """Raise ValueError unless the distributions of actors have a ratio everywhere, as filters leave none."""
    for actor in actors:
        decoder = RowScorer(actor).decoder
        if decoder is not None and not decoder.rule.only_scales:
            name = type(loss).__name__
            raise ValueError(f"{name} needs actors without top_k, top_p and min_p, which leave no log-ratio.")


@dataclass
class Behavior:
    """Estimate of the policy that made the data: a language model's own distribution, at temperature 1."""

    scorer: RowScorer
    states: States
    """Output of its trunk, each ``[B, T, ...]``."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """In which its head runs, without gradients in any case."""

    @torch.no_grad()
    def log_softmax(self, place: Tensor) -> Tensor:
        """Log-probability of every token at ``M`` places, ``[M, V]``."""
        with self.context():
            return self.scorer.log_softmax(self.states, place)

    @torch.no_grad()
    def log_prob(self, batch: DecisionBatch) -> Tensor:
        """Log-probability of the tokens that were written, ``[N]``."""
        if batch.empty:
            return torch.zeros(0, device=batch.tokens.device)
        with self.context():
            return self.scorer.log_prob(batch, self.states)


def frozen_behavior(loss: RowLoss, batch: DecisionBatch) -> Behavior:
    """The own distribution of a loss's reference: one pass of its trunk over the rows, without gradients."""
    reference: Any = loss.reference
    reference.check_unchanged()
    scorer = loss._scorer(loss._scorer(reference.actor).language_actor)
    with reference.eval_mode(), torch.no_grad():
        return Behavior(scorer, scorer.states(batch, whole=True), reference.eval_mode)


def check_frozen(loss: str, name: str, frozen: Any, actor: object) -> None:
    """Raise unless the option ``name`` of a loss is a frozen actor that writes the same tokens as ``actor``."""
    if not isinstance(frozen, FrozenActor):
        raise TypeError(f"{loss} needs {name} as a FrozenActor, of frozen_copy(actor), got {type(frozen).__name__}.")
    known, needed = vocabulary(frozen.actor), vocabulary(actor)
    if known is not None and needed is not None and known < needed:
        raise ValueError(f"The {name} has {known} tokens and the policy can write {needed}: give both one tokenizer.")
