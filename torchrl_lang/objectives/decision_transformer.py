"""The decision transformer: imitation of rows, given the return that each of them reached."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import TensorDictBase

from torchrl_lang.functional.decisions import shift_right
from torchrl_lang.functional.returns import return_conditions
from torchrl_lang.modules.returns import conditioned_trunk
from torchrl_lang.objectives.base import ActorNormalizer, LogitsChunk, Policy, TransitionBatch
from torchrl_lang.objectives.bc import BCLoss
from torchrl_lang.schema import TOKENS, refuse


class DecisionTransformerLoss(BCLoss):
    """The decision transformer (DT, arXiv 2106.01345) on rows of tokens.

    ``loss_actor = sum_t w_t * CE(pi(. | x_<=t, R), x_t+1) / n``, the loss of :class:`BCLoss` of a policy that also
    reads the return ``R`` of the row. With the embedding's mode ``"constant"`` the row's first token carries the whole
    return, as in the ILQL paper (arXiv 2206.11871), with ``"decremented"`` the state of each utterance the return to
    go; see ``return_conditions``. One pass of the trunk.

    The return is the undiscounted sum of the rewards that the row holds, also of a truncated row. To play, ask a
    :class:`~torchrl_lang.modules.ReturnConditionedActor` for a return.

    Args:
        actor_network: as of :class:`BCLoss`, over a trunk that reads returns, see
            :func:`~torchrl_lang.modules.condition_on_returns`. The embedding of returns is trained with it.
        transition_weight, actor_normalizer, logits_chunk, reduction: as of :class:`BCLoss`.
        end_of_action: id of the token that ends an utterance, for mode ``"decremented"`` where an environment may write
            nothing between two utterances; default that of an utterance actor.

    The input holds ``tokens``, ``attention_mask``, ``agent_mask`` and ``token_reward``, each ``[*B, T]``, and is left
    as it was. Returns outside the embedding's range raise ValueError. The output holds ``loss_actor``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import ReturnEmbedding, causal_lm, condition_on_returns, language_actor
        >>> from torchrl_lang.objectives import DecisionTransformerLoss
        >>> actor = language_actor(causal_lm(vocab_size=12, layers=1, width=16, heads=2, max_length=8))
        >>> loss = DecisionTransformerLoss(condition_on_returns(actor, ReturnEmbedding(16, low=-1.0, high=3.0)))
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[4, 1, 2, 9]]),
        ...     attention_mask=torch.tensor([[True, True, True, True]]),
        ...     agent_mask=torch.tensor([[False, True, True, False]]),
        ...     token_reward=torch.tensor([[0.0, 0.0, 3.0, 0.0]]),
        ...     batch_size=[1],
        ... )
        >>> loss(rows)["loss_actor"].backward()
        >>> bool(actor[0].module.returns.weight.grad.any())
        True
    """

    _row_entries = ("tokens", "attention_mask", "agent_mask", "token_reward")

    def __init__(
        self,
        actor_network: Policy,
        *,
        transition_weight: float = 0.0,
        actor_normalizer: ActorNormalizer = "all",
        end_of_action: int | None = None,
        logits_chunk: LogitsChunk = "auto",
        reduction: str | None = None,
    ) -> None:
        super().__init__(
            actor_network,
            transition_weight=transition_weight,
            actor_normalizer=actor_normalizer,
            logits_chunk=logits_chunk,
            reduction=reduction,
        )
        conditioned_trunk(type(self).__name__, actor_network)
        decoder = self.scorer.decoder
        known = decoder.control.end_of_action if end_of_action is None and decoder else end_of_action
        self._set_options(end_of_action=known)

    def _find(self, tensordict: TensorDictBase, names: Sequence[str] | None = None) -> TransitionBatch:
        batch = super()._find(tensordict, names)
        trunk, returns = conditioned_trunk(type(self).__name__, self.actor_network)
        row = batch.attention_mask, batch.agent_mask, shift_right(batch.next_reward)
        conditions = return_conditions(*row, returns.mode, tokens=batch.tokens, end_of_action=self.end_of_action)
        mask = batch.decision if batch.mask is None else batch.decision & batch.mask
        outside = conditions.mask & returns.outside(conditions.returns) & mask.any(-1, keepdim=True)
        text = f"a return outside [{returns.low:g}, {returns.high:g}], the range of the ReturnEmbedding, at position"
        rules = [(outside, text + " {position}: train with a wider low and high")]
        # The trunk alone reads them: the labels are the batch's own tokens.
        tokens = returns.condition(refuse(batch.tokens, rules, batch.tokens), conditions, trunk.vocab_size)
        batch.rows.set(self.tensor_keys.tokens, tokens).set(TOKENS, tokens)
        return batch
