"""The exact divergence between a policy and a reference: of distributions, and of language models over rows."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import CompositeDistribution
from torch import Tensor
from torch.distributions import Categorical, Distribution, kl_divergence
from torch.distributions import OneHotCategorical as TorchOneHotCategorical
from torchrl.modules import OneHotCategorical

from torchrl_lang.functional import categorical_kl, projected_kl
from torchrl_lang.modules.frozen.lower_layers import SharedLowerLayers
from torchrl_lang.modules.head_values import States
from torchrl_lang.modules.row_scoring import DecisionBatch, RowScorer
from torchrl_lang.transforms.language_references import RowReference
from torchrl_lang.transforms.references import sum_heads

__all__ = ["distribution_kl", "row_kl", "row_log_probs"]

# Decisions at a time.
_DECISIONS_AT_ONCE = 1024


def distribution_kl(p: Distribution, q: Distribution, *, chunk_size: int = 1024) -> Tensor:
    """``KL(p || q)`` in closed form, ``[*B]``; of categorical distributions in chunks of the vocabulary.

    Raises:
        NotImplementedError: no closed form is known: use an estimator, such as k3.

    Examples:
        >>> import torch
        >>> from torch.distributions import Categorical
        >>> from torchrl_lang.transforms.exact_kl import distribution_kl
        >>> p, q = Categorical(torch.tensor([0.5, 0.5])), Categorical(torch.tensor([0.75, 0.25]))
        >>> distribution_kl(p, q)
        tensor(0.1438)
    """
    if isinstance(p, CompositeDistribution) and isinstance(q, CompositeDistribution):
        return sum_heads(
            [distribution_kl(head, q.dists[name], chunk_size=chunk_size) for name, head in p.dists.items()]
        )
    if _is_categorical(p) and _is_categorical(q):
        return categorical_kl(p.logits, q.logits, chunk_size=chunk_size)  # type: ignore[attr-defined]
    return kl_divergence(p, q)


def _is_categorical(dist: Distribution) -> bool:
    return isinstance(dist, (Categorical, TorchOneHotCategorical, OneHotCategorical))


def row_kl(
    policy: RowReference,
    reference: RowReference,
    tensordict: TensorDictBase,
    *,
    forward: bool = False,
    chunk_size: int = 1024,
) -> Tensor:
    """Exact divergence at every token that the agent wrote, given the tokens before it, float ``[*B, T]``.

    Summed over a row it estimates the divergence of the distributions over rows, without bias where the policy wrote
    the row, and with less variance than sampled log-ratios (Rao-Blackwellised: arXiv 2504.10637).

    Lower layers that both models share run once. Where both heads are linear, logits exist only for ``chunk_size``
    tokens of the vocabulary at a time; with filters or values in between, a few decisions' whole logits do. With
    ``forward`` it is ``KL(reference || policy)``.

    Raises:
        ValueError: policy and reference are different kinds of actors.
    """
    batch = DecisionBatch.read(tensordict)
    if batch.empty:
        return batch.zeros()
    p_states, q_states = _states_of_both(policy, reference, batch)
    with torch.no_grad():
        first, second = (policy.scorer, p_states), (reference.scorer, q_states)
        kl = _token_kl(batch, *(second + first if forward else first + second), chunk_size)
        a, b = policy.scorer.certain(batch), reference.scorer.certain(batch)
        if not torch.equal(a, b):
            raise ValueError("Policy and reference must both be UtteranceActors of one length, or language actors.")
        return batch.at_tokens(torch.where(a, 0.0, kl))  # both must end the utterance there


def row_log_probs(policy: RowReference, reference: RowReference, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Log-probability of every token that the agent wrote under both, ``[*B, T]``; shared lower layers run once."""
    batch = DecisionBatch.read(tensordict)
    if batch.empty:
        return batch.zeros(), batch.zeros()
    states = _states_of_both(policy, reference, batch)
    with torch.no_grad():
        p, q = (one.scorer.log_prob(batch, its) for one, its in zip((policy, reference), states, strict=True))
        return batch.at_tokens(p), batch.at_tokens(q)


def _states_of_both(policy: RowReference, reference: RowReference, batch: DecisionBatch) -> tuple[States, States]:
    p, q = policy.scorer, reference.scorer
    mine, its = p.trunk, q.trunk
    if mine is None or its is None or p.has_values or q.has_values or mine.length_groups != its.length_groups:
        with policy.frozen.eval_mode():
            p_states = p.states(batch)
        with reference.frozen.eval_mode():
            return p_states, q.states(batch)
    both = SharedLowerLayers(mine, its, eval_mode=reference.frozen.eval_mode)
    features = None if mine.features is None and its.features is None else batch.features
    with policy.frozen.eval_mode():
        p_read, q_read = both.states(batch.tokens, batch.attention_mask, features)
    return p.named(p_read), q.named(q_read)


def _token_kl(
    batch: DecisionBatch, p: RowScorer, p_states: States, q: RowScorer, q_states: States, chunk_size: int
) -> Tensor:
    """``KL(p || q)`` of the next token at each decision, ``[N]``."""
    a, b = p.linear(), q.linear()
    if a is None or b is None or not torch.equal(a.forbidden, b.forbidden):
        places = [batch.place[part] for part in p.parts(batch, p_states)]
        pairs = ((p.log_softmax(p_states, place), q.log_softmax(q_states, place)) for place in places)
        return torch.cat([categorical_kl(*pair, chunk_size=chunk_size) for pair in pairs])
    return torch.cat(
        [
            projected_kl(
                p_states[a.key].flatten(0, 1)[place],
                a.weight,
                q_states[b.key].flatten(0, 1)[place],
                b.weight,
                bias=a.bias,
                ref_bias=b.bias,
                temperature=a.temperature,
                ref_temperature=b.temperature,
                forbidden=a.forbidden,
                chunk_size=chunk_size,
            )
            for place in batch.place.split(_DECISIONS_AT_ONCE)
        ]
    )
