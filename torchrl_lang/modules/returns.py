"""Policies that are asked for a return: the embedding of returns and the actor that reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor, nn

from torchrl_lang._checks import Count, Finite, check_options, checked, have_shapes
from torchrl_lang.functional.returns import ReturnConditions, ReturnMode, return_conditions
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor, UtteranceDistribution
from torchrl_lang.modules.row_scoring import RowScorer
from torchrl_lang.modules.trunk import Trunk
from torchrl_lang.schema import ACTION, ROW_KEYS, TARGET_RETURN, TOKENS, entry


class ReturnEmbedding(nn.Module):
    """Adds ``w * x + b`` to the embedding of a token, ``x`` in ``[-1, 1]`` the scaled return that the token carries.

    This is the decision transformer's linear embedding of a return (arXiv 2106.01345), without a position of its own:
    a row keeps its length, and a cache of keys and values works as without returns. It begins at zero, so that a
    pretrained model starts unchanged.

    A token carries a return in its id: ``id + V * (i + 1)`` for a model with ``V`` embeddings, where ``i`` numbers
    ``n_bins`` equally spaced returns from ``low`` to ``high``. A return is rounded to the nearest of them, at most
    ``(high - low) / (n_bins - 1) / 2`` away. Ids below ``V`` carry none and are embedded as before.

    Args:
        width: ``H``, the width of the model's embeddings.
        low: the lowest return of the data; in mode ``"decremented"`` the lowest return to go.
        high: the highest one. A wider range than the data's allows targets beyond them, by linear extrapolation.
        mode: which return the rows carry and where: ``"constant"`` or ``"decremented"``, see
            ``return_conditions``. Training and play use the same.
        target: the return that a policy asks for by default; default ``high``.
        n_bins: number of different returns.

    Raises:
        ValueError: ``low`` lies above ``high``, ``target`` outside them, a number is not finite, or ``mode`` is
            unknown.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.returns import ReturnConditions
        >>> from torchrl_lang.modules import ReturnEmbedding
        >>> returns = ReturnEmbedding(8, low=-10.0, high=0.0, n_bins=11)
        >>> tokens, mask = torch.tensor([[4, 6]]), torch.tensor([[True, False]])
        >>> conditions = ReturnConditions(torch.full((1, 2), -7.8), mask)
        >>> returns.condition(tokens, conditions, vocab_size=100)  # -7.8 is rounded to return 2 of 0 to 10
        tensor([[304,   6]])
    """

    @checked
    def __init__(
        self,
        width: Count,
        low: float,
        high: Finite,
        *,
        mode: ReturnMode = "constant",
        target: Finite | None = None,
        n_bins: Annotated[int, 2] = 1001,
    ) -> None:
        super().__init__()
        target = high if target is None else target
        check_options(low=(low, f"(-inf, {high}]"))
        self.low, self.high, self.mode, self.target, self.n_bins = low, high, mode, target, n_bins
        self.check(torch.tensor(target, dtype=torch.float64, device="cpu"), "target")  # also under the meta device
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(width))

    @property
    def width(self) -> int:
        """``H``, the width of an embedding."""
        return self.weight.shape[0]

    def config(self) -> dict[str, Any]:
        """Arguments that build an embedding of the same shape, range and mode."""
        return {name: getattr(self, name) for name in ("width", "low", "high", "mode", "target", "n_bins")}

    def check(self, returns: Tensor, name: str) -> None:
        """Raise ValueError unless all returns, any shape, lie in the range, up to the rounding to a bin."""
        if bool((outside := self.outside(returns)).any()):
            found = f"the range of the ReturnEmbedding, got {float(returns[outside][0]):g}: give another one"
            raise ValueError(f"{name} must lie in [{self.low:g}, {self.high:g}], {found}.")

    def outside(self, returns: Tensor) -> Tensor:
        """True where a return is not in the range, up to the rounding to a bin."""
        rounding = max((self.high - self.low) / (self.n_bins - 1) / 2, 1e-6 * max(abs(self.low), abs(self.high)))
        return ~((returns >= self.low - rounding) & (returns <= self.high + rounding))

    def condition(self, tokens: Tensor, conditions: ReturnConditions, vocab_size: int) -> Tensor:
        """The ids of ``tokens``, int ``[*B, T]``, with the returns that they carry, int64 ``[*B, T]``.

        A return outside the range is replaced by its nearest end, as a return to go may become after a target that
        was too low or too high.

        Args:
            tokens: ids below ``vocab_size``.
            conditions: the returns and which tokens carry them.
            vocab_size: ``V``, the number of the model's embeddings.
        """
        span = self.high - self.low
        share = (conditions.returns - self.low) / span if span else torch.zeros_like(conditions.returns)
        number = (share.clamp(0, 1) * (self.n_bins - 1)).round().long()
        return tokens.long() + torch.where(conditions.mask, vocab_size * (number + 1), 0)

    def embed(self, ids: Tensor, embedding: Callable[[Tensor], Tensor], vocab_size: int) -> Tensor:
        """Embeddings of tokens and of the returns that they carry, int64 ``[*B, T] -> [*B, T, H]``.

        Args:
            ids: from :meth:`condition`.
            embedding: the model's, of ids below ``vocab_size``.
            vocab_size: ``V``.
        """
        embedded = embedding(ids.remainder(vocab_size))
        return embedded + self(ids.div(vocab_size, rounding_mode="floor")).to(embedded.dtype)

    def forward(self, number: Tensor) -> Tensor:
        """The embedding of a return, int64 ``[*B] -> [*B, H]``: zero for number 0, else of return ``number - 1``."""
        carried = (number > 0).unsqueeze(-1).to(self.weight.dtype)
        scaled = (number - 1).unsqueeze(-1).to(self.weight.dtype) * (2 / (self.n_bins - 1)) - 1
        # Not a matrix product: autocast would round the return to 8 bits.
        return carried * (scaled * self.weight + self.bias)


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
        ValueError: the actor has no such trunk.

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
    trunk.returns = None if returns is None else returns.to(trunk.model.get_input_embeddings().weight.device)
    return actor


def conditioned_trunk(reader: str, actor: nn.Module) -> tuple[Trunk, ReturnEmbedding]:
    """The trunk of an actor and its embedding of returns; a ValueError in the name of ``reader`` if it has none."""
    trunk = RowScorer(actor).trunk
    if trunk is None or trunk.returns is None:
        raise ValueError(f"{reader} needs an actor that reads returns, see condition_on_returns().")
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
        self.actor, self.target_return = actor, returns.target if target_return is None else target_return
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
        tokens, attention, agent_mask, token_reward = (entry(tensordict, key) for key in ROW_KEYS)
        target = tensordict.get(TARGET_RETURN, None)
        shape = (*tokens.shape[:-1], 1)
        if target is None:
            target = torch.full(shape, self.target_return, dtype=torch.float64, device=tokens.device)
        else:
            have_shapes((TARGET_RETURN, target, shape))
            returns.check(target, TARGET_RETURN)
        options = {"target": target, "tokens": tokens, "end_of_action": self.actor.decoder.control.end_of_action}
        conditions = return_conditions(attention, agent_mask, token_reward, returns.mode, continued=True, **options)
        return tensordict.copy().set(TOKENS, returns.condition(tokens, conditions, trunk.vocab_size))

    def get_dist(self, tensordict: TensorDictBase, *_: Any, **__: Any) -> UtteranceDistribution:
        """The distribution over utterances at each row, with ``log_prob(action)`` ``[*B]``."""
        return self.actor.get_dist(self.conditioned(tensordict))

    def log_prob(self, tensordict: TensorDictBase) -> Tensor:
        """Log-probability of the ``action`` in the tensordict, ``[*B]``, with gradients."""
        return self.get_dist(tensordict).log_prob(entry(tensordict, ACTION))
