"""The network of an algorithm-distillation model: embedding of steps, causal blocks with a cache, and heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.nn import functional as F

from torchrl_lang.algorithm_distillation.entries import Continuous, Discrete, Entry
from torchrl_lang.modules.fast_linear import FastLinear

_LOG_STD = (-5.0, 2.0)


class Steps(NamedTuple):
    """Inputs of a model at steps of any batch shape ``[*S]``.

    At the first step of a context, position 0, the previous action and reward are not read: there are none.
    """

    observation: Tensor
    """int64 or float ``[*S, D]``."""
    previous_action: Tensor
    """int64 ``[*S]`` or float ``[*S, A]``."""
    previous_reward: Tensor
    """float ``[*S]``."""
    episode_step: Tensor
    """int64 ``[*S]``."""
    position: Tensor
    """int64, broadcasts to ``[*S]``: number of the step in its context, from 0."""

    @classmethod
    def of_windows(cls, observation: Tensor, action: Tensor, reward: Tensor, episode_step: Tensor) -> Steps:
        """The steps of whole contexts, ``[B, L]``, with the action and the reward of each step itself."""
        position = torch.arange(episode_step.shape[1], device=episode_step.device)
        return cls(observation, action.roll(1, 1), reward.roll(1, 1), episode_step, position)


class StepEmbedding(nn.Module):
    """One vector per step: the sum of embeddings of the observation, previous action and reward, and two clocks.

    The clocks are the number of the step in its episode and in its context. Each component of a discrete observation
    has a table of its own: in a room, rows and columns, so that a cell shares what was learned about its neighbours.
    All tables are rows of one parameter, and all real numbers are read by one linear map; "none", in place of the
    previous action and reward of a context's first step, is a row of its own and a flag beside the reward.
    """

    def __init__(self, observation: Entry, action: Entry, *, context: int, episode_length: int, width: int) -> None:
        super().__init__()
        self.observation, self.action = observation, action
        sizes = [*(observation.sizes if isinstance(observation, Discrete) else ())]
        if isinstance(action, Discrete):
            sizes.append(action.sizes[0] + 1)  # the last row is "none"
        sizes += [episode_length, context]
        self.table = nn.Embedding(sum(sizes), width)
        self._first = [sum(sizes[:column]) for column in range(len(sizes))]
        reals = [entry.size for entry in (observation, action) if isinstance(entry, Continuous)]
        self.reals = nn.Linear(sum(reals) + 2, width, bias=False)
        nn.init.normal_(self.table.weight, std=0.5)

    def forward(self, steps: Steps) -> Tensor:
        """The vectors of steps, ``[*S, W]``."""
        shape = steps.episode_step.shape
        position = steps.position.expand(shape)
        is_first = position == 0
        numbers: list[Tensor] = []
        reals = [steps.previous_reward.masked_fill(is_first, 0)[..., None], is_first[..., None]]
        if isinstance(self.observation, Discrete):
            numbers.extend(steps.observation.unbind(-1))
        else:
            reals.append(steps.observation)
        if isinstance(self.action, Discrete):
            numbers.append(steps.previous_action.masked_fill(is_first, self.action.sizes[0]))
        else:
            reals.append(steps.previous_action.masked_fill(is_first[..., None], 0))
        numbers += [steps.episode_step, position]
        # The tables of the components follow each other.
        index = torch.stack([number + first for number, first in zip(numbers, self._first, strict=True)], -1)
        features = torch.cat([value.to(self.reals.weight.dtype) for value in reals], -1)
        return self.table(index).sum(-2) + self.reals(features)


class KeyValues(NamedTuple):
    """The keys and values of one block for ``N`` contexts of up to ``C`` steps, each ``[N, heads, C, W / heads]``."""

    keys: Tensor
    values: Tensor


class Block(nn.Module):
    """A pre-norm block: causal attention, then a layer of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = FastLinear(width, 3 * width), FastLinear(width, width)
        self.up, self.down = FastLinear(width, 4 * width), FastLinear(4 * width, width)

    def forward(self, hidden: Tensor) -> tuple[Tensor, KeyValues]:
        """Whole contexts, ``[B, L, W]``: the new hidden states, and keys and values."""
        query, key, value = self._qkv(hidden)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self._finish(hidden, seen), KeyValues(key, value)

    def step(self, hidden: Tensor, past: KeyValues, row: Tensor, position: Tensor, visible: Tensor) -> Tensor:
        """One new step of each context, ``[N, 1, W]``; its keys and values are written to ``past``.

        Args:
            hidden: hidden states of the new steps.
            past: keys and values of the block.
            row: int64 ``[N]``: ``arange(N)``.
            position: int64 ``[N]``: the position of each new step.
            visible: bool ``[N, 1, 1, M]``: positions, among the first ``M``, that each new step attends to.
        """
        query, key, value = self._qkv(hidden)
        past.keys[row, :, position], past.values[row, :, position] = key[:, :, 0], value[:, :, 0]
        keys, values = (kept[:, :, : visible.shape[-1]] for kept in past)
        return self._finish(hidden, F.scaled_dot_product_attention(query, keys, values, attn_mask=visible))

    def _qkv(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        split = self.qkv(self.norm_attention(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        return query, key, value

    def _finish(self, hidden: Tensor, seen: Tensor) -> Tensor:
        hidden = hidden + self.projection(seen.transpose(1, 2).flatten(2))
        return hidden + self.down(F.relu(self.up(self.norm_mlp(hidden))))


class ADTrunk(nn.Module):
    """Hidden states of steps, each of which depends on its own and earlier steps only."""

    def __init__(self, embedding: StepEmbedding, *, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.width, self.heads = width, heads

    def forward(self, steps: Steps) -> tuple[Tensor, list[KeyValues]]:
        """Hidden states ``[B, L, W]`` of whole contexts, and the keys and values of each block."""
        hidden, past = self.embedding(steps), []
        for block in self.blocks:
            hidden, kept = block(hidden)
            past.append(kept)
        return self.norm(hidden), past

    def step(self, steps: Steps, past: list[KeyValues]) -> Tensor:
        """Hidden states ``[N, W]`` of the next step of each context, ``[N]``.

        Its keys and values are written to ``past``. The step at position ``p`` attends to positions 0 to ``p``,
        whatever ``past`` holds at later ones.
        """
        row = torch.arange(len(steps.position), device=steps.position.device)
        place = torch.arange(int(steps.position.max()) + 1, device=steps.position.device)
        visible = (place <= steps.position[:, None])[:, None, None]
        hidden = self.embedding(steps)[:, None]
        for block, kept in zip(cast(Iterable[Block], self.blocks), past, strict=True):
            hidden = block.step(hidden, kept, row, steps.position, visible)
        return self.norm(hidden[:, 0])

    def empty_past(self, contexts: int, length: int) -> list[KeyValues]:
        """Zero keys and values for contexts of up to ``length`` steps."""
        shape, weight = (contexts, self.heads, length, self.width // self.heads), self.norm.weight
        return [KeyValues(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in self.blocks]


class ActionHead(nn.Module):
    """The distribution of the action, from the hidden state of its step.

    A discrete action has logits ``[*S, A]``; a continuous one independent normal distributions, whose means and
    logarithms of the standard deviations, limited to [-5, 2], are ``[*S, 2 A]``.
    """

    def __init__(self, width: int, action: Entry) -> None:
        super().__init__()
        self.is_discrete = isinstance(action, Discrete)
        self.out = nn.Linear(width, action.sizes[0] if isinstance(action, Discrete) else 2 * action.size)

    def forward(self, hidden: Tensor) -> Tensor:
        """The parameters of the distribution, of hidden states ``[*S, W]``."""
        return self.out(hidden)

    def distribution(self, parameters: Tensor) -> Distribution:
        """The distribution with these parameters, of batch shape ``[*S]``; unchecked, as a check waits for a GPU."""
        if self.is_discrete:
            return Categorical(logits=parameters, validate_args=False)
        loc, scale = self.loc_and_scale(parameters)
        return Independent(Normal(loc, scale, validate_args=False), 1, validate_args=False)

    def loc_and_scale(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of continuous actions, each ``[*S, A]``."""
        loc, log_std = parameters.chunk(2, -1)
        return loc, log_std.clamp(*_LOG_STD).exp()


class Outcomes(NamedTuple):
    """Predictions of the outcome of an action."""

    reward: Tensor
    """``[*S]``."""
    log_prob: Tensor
    """``[*S]``: log-probability of the action under the source algorithm."""
    observation: Tensor
    """The next observation: ``[*S, D]``, or the logits of its discrete components side by side."""


class OutcomeHead(nn.Module):
    """Reward, log-probability and next observation, from the hidden state of a step and its action.

    One hidden layer, because the outcome of an action depends on both together.
    """

    def __init__(self, width: int, observation: Entry, action: Entry) -> None:
        super().__init__()
        self.action: nn.Module
        if isinstance(action, Discrete):
            self.action = nn.Embedding(action.sizes[0], width)
        else:
            self.action = nn.Linear(action.size, width)
        self.hidden = FastLinear(width, width)
        self.reward_and_log_prob = nn.Linear(width, 2)
        predicted = sum(observation.sizes) if isinstance(observation, Discrete) else observation.size
        self.observation = FastLinear(width, predicted)

    def forward(self, hidden: Tensor, action: Tensor) -> Outcomes:
        """The predictions of hidden states ``[*S, W]`` and actions, int64 ``[*S]`` or float ``[*S, A]``."""
        mixed = F.relu(self.hidden(hidden) + self.action(action))
        reward, log_prob = self.reward_and_log_prob(mixed).unbind(-1)
        return Outcomes(reward, log_prob, self.observation(mixed))
