"""The decoder: generates utterances, on plain tensors."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor, nn

from torchrl_lang._files import shorten
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.modules.actor import ActorParts, split_actor, vocabulary_size
from torchrl_lang.modules.decoding.model_runner import LanguageModelRunner, cacheable_trunks, warn_uncached
from torchrl_lang.modules.decoding.next_token import NextTokenDistribution, StopStrings
from torchrl_lang.modules.decoding.prefix_cache import PrefixCache, Transcripts
from torchrl_lang.modules.decoding.sampling import Prompt, Utterances, beam_search, sample_utterances
from torchrl_lang.modules.features import RowFeatures, reads_features
from torchrl_lang.modules.head_values import STATE_VALUE, check_head
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.modules.sharding import gathered
from torchrl_lang.modules.trunk import Trunk, trunk_of
from torchrl_lang.schema import ControlTokens

Method = Literal["sample", "greedy", "beam", "best_of"]


class Decoder(nn.Module):
    """Generates utterances for rows, on plain tensors.

    :class:`UtteranceActor` wraps it with TorchRL's keys and documents the options, which are attributes here.
    """

    action_length: int
    beams: int
    candidates: int
    advantage_weight: float
    end_value_weight: float
    log_prob_weight: float
    diagnostics: bool
    cached: bool

    def __init__(
        self,
        actor: ProbabilisticTensorDictSequential,
        rule: NextTokenDistribution,
        control: ControlTokens,
        stream: RandomStream,
        *,
        value: nn.Module | None,
        stop: StopStrings | None,
        **options: Any,
    ) -> None:
        super().__init__()
        vars(self).update(options)
        parts, guidance = split_actor(actor), rule.guidance
        vocabulary = vocabulary_size(parts)
        _check_ids(vocabulary, rule, control)
        trunk = parts.trunk if guidance is None or guidance.value_trunk is None else guidance.value_trunk
        for name, head, kind, reads in (
            ("value", value, STATE_VALUE, parts.trunk),
            ("qvalue", getattr(guidance, "qvalue", None), getattr(guidance, "_values", ""), trunk),
            ("value", getattr(guidance, "value", None), STATE_VALUE, trunk),
        ):
            if head is not None:
                check_head(name, head, kind, reads, vocabulary)
        if (self.advantage_weight or self.end_value_weight) and guidance is None:
            raise ValueError("advantage_weight and end_value_weight rank by values: pass guidance=ValueGuidance(…).")
        self.actor, self.rule, self.value = actor, rule, value
        self.control, self.stream, self.stop = control, stream, stop
        if self.cached:
            warn_uncached([parts.trunk, self.value_trunk])

    def generate(
        self,
        tokens: Tensor,
        attention_mask: Tensor,
        *,
        method: Method = "sample",
        done: Tensor | None = None,
        candidates: int = 1,
        features: RowFeatures | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> Utterances:
        """Generate ``N * candidates`` utterances for rows, int64 ``[*B, T]`` flattened to ``N``.

        More than one candidate requires ``"sample"``; the candidates of a row are adjacent. Rows that are ``done``,
        bool ``[*B, 1]``, get an empty utterance. With a ``prefix_cache`` only the new tokens of rows are read. The
        ``features`` of the ``N`` rows are for trunks that read some.
        """
        tokens, length = tokens.reshape(-1, tokens.shape[-1]).long(), attention_mask.sum(-1).reshape(-1)
        n, device = tokens.shape[0], tokens.device
        drawn = {"sample": candidates, "best_of": self.candidates}.get(method, 0)
        # For all rows, done or not, before the first token: a row's numbers do not depend on other rows.
        shape = (n, drawn, self.action_length)
        uniform = self.stream.uniform(shape, torch.float32).to(device) if drawn else None
        active = None if done is None or not bool(done.any()) else ~done.reshape(n)
        empty = Utterances.empty(n * candidates, self.action_length, self.control, device)
        if n == 0 or (active is not None and not bool(active.any())):
            with gathered(self.sharded):  # other processes may have rows
                return empty
        with torch.no_grad(), eval_mode(self):
            transcripts = None if prefix_cache is None else self._cached_rows(prefix_cache, tokens, length, features)
            if transcripts is not None:
                rows = transcripts.move_to_front(active)
            else:
                rows = torch.arange(n, device=device) if active is None else active.nonzero().squeeze(-1)
            own = None if features is None else features.select(rows)
            prompt = self.prompt(tokens[rows], length[rows], own)
            uniform = None if uniform is None else uniform[rows].flatten(0, 1)
            with gathered(self.sharded):
                generated = self._decode(prompt, method, uniform, candidates, transcripts)
        if prefix_cache is not None:
            prefix_cache.transcripts = transcripts
        place = (rows[:, None] * candidates + torch.arange(candidates, device=device)).flatten()
        return empty.place(place, generated)

    def _cached_rows(
        self, prefix_cache: PrefixCache, tokens: Tensor, length: Tensor, features: RowFeatures | None
    ) -> Transcripts | None:
        """The cached part of rows ``[N, T]``; None if a trunk cannot read them incrementally."""
        trunks = cacheable_trunks(self._parts, self.value_trunk) if self.cached else []
        if not trunks:
            return None
        n, width = tokens.shape
        places, limit = 0 if features is None else features.places, self.room(features)
        size = width + self.action_length if limit is None else min(width + self.action_length, limit)
        transcripts = prefix_cache.take(trunks, n, size + places, tokens.device)
        transcripts.keep_common_prefix(tokens, length, features)
        return transcripts

    def _decode(
        self, prompt: Prompt, method: Method, uniform: Tensor | None, candidates: int, transcripts: Transcripts | None
    ) -> Utterances:
        size = prompt.tokens.shape[-1] + self.action_length
        options: Any = {"cached": self.cached, "transcripts": transcripts, "features": prompt.features}
        runner = LanguageModelRunner(self._parts, self.value_trunk, size=size, **options)
        common = (runner, self.rule, prompt, self.control, self.action_length)
        row = torch.arange(prompt.length.shape[0], device=prompt.length.device)
        if method == "beam":
            found, _ = beam_search(*common, beams=self.beams, diagnostics=self.diagnostics)
            return found.select(row * self.beams)
        ranked = method == "best_of"
        candidates = self.candidates if ranked else candidates
        options = {"diagnostics": self.diagnostics, "value": self.value, "stop": self.stop}
        if ranked:
            options |= {"advantage": self.advantage_weight != 0, "end_value": self.end_value_weight != 0}
        drawn = sample_utterances(*common, uniform=uniform, candidates=candidates, **options)
        if not ranked:
            return drawn
        score = self.advantage_weight * drawn.advantage + self.end_value_weight * drawn.end_value
        score = score + self.log_prob_weight * drawn.token_log_prob.sum(-1)
        return drawn.select(row * self.candidates + score.reshape(-1, self.candidates).argmax(-1))

    @property
    def _parts(self) -> ActorParts:
        # Not cached: a copy of this module must not use the original's parts.
        return split_actor(self.actor)

    @property
    def sharded(self) -> list[nn.Module]:
        """The language models of all trunks whose weights are sharded over processes."""
        return [trunk.sharded_root for trunk in self._trunks if trunk.sharded_root is not None]

    @property
    def _trunks(self) -> list[Trunk]:
        """The trunks of Hugging Face models."""
        found = [trunk_of(self._parts.trunk), trunk_of(self.value_trunk)]
        return [trunk for trunk in found if trunk is not None]

    @property
    def reads_features(self) -> bool:
        """Whether a trunk reads the features of rows."""
        return reads_features(self._parts.trunk) or reads_features(self.value_trunk)

    def features(self, reader: str, tensordict: TensorDictBase, batch: torch.Size) -> RowFeatures | None:
        """The features of rows of shape ``batch``; None if no trunk reads them, a KeyError if they are missing."""
        return RowFeatures.read(tensordict, batch, reader) if self.reads_features else None

    def room(self, features: RowFeatures | None) -> int | None:
        """Number of tokens that all models can read after the features of a row; None if unlimited."""
        rooms = [trunk.room(0 if features is None else features.places) for trunk in self._trunks]
        return min((room for room in rooms if room is not None), default=None)

    @property
    def value_trunk(self) -> TensorDictModuleBase | None:
        """The trunk of the values of guidance, if it is not the actor's."""
        return None if self.rule.guidance is None else self.rule.guidance.value_trunk

    def prompt(self, tokens: Tensor, length: Tensor, features: RowFeatures | None) -> Prompt:
        """Rows ``[N, T]`` trimmed to the longest; a ValueError if one is empty or too long for an utterance."""
        shortest, longest = torch.stack([length.amin(), length.amax()]).tolist()  # one synchronization with the device
        if shortest < 1:
            raise ValueError("A row without a token cannot be continued: rows begin with a control token.")
        limit, total = self.room(features), longest + self.action_length
        if limit is not None and total > limit:
            size = min(trunk.max_length for trunk in self._trunks if trunk.max_length is not None) + total - limit
            found = f"{longest} tokens and an action exceed the model's {limit} positions"
            raise ValueError(f"{found}: shorten the dialogue, or build the model with max_length={size} or more.")
        return Prompt(tokens[:, :longest], length, features)


def _check_ids(vocabulary: int | None, rule: NextTokenDistribution, control: ControlTokens) -> None:
    """Raise ValueError unless tokenizer, forbidden ids and model go together."""
    size, forbidden = math.inf if vocabulary is None else vocabulary, set(rule.forbidden.tolist())
    if (rule.vocab_size or 0) > size:
        raise ValueError(f"The tokenizer has {rule.vocab_size} ids, the model only {size}: use fit_vocabulary().")
    beyond = [token for token in {*control.ids(), *forbidden} if not 0 <= token < size]
    allowed = rule.vocab_size or size
    if beyond or control.end_of_action >= allowed or sum(token < allowed for token in forbidden) >= allowed:
        found = f"the vocabulary of {allowed} and leave a token to write, got {shorten(beyond or sorted(forbidden))}"
        raise ValueError(f"Control tokens and forbidden ids must lie in {found}.")
