"""A policy of the language format: a causal language model that continues the text of its own history."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn

from torchrl_lang._checks import check_given, check_options
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.algorithm_distillation.language.quantizer import Quantizer
from torchrl_lang.algorithm_distillation.language.step_rows import Part, StepTokens, begin_token
from torchrl_lang.algorithm_distillation.language.template import StepTemplate, TokenKind
from torchrl_lang.functional.precision import upcast_half
from torchrl_lang.modules.actor import LOGITS, split_actor
from torchrl_lang.modules.decoding.model_runner import LanguageModelRunner, cacheable_trunks
from torchrl_lang.modules.decoding.prefix_cache import PrefixCache
from torchrl_lang.modules.decoding.sampling import pick
from torchrl_lang.modules.hugging_face import eval_mode, is_stochastic
from torchrl_lang.modules.trunk import trunk_of
from torchrl_lang.schema import DONE, OBSERVATION, REWARD, TERMINATED, entry
from torchrl_lang.text import Tokenizer

__all__ = ["ContextRows", "LanguageHistoryPolicy"]


class LanguageHistoryPolicy(nn.Module):
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
        truncates: how an episode ends of which :meth:`observe` is only given ``done``: truncated, or terminated.

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

    def __init__(
        self,
        actor: ProbabilisticTensorDictSequential,
        template: StepTemplate,
        tokenizer: Tokenizer,
        context: int,
        *,
        steps: int | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        cached: bool = True,
        truncates: bool = True,
    ) -> None:
        super().__init__()
        check_options(temperature=(temperature, "[0, inf)"), context=(context, 1))
        check_given(steps=(steps, 1))
        self.actor, self.template, self.tokenizer, self.context = actor, template, tokenizer, context
        self.steps = steps
        self.temperature, self.cached, self.truncates = temperature, cached, truncates
        self.stream = RandomStream(seed)
        self._words = StepTokens(template, tokenizer)
        self._actions = self._words.words(TokenKind.ACTION)
        quantizers = (slot.quantizer for slot in template.slots if slot.kind == TokenKind.ACTION)
        self._levels = [each.levels for each in quantizers if each is not None]
        self._begin = begin_token(tokenizer)
        trunk = trunk_of(split_actor(actor).trunk)
        if trunk is not None and trunk.max_length is not None and context > trunk.max_length:
            raise ValueError(f"context={context} exceeds the model's {trunk.max_length} positions.")
        self._cache = PrefixCache()
        self._rows: ContextRows | None = None
        self._has_acted = False

    def begin(self, streams: int) -> None:
        """Begin ``streams`` empty rows."""
        device = next(self.actor.parameters()).device
        self._rows = ContextRows(streams, self.context, self._begin, self.steps, device)
        self._has_acted = False
        self._cache.clear()

    def prompt(self, steps: TensorDictBase) -> None:
        """Begin each row with the text of a demonstration, which ends an episode: one that runs on is truncated.

        Where the row is full, the oldest episodes leave.

        Args:
            steps: ``[N, L]``, in the entries of a :class:`~torchrl_lang.algorithm_distillation.LearningHistory`.

        Raises:
            RuntimeError: there is no :meth:`begin`, or the rows have steps already.
            ValueError: there are other streams, an episode is longer than the context, or a number has no word.
        """
        rows = self._begun()
        streams = len(rows.length)
        if self._has_acted or bool((rows.length > 1).any()):
            raise RuntimeError("prompt() must follow begin(): these rows have steps already.")
        if steps.ndim != 2 or steps.shape[0] != streams:
            raise ValueError(f"A prompt of {streams} streams has shape [{streams}, L], got {list(steps.shape)}.")
        if not steps.shape[1]:
            return
        done = entry(steps, DONE).clone()
        done[:, -1] = True
        steps = steps.copy().set(DONE, done)
        for number in range(steps.shape[1]):
            rows.make_room(self._words.longest_step)
            self._append(steps[:, number], "state", "action", "outcome")
            rows.end_step(done[:, number].reshape(streams))

    def act(self, observation: Tensor) -> Tensor:
        """Append observations ``[N, D]`` (or ``[N]``) and sample actions, ``[N]`` (or ``[N, A]``), on their device.

        Raises:
            RuntimeError: the outcome of the last actions is missing.
            ValueError: the running episode alone is longer than the context, or a number has no word.
        """
        rows = self._begun()
        if self._has_acted:
            raise RuntimeError("act() needs the outcome of the last actions: call observe() first.")
        rows.make_room(self._words.longest_step)
        self._append(TensorDict({OBSERVATION: observation}, batch_size=observation.shape[:1]), "state")
        numbers = self._decode(rows)
        self._has_acted = True
        pairs = zip(self._levels, numbers, strict=True)
        values = [levels.to(number.device)[number].to(observation.device) for levels, number in pairs]
        return values[0] if isinstance(self.template.action, Quantizer) else torch.stack(values, -1)

    def observe(self, reward: Tensor, done: Tensor, terminated: Tensor | None = None) -> None:
        """Append the outcomes of the last actions.

        Args:
            reward: float32 ``[N]``.
            done: bool ``[N]``.
            terminated: bool ``[N]``, whether the task ended, if that is known. See ``truncates``.

        Raises:
            RuntimeError: there was no action.
        """
        rows = self._begun()
        if not self._has_acted:
            raise RuntimeError("observe() needs the actions that were observed: call act() first.")
        if terminated is None:
            terminated = torch.zeros_like(done) if self.truncates else done
        outcome = {REWARD: reward[:, None], DONE: done[:, None], TERMINATED: terminated[:, None]}
        self._append(TensorDict(outcome, batch_size=reward.shape), "outcome")
        rows.end_step(done)
        self._has_acted = False

    def text(self, stream: int) -> str:
        """The row of a stream as text, without its control token."""
        rows = self._begun()
        return self.tokenizer.decode(rows.tokens[stream, 1 : int(rows.length[stream])].tolist())

    def _begun(self) -> ContextRows:
        if self._rows is None:
            raise RuntimeError("The policy has no streams: call begin(streams) first.")
        return self._rows

    def _append(self, steps: TensorDictBase, *parts: Part) -> None:
        rows = self._begun()
        ids, kept, _ = self._words.encode(steps, *parts)
        rows.append(ids.to(rows.tokens.device), kept.to(rows.tokens.device))

    def _decode(self, rows: ContextRows) -> list[Tensor]:
        """Sample the word of each number of the actions and append it; the words' numbers, int64 ``[N]`` each."""
        parts = split_actor(self.actor)
        trunks = cacheable_trunks(parts, None) if self.cached else []
        transcripts = None
        if trunks:
            transcripts = self._cache.take(trunks, len(rows.length), rows.size, rows.tokens.device)
            transcripts.keep_common_prefix(rows.tokens, rows.length, None)
        runner = LanguageModelRunner(parts, None, size=rows.size, cached=self.cached, transcripts=transcripts)
        numbers, longest = list[Tensor](), int(rows.length.max())
        with torch.no_grad(), eval_mode(self.actor):
            states = runner.prefill(rows.tokens[:, :longest], rows.length)
            for place, words in enumerate(self._actions):
                words = words.to(rows.tokens.device)
                number = self._sample(states[LOGITS], words)
                rows.append(words[number][:, None])
                numbers.append(number)
                if place + 1 < len(self._actions):
                    states = runner.decode(words[number], rows.length - 1, longest + place + 1)
        if transcripts is not None:
            self._cache.put(transcripts)
        return numbers

    def _sample(self, logits: Tensor, words: Tensor) -> Tensor:
        """Numbers of words, int64 ``[N]``, with the probabilities of their tokens ``words`` ``[W]`` alone."""
        own = upcast_half(logits[:, words])
        if not (self.temperature and is_stochastic()):
            return own.argmax(-1)
        uniform = self.stream.uniform((len(logits),), torch.float32).to(logits.device)
        return pick(torch.log_softmax(own / self.temperature, -1), uniform)


