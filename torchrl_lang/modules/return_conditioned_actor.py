"""A policy that is asked for a return, and how a language model is given the embedding of returns."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor, nn

from torchrl_lang._checks import have_shapes
from torchrl_lang.functional import return_conditions
from torchrl_lang.modules.decoding.distribution import UtteranceDistribution
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.return_embedding import ReturnEmbedding
from torchrl_lang.modules.row_scoring import RowScorer
from torchrl_lang.modules.trunk import Trunk
from torchrl_lang.schema import ACTION, ROW_KEYS, TARGET_RETURN, TOKENS, entry

__all__ = ["ReturnConditionedActor", "condition_on_returns", "conditioned_trunk"]

Actor = TypeVar("Actor", bound=nn.Module)


def condition_on_returns(actor: Actor, returns: ReturnEmbedding | None) -> Actor:
    """Let the trunk of an actor read returns, in place; the language model itself does not change.

    The embedding becomes a part of the trunk, so losses train it and the decoding cache notices when it changes.
    :func:`~torchrl_lang.modules.save_language_model` writes the language model as without it: pass the embedding as the
    head ``returns``, and attach it again after loading, ``condition_on_returns(language_actor(saved.lm),
    saved.heads["returns"])``.

    Args:
        actor: a language actor or an :class:`~torchrl_lang.modules.UtteranceActor` over a
            :class:`~torchrl_lang.modules.Trunk`.
        returns: moved to the model's device; None removes an embedding.

    Returns:
        The actor.

    Raises:
        ValueError: the actor has no such trunk, or the embedding has another width.

    Examples:
        >>> from torchrl_lang.modules import ReturnEmbedding, causal_lm, condition_on_returns, language_actor
        >>> lm = causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)
        >>> actor = condition_on_returns(language_actor(lm), ReturnEmbedding(8, low=-5.0, high=0.0))
        >>> actor[0].module.returns.mode
        'constant'
    """
    trunk = RowScorer(actor).trunk
    if trunk is None:
        raise ValueError("Only the Trunk of a Hugging Face model reads returns: build the actor with language_actor().")
    weight = trunk.model.get_input_embeddings().weight
    if returns is not None and returns.width != weight.shape[1]:
        raise ValueError(
            f"The ReturnEmbedding has width {returns.width}, but the model's embeddings have {weight.shape[1]}."
        )
    trunk.returns = None if returns is None else returns.to(weight.device)
    return actor


def conditioned_trunk(reader: str, actor: nn.Module) -> tuple[Trunk, ReturnEmbedding]:
    """The trunk of an actor and its embedding of returns; a ValueError in the name of ``reader`` if it has none."""
    trunk = RowScorer(actor).trunk
    if trunk is None or trunk.returns is None:
        raise ValueError(
            f"{reader} needs an actor that reads returns: condition_on_returns(actor, ReturnEmbedding(width, low, "
            "high)), or the head 'returns' of a saved model."
        )
    return trunk, trunk.returns


class ReturnConditionedActor(TensorDictModuleBase):
    """Asks an utterance actor for a return: the policy of a decision transformer (arXiv 2106.01345).

    Reads the entries of a row and, if there is one, ``target_return`` ``[*B, 1]``; writes what the utterance actor
    writes. The rows' tokens stay as they are: the utterance actor reads a copy in which the first token carries the
    target, or with mode ``"decremented"`` the state of each utterance the target minus the rewards until then. These do
    not change from turn to turn, so ``prefix_cache`` works as without returns.

    A return to go that leaves the embedding's range during a game is replaced by its nearest end.

    Args:
        actor: over a trunk that reads returns, see :func:`condition_on_returns`.
        target_return: the undiscounted return of a whole game to ask for; default the embedding's ``target``. An entry
            ``target_return`` of the rows, which must stay the same during a game, replaces it.

    Raises:
        ValueError: the actor reads no returns; a target lies outside the range of the embedding.

    Examples:
        >>> from torchrl_lang.envs.games import CorridorEnv
        >>> from torchrl_lang.modules import (
        ...     ReturnConditionedActor, ReturnEmbedding, UtteranceActor, causal_lm, condition_on_returns, language_actor
        ... )
        >>> env = CorridorEnv(length=3, batch_size=[2], seed=0)
        >>> lm = causal_lm(vocab_size=env.tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=48)
        >>> actor = condition_on_returns(language_actor(lm), ReturnEmbedding(8, low=-8.0, high=0.0))
        >>> policy = ReturnConditionedActor(UtteranceActor(actor, env.tokenizer.control, 2, seed=0), -1.0)
        >>> env.rollout(2, policy)["action"].shape
        torch.Size([2, 2, 2])
        >>> ReturnConditionedActor(policy.actor, 5.0)
        Traceback (most recent call last):
            ...
        ValueError: target_return must lie in [-8, 0], the range of the ReturnEmbedding, got 5: give another ...
    """

    def __init__(self, actor: UtteranceActor, target_return: float | None = None) -> None:
        super().__init__()
        _, returns = conditioned_trunk(type(self).__name__, actor)
        self.actor = actor
        self.target_return = returns.target if target_return is None else target_return
        returns.check(torch.tensor(self.target_return, dtype=torch.float64), TARGET_RETURN)
        self.in_keys = list(dict.fromkeys([*ROW_KEYS, *actor.in_keys]))
        self.out_keys = list(actor.out_keys)

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write an utterance for every row into ``tensordict``."""
        written = self.actor(self.conditioned(tensordict))
        return tensordict.update({key: written.get(key) for key in self.out_keys})

    def conditioned(self, tensordict: TensorDictBase) -> TensorDictBase:
        """A shallow copy of unfinished rows whose ``tokens`` carry the returns that the agent is asked for."""
        trunk, returns = conditioned_trunk(type(self).__name__, self.actor)
        tokens, attention_mask, agent_mask, token_reward = (entry(tensordict, key) for key in ROW_KEYS)
        target = tensordict.get(TARGET_RETURN, None)
        shape = (*tokens.shape[:-1], 1)
        if target is None:
            target = torch.full(shape, self.target_return, dtype=torch.float64, device=tokens.device)
        else:
            have_shapes((TARGET_RETURN, target, shape))
            returns.check(target, TARGET_RETURN)
        conditions = return_conditions(
            attention_mask,
            agent_mask,
            token_reward,
            returns.mode,
            target=target,
            tokens=tokens,
            end_of_action=self.actor.decoder.control.end_of_action,
            continued=True,
        )
        return tensordict.copy().set(TOKENS, returns.condition(tokens, conditions, trunk.vocab_size))

    def get_dist(self, tensordict: TensorDictBase, *_: Any, **__: Any) -> UtteranceDistribution:
        """The distribution over utterances at each row, with ``log_prob(action)`` ``[*B]``."""
        return self.actor.get_dist(self.conditioned(tensordict))

    def log_prob(self, tensordict: TensorDictBase) -> Tensor:
        """Log-probability of the ``action`` in the tensordict, ``[*B]``, with gradients."""
        return self.get_dist(tensordict).log_prob(entry(tensordict, ACTION))
