"""A policy of the language format: a causal language model that continues the text of its own history."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor

from torchrl_lang._checks import Count, NonNegative, checked
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.algorithm_distillation.language.quantizer import Quantizer
from torchrl_lang.algorithm_distillation.language.step_rows import Part, StepTokens, begin_token, moved_left
from torchrl_lang.algorithm_distillation.language.template import StepTemplate
from torchrl_lang.algorithm_distillation.rolling_context import RollingContext, StreamPolicy
from torchrl_lang.functional.precision import upcast_half
from torchrl_lang.modules.actor import LOGITS, split_actor
from torchrl_lang.modules.decoding.model_runner import LanguageModelRunner, cacheable_trunks
from torchrl_lang.modules.decoding.prefix_cache import PrefixCache
from torchrl_lang.modules.decoding.sampling import pick
from torchrl_lang.modules.hugging_face import eval_mode, is_stochastic
from torchrl_lang.modules.trunk import trunk_of
from torchrl_lang.schema import DONE, OBSERVATION, REWARD, TERMINATED, entry
from torchrl_lang.text import Tokenizer


class LanguageHistoryPolicy(StreamPolicy):
    """Acts in ``N`` streams at once: each has a row of the text of what happened, which the model continues.

    The words of an action are sampled among the template's action words alone. When a row is full, its oldest episodes
    leave and the rest is read again, so that positions are those of rows in training. Observations, rewards and ends of
    episodes enter the row when they are known; nothing else is read.

    A template that writes some steps shorter than others, such as ``"sparse"``, needs ``steps``: a row
    of ``context`` tokens alone could hold more episodes than the model has seen.

    With TorchRL's ``set_exploration_type(ExplorationType.DETERMINISTIC)`` actions are the most likely ones.

    Args:
        actor: a language-model actor, see :func:`~torchrl_lang.modules.language_actor`.
        template: how steps are written, without decimals, with action words of one token each.
        tokenizer: encodes the words.
        context: tokens of a row, at most the model's positions and best those of the rows in training. It must be
            larger than the longest episode.
        steps: steps of a row, at most and best those of the windows in training; None for no limit beside ``context``.
        temperature: of the action words; at 0 the most likely ones are taken.
        seed: seed of the sampling; default from the operating system.
        cached: False reads whole rows for each action, with the same actions, but slower.

    Raises:
        ValueError: the template has decimals, an action word is several tokens, or an option is out of range.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.language import LanguageHistoryPolicy, Quantizer, StepTemplate
        >>> from torchrl_lang.algorithm_distillation.language import template_tokenizer
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> moves = Quantizer(range(2), ["west", "east"])
        >>> template = StepTemplate("compact", [Quantizer(range(5))], moves, Quantizer([0, 1]))
        >>> tokenizer = template_tokenizer(template)
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=16)
        >>> policy = LanguageHistoryPolicy(language_actor(lm), template, tokenizer, 16, seed=0)
        >>> policy.begin(streams=3)
        >>> policy.act(torch.tensor([[0], [2], [4]])).shape
        torch.Size([3])
        >>> policy.observe(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([False, False, True]))
        >>> policy.text(2).startswith(" 4 "), policy.text(2).endswith(" 1/")
        (True, True)
    """

    @checked
    def __init__(
        self,
        actor: ProbabilisticTensorDictSequential,
        template: StepTemplate,
        tokenizer: Tokenizer,
        context: Count,
        *,
        steps: Count | None = None,
        temperature: NonNegative = 1.0,
        seed: int | None = None,
        cached: bool = True,
    ) -> None:
        super().__init__()
        steps = context if steps is None else steps
        self.actor, self.template, self.tokenizer = actor, template, tokenizer
        self.context, self.steps = context, min(steps, context)
        self.temperature, self.cached = temperature, cached
        self.stream = RandomStream(seed)
        self._words = StepTokens(template, tokenizer)
        self._longest, self._actions = self._words.longest_step, self._words.action_words()
        self._levels = [slot.quantizer.levels for slot in self._words.slots["action"] if slot.quantizer is not None]
        self._begin_token = begin_token(tokenizer)
        trunk = trunk_of(split_actor(actor).trunk)
        if trunk is not None and trunk.max_length is not None and context > trunk.max_length:
            raise ValueError(f"context={context} exceeds the model's {trunk.max_length} positions.")
        self._cache = PrefixCache()

    def begin(self, streams: int) -> None:
        """Begin ``streams`` empty rows."""
        device, shape = next(self.actor.parameters()).device, (streams, self.steps)
        self._begin(RollingContext({part: self._words.nothing(part, shape, device) for part in self._words.slots}))
        self._cache.clear()

    def _read_prompt(self, context: RollingContext, steps: TensorDictBase) -> None:
        """Where the row is full, the oldest episodes leave; an episode that runs on is truncated."""
        done = entry(steps, DONE).clone()
        done[:, -1] = True
        steps = steps.copy().set(DONE, done)
        for number in range(steps.shape[1]):
            self._make_room(context)
            context.write(**{part: self._words.encode(steps[:, number], part).ids for part in self._words.slots})
            context.close(done[:, number, 0])

    def act(self, observation: Tensor) -> Tensor:
        """Append observations ``[N, D]`` (or ``[N]``) and sample actions, ``[N]`` (or ``[N, A]``), on their device.

        Raises:
            RuntimeError: the outcome of the last actions is missing.
            ValueError: the running episode alone is longer than the context, or a number has no word.
        """
        context = self._after("begin", "prompt", "observe")
        self._make_room(context)
        seen = TensorDict({OBSERVATION: observation}, batch_size=observation.shape[:1])
        context.write(state=self._words.encode(seen, "state").ids)
        numbers = self._decode(context)
        self._last_call = "act"
        pairs = zip(self._levels, numbers, strict=True)
        values = [levels.to(number.device)[number].to(observation.device) for levels, number in pairs]
        return values[0] if isinstance(self.template.action, Quantizer) else torch.stack(values, -1)

    def observe(self, reward: Tensor, done: Tensor, terminated: Tensor | None = None) -> None:
        """Append the outcomes of the last actions.

        Args:
            reward: float32 ``[N]``.
            done: bool ``[N]``.
            terminated: bool ``[N]``, whether the task ended; without it episodes that end were truncated.

        Raises:
            RuntimeError: there was no action.
        """
        context = self._after("act")
        terminated = torch.zeros_like(done) if terminated is None else terminated
        outcome = {REWARD: reward[:, None], DONE: done[:, None], TERMINATED: terminated[:, None]}
        context.write(outcome=self._words.encode(TensorDict(outcome, batch_size=reward.shape), "outcome").ids)
        context.close(done)
        self._last_call = "observe"

    def text(self, stream: int) -> str:
        """The row of a stream as text, without its control token."""
        context = self._after("begin", "prompt", "act", "observe")
        tokens, length = self._row(context, *(("state", "action") if self._last_call == "act" else ()))
        return self.tokenizer.decode(tokens[stream, 1 : int(length[stream])].tolist())

    def _make_room(self, context: RollingContext) -> None:
        """Drop the oldest episodes of rows in which the longest step has no room."""
        place = torch.arange(self.steps + 1, device=context.length.device)
        tokens = sum((context.steps.get(part) >= 0).sum(-1) for part in self._words.slots)
        tokens = torch.where(place[:-1] < context.length[:, None], tokens, 0)
        after = torch.nn.functional.pad(tokens.flip(-1).cumsum(-1).flip(-1), (0, 1))
        fits = (1 + after + self._longest <= self.context) & (context.length[:, None] - place < self.steps)
        context.evict(fits)

    def _row(self, context: RollingContext, *open_parts: Part) -> tuple[Tensor, Tensor]:
        """The tokens of each row, int64 ``[N, context]``, and their number, ``[N]``; of a running step these parts."""
        place, ids = torch.arange(int(context.length.max()) + 1, device=context.length.device)[: self.steps], []
        for part in self._words.slots:
            known = place < context.length[:, None] + (part in open_parts)
            ids.append(torch.where(known[..., None], context.steps.get(part)[:, : len(place)], -1))
        found = torch.cat(ids, -1).flatten(1)
        tokens = moved_left(found, found, self.context, 0)
        tokens[:, 0] = self._begin_token
        return tokens, 1 + (found >= 0).sum(-1)

    def _decode(self, context: RollingContext) -> list[Tensor]:
        """Sample the word of each number of the actions and write it; the words' numbers, int64 ``[N]`` each."""
        parts, (tokens, length) = split_actor(self.actor), self._row(context, "state")
        trunks, transcripts = cacheable_trunks(parts, None) if self.cached else [], None
        if trunks:
            transcripts = self._cache.take(trunks, len(length), self.context, tokens.device)
            transcripts.keep_common_prefix(tokens, length, None)
        runner = LanguageModelRunner(parts, None, size=self.context, cached=self.cached, transcripts=transcripts)
        numbers, ids, longest = list[Tensor](), list[Tensor](), int(length.max())
        with torch.no_grad(), eval_mode(self.actor):
            states = runner.prefill(tokens[:, :longest], length)
            for place, words in enumerate(self._actions):
                if place:
                    states = runner.decode(ids[-1], length + place - 1, longest + place)
                words = words.to(tokens.device)
                numbers.append(self._sample(states[LOGITS], words))
                ids.append(words[numbers[-1]])
        if transcripts is not None:
            self._cache.transcripts = transcripts
        context.write(action=torch.stack(ids, -1))
        return numbers

    def _sample(self, logits: Tensor, words: Tensor) -> Tensor:
        """Numbers of words, int64 ``[N]``, with the probabilities of their tokens ``words`` ``[W]`` alone."""
        own = upcast_half(logits[:, words])
        if not (self.temperature and is_stochastic()):
            return own.argmax(-1)
        uniform = self.stream.uniform((len(logits),), torch.float32).to(logits.device)
        return pick(torch.log_softmax(own / self.temperature, -1), uniform)