class ContextRows:
    """Rows of at most ``size`` tokens and ``steps`` steps, at whose front whole episodes leave.

    The first token of a row is the control token ``begin``, which stays: a row always looks as one of
    :class:`~torchrl_lang.algorithm_distillation.language.StepRows` does that begins with an episode.

    Args:
        streams: ``N``.
        size: number of tokens of a row.
        begin: the first token.
        steps: number of steps of a row, at most; None for no limit.
        device: device of the tokens.

    Attributes:
        tokens: int64 ``[N, size]``.
        length: int64 ``[N]``.
        episode, step: int64 ``[N]``, the numbers of the running episode and step, to which tokens are appended.
    """

    def __init__(
        self, streams: int, size: int, begin: int, steps: int | None = None, device: torch.device | None = None
    ) -> None:
        self.size, self.steps = size, steps
        self.tokens = torch.zeros(streams, size, dtype=torch.int64, device=device)
        self.tokens[:, 0] = begin
        self.length = torch.ones(streams, dtype=torch.int64, device=device)
        self.episode, self.step = torch.zeros_like(self.length), torch.zeros_like(self.length)
        self._episode_of, self._step_of = torch.zeros_like(self.tokens), torch.zeros_like(self.tokens)

    def append(self, ids: Tensor, kept: Tensor | None = None) -> None:
        """Append tokens ``[N, W]``, only those that are ``kept`` ``[N, W]``."""
        kept = torch.ones_like(ids, dtype=torch.bool) if kept is None else kept
        place = self.length[:, None] + kept.cumsum(-1) - 1
        stream = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)[kept]
        self.tokens[stream, place[kept]] = ids[kept]
        self._episode_of[stream, place[kept]] = self.episode[stream]
        self._step_of[stream, place[kept]] = self.step[stream]
        self.length = self.length + kept.sum(-1)

    def end_step(self, done: Tensor) -> None:
        """Begin the next step, of a new episode where ``done`` ``[N]``."""
        self.step = self.step + 1
        self.episode = self.episode + done.to(self.episode.device)

    def make_room(self, tokens: int) -> None:
        """Evict the oldest episodes of each row in which a step of this many tokens does not fit, as few as are needed.

        Raises:
            ValueError: the running episode alone has no room.
        """
        leaving = self.length + tokens - self.size
        if self.steps is not None:
            written = torch.arange(self.size, device=self.tokens.device) < self.length[:, None]
            written[:, 0] = False  # the first token is of no step
            old = self._step_of <= (self.step - self.steps)[:, None]
            leaving = torch.maximum(leaving, (written & old).sum(-1))
        for stream in (leaving > 0).nonzero().squeeze(-1).tolist():
            length, last = int(self.length[stream]), int(leaving[stream])
            owner = self._episode_of[stream, 1:length]
            if last > len(owner) or owner[last - 1] == self.episode[stream]:
                limit = "" if self.steps is None else f" and {self.steps} steps"
                room = f"{tokens} more tokens in a context of {self.size} tokens{limit}: make it longer"
                raise ValueError(f"The running episode of stream {stream} has no room for {room}.")
            left = int((owner > owner[last - 1]).sum())
            for values in (self.tokens, self._episode_of, self._step_of):
                values[stream, 1 : 1 + left] = values[stream, length - left : length].clone()
            self.length[stream] = 1 + left
