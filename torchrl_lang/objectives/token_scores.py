"""Per-decision log-probability, entropy and divergence from a reference of a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchrl_lang.functional import categorical_entropy, categorical_kl
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor
from torchrl_lang.modules.head_values import States
from torchrl_lang.modules.hugging_face import adapter_layers
from torchrl_lang.modules.row_scoring import DecisionBatch, RowScorer
from torchrl_lang.objectives.base import LogitsChunk

__all__ = ["TokenScores", "checked_reference", "over_decisions", "score_decisions", "unwritable"]


class TokenScores(NamedTuple):
    """At the ``N`` decisions of a batch, at least float32."""

    log_prob: Tensor
    """``[N]``: log-probability of the token that was written."""
    entropy: Tensor
    """``[N]``: of the distribution that it would be drawn from."""
    kl: Tensor | None
    """``[N]``: exact divergence from the reference; None without one."""
    ref_log_prob: Tensor | None
    """``[N]``: log-probability of the token under the reference; None without one."""


def score_decisions(
    scorer: RowScorer,
    batch: DecisionBatch,
    rows: TensorDictBase,
    *,
    entropy_gradient: bool = False,
    reference: FrozenActor | None = None,
    logits_chunk: LogitsChunk = "auto",
) -> TokenScores:
    """Log-probability, entropy and divergence of each decision, under the distribution that the policy acts by.

    Logits exist for one chunk of decisions at a time and, with several chunks, are computed again in the backward pass.

    Args:
        scorer: of the policy.
        batch: the rows' decisions.
        rows: the rows with what the policy's trunk wrote.
        entropy_gradient: whether gradients are to flow through the entropy.
        reference: a frozen model of the same kind, for the exact divergence; a RuntimeError if it has changed.
        logits_chunk: decisions per chunk; ``"auto"`` for a few dozen megabytes of logits, None for one chunk.
    """
    states = {key: rows.get(key) for key in split_actor(scorer.language_actor).trunk.out_keys}
    if reference is not None:
        reference.check_unchanged()
        theirs = RowScorer(reference.actor)
        with reference.eval_mode(), torch.no_grad():
            their_states = theirs.states(batch)

    def score(place: Tensor, action: Tensor) -> tuple[Tensor, ...]:
        log_prob = scorer.log_softmax(states, place)
        out = [log_prob.gather(-1, action[:, None]).squeeze(-1)]
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            out.append(categorical_entropy(log_prob))
        if reference is not None:
            with torch.no_grad():
                ref_log_prob = theirs.log_softmax(their_states, place)
            out.append(categorical_kl(log_prob, ref_log_prob))
            out.append(ref_log_prob.gather(-1, action[:, None]).squeeze(-1))
        return tuple(out)

    log_prob, entropy, *of_reference = over_decisions(score, scorer, batch, states, logits_chunk)
    # The last slot of an utterance admits its end alone: nothing is left to chance there, nor to learn.
    certain = scorer.certain(batch)
    log_prob, entropy = scorer.with_certain_ends(batch, log_prob), torch.where(certain, 0.0, entropy)
    if not of_reference:
        return TokenScores(log_prob, entropy, None, None)
    kl, ref_log_prob = of_reference
    return TokenScores(log_prob, entropy, torch.where(certain, 0.0, kl), theirs.with_certain_ends(batch, ref_log_prob))


def unwritable(scorer: RowScorer, batch: DecisionBatch) -> list[tuple[Tensor, str]]:
    """Where a token was written that the actor cannot write, bool ``[N]``, and what a row has there.

    Filters, which depend on the logits, do not count.
    """
    if scorer.decoder is None:
        return []
    end, length = scorer.decoder.control.end_of_action, scorer.decoder.action_length
    last = scorer.certain(batch)
    advice = "leave such rows out, or exclude the token with a train_mask"
    return [
        (
            ~last & torch.isin(batch.action, scorer.decoder.rule.forbidden),
            f"the token {{token}} at position {{position}}, which the policy cannot write: it is forbidden; {advice}",
        ),
        (
            last & (batch.action != end),
            f"the token {{token}} at position {{position}}, which the policy cannot write: its actor ends an utterance "
            f"within action_length={length} tokens; give it a larger action_length, {advice}",
        ),
    ]


def over_decisions(
    score: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    scorer: RowScorer,
    batch: DecisionBatch,
    states: States,
    logits_chunk: LogitsChunk,
) -> tuple[Tensor, ...]:
    """What ``score(place, action)`` finds at the decisions, ``[N]`` each.

    By chunks, each of which, where there are several, the backward pass computes again.
    """
    chunks = list(_chunks(scorer, batch, states, logits_chunk))
    if len(chunks) == 1:
        return score(batch.place, batch.action)
    parts = [checkpoint(score, batch.place[part], batch.action[part], use_reentrant=False) for part in chunks]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _utterances(actor: object) -> tuple[object, ...] | None:
    """The end, the greatest length and the forbidden tokens of utterances; None where an actor writes single tokens."""
    if not isinstance(actor, UtteranceActor):
        return None
    decoder = actor.decoder
    return decoder.control.end_of_action, decoder.action_length, sorted(set(decoder.rule.forbidden.tolist()))


def checked_reference(
    actor: TensorDictModuleBase, reference: FrozenActor | None, *, is_read: bool
) -> FrozenActor | None:
    """The reference, if there is an exact divergence of ``actor`` from it; None where no term reads one."""
    if not is_read:
        if reference is not None:
            raise ValueError(
                "A reference is read for an exact divergence with a kl_weight (in PPOLoss with kl_estimator='exact'): "
                "give both or none."
            )
        return None
    if not isinstance(reference, FrozenActor):
        raise TypeError(
            f"An exact divergence needs reference=, a FrozenActor, got {type(reference).__name__}: make one with "
            "frozen_copy(actor) or adapters_off(actor)."
        )
    theirs = RowScorer(reference.actor)
    if theirs.has_values or _utterances(reference.actor) != _utterances(actor):
        raise ValueError(
            "Policy and reference must be the same kind of actor, as utterance actors of one action_length, of the "
            "same forbidden tokens and without guidance: make the reference with frozen_copy(actor) or "
            "adapters_off(actor)."
        )
    head = split_actor(theirs.language_actor).head
    if reference.actor is actor and head is not None and adapter_layers(head):
        raise ValueError("The head has adapters, which cannot be off and on at a time: use frozen_copy(actor).")
    return reference


def _chunks(scorer: RowScorer, batch: DecisionBatch, states: States, logits_chunk: LogitsChunk) -> Iterator[slice]:
    number = batch.place.shape[0]
    if logits_chunk is None or not number:
        return iter([slice(0, number)])
    if logits_chunk == "auto":
        return scorer.parts(batch, states)
    return (slice(start, start + logits_chunk) for start in range(0, number, logits_chunk))
