"""Formats of the learning histories that models read: steps as they are, and steps as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, cast

from pydantic import Field
from tensordict import TensorDictBase
from transformers import PreTrainedModel

from torchrl_lang._files import FileError, Record
from torchrl_lang.algorithm_distillation import ADLoss, ADTransformer, HistoryActor, language
from torchrl_lang.algorithm_distillation.entries import Discrete, entry_of_spec
from torchrl_lang.algorithm_distillation.language import LanguageHistoryPolicy, Quantizer, template_tokenizer
from torchrl_lang.algorithm_distillation.language.step_rows import StepTokens
from torchrl_lang.algorithm_distillation.language.template import TokenKind
from torchrl_lang.algorithm_distillation.model import load_ad_model, save_ad_model
from torchrl_lang.envs.grids import HiddenTaskEnv
from torchrl_lang.envs.grids.rooms import RoomEnv
from torchrl_lang.modules import language_actor
from torchrl_lang.modules.save import read_model, write_model
from torchrl_lang.objectives import BCLoss
from torchrl_lang.recipes.algorithm_distillation.histories import TaskFamily
from torchrl_lang.recipes.algorithm_distillation.options import FormatOptions, TemplateName
from torchrl_lang.recipes.models import new_lm
from torchrl_lang.schema import OBSERVATION

_MOVES = ("stay", "up", "down", "left", "right")

_REMEDY = "train again, or copy the folder again"


class Wording(Record):
    """A template and its words, one for each value of a number; rewards are 0 or 1.

    Rows and columns of a room have words of their own, so that no word means two things.

    Args:
        template: name of the template.
        observation: the words of each number of an observation.
        action: the words of the actions.

    Examples:
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> from torchrl_lang.recipes.algorithm_distillation.formats import Wording
        >>> wording = Wording.of_env("compact", DarkRoomEnv(3))
        >>> wording.observation, wording.tokens(20, 1)
        ((('r0', 'r1', 'r2'), ('c0', 'c1', 'c2')), 81)
    """

    template: TemplateName
    observation: tuple[tuple[str, ...], ...]
    action: tuple[str, ...]

    @classmethod
    def of_env(cls, template: TemplateName, env: HiddenTaskEnv) -> Wording:
        """The words of an environment's family."""
        entry = cast(Discrete, entry_of_spec(env.observation_spec_unbatched[OBSERVATION]))  # of all these families
        is_room = isinstance(env, RoomEnv)
        names = ("r", "c") if is_room else tuple(f"s{number}_" for number in range(len(entry.sizes)))
        observation = tuple(_numbered(name, size) for name, size in zip(names, entry.sizes, strict=True))
        action = _MOVES if is_room else _numbered("arm", env.n_actions)
        return cls(template=template, observation=observation, action=action)

    def steps(self) -> language.StepTemplate:
        """The template with its words."""
        observation = [_quantizer(words) for words in self.observation]
        return language.StepTemplate(self.template, observation, _quantizer(self.action), Quantizer([0, 1]))

    def tokens(self, steps: int, ends: int) -> int:
        """The largest number of tokens of a row of this many steps, of which this many end an episode."""
        template = self.steps()
        longest = StepTokens(template, template_tokenizer(template)).longest_step
        end = sum(slot.kind == TokenKind.END for slot in template.slots)
        return 1 + steps * (longest - end) + ends * end


def _numbered(name: str, count: int) -> tuple[str, ...]:
    return tuple(f"{name}{number}" for number in range(count))


def _quantizer(words: Sequence[str]) -> Quantizer:
    return Quantizer(range(len(words)), words)


class _SavedHistory(Record):
    """The part of a saved language model that it needs to act."""

    wording: Wording
    context: Annotated[int, Field(ge=1)]
    steps: Annotated[int, Field(ge=1)]
    trained_on: dict[str, Any]


class RLFormat:
    """Steps as they are: an :class:`~torchrl_lang.algorithm_distillation.ADTransformer` with a token for each step.

    Args:
        model: the model.

    Examples:
        >>> from torchrl_lang.recipes.algorithm_distillation.formats import FormatOptions, RLFormat, TaskFamily
        >>> options = FormatOptions(size=3, width=8, heads=2)
        >>> RLFormat.new(options, TaskFamily(options)).model.context
        120
    """

    def __init__(self, model: ADTransformer) -> None:
        self.model = model

    @classmethod
    def new(cls, options: FormatOptions, family: TaskFamily) -> Self:
        """A model with random weights for windows of ``context_episodes`` episodes."""
        context = options.context_episodes * family.episode_length
        return cls(ADTransformer.for_env(family.one(), context=context, **options.sizes))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """A model that :meth:`save` wrote."""
        return cls(load_ad_model(folder))

    def save(self, folder: Path, trained_on: Mapping[str, Any]) -> None:
        """Write the model and a description of its training to a folder, atomically."""
        save_ad_model(folder, self.model, trained_on=trained_on)

    def loss(self, **weights: Any) -> ADLoss:
        """The negative log-likelihood of the source's actions; ``weights`` are options of :class:`ADLoss`."""
        return ADLoss(self.model, **weights)

    def batch(self, windows: TensorDictBase) -> TensorDictBase:
        """The input of the loss for windows of steps ``[B, L]``."""
        return windows

    def policy(self, temperature: float) -> HistoryActor:
        """A policy that acts with the model; at temperature 0 with the most likely actions."""
        return HistoryActor(self.model, temperature=temperature)


class LanguageFormat:
    """Steps as text: a causal language model that is trained on the words of the actions.

    The folder of a saved model is one of :func:`~torchrl_lang.modules.save_language_model`, with the words and the
    length of the context in its manifest.

    Args:
        lm: the language model, of the tokens of ``template_tokenizer``.
        wording: how steps are written.
        context: tokens that the policy reads at most.
        steps: steps that it reads at most.

    Examples:
        >>> from torchrl_lang.recipes.algorithm_distillation.formats import FormatOptions, LanguageFormat, TaskFamily
        >>> options = FormatOptions(format="language", size=3, context_episodes=2, width=8, heads=2)
        >>> LanguageFormat.new(options, TaskFamily(options)).context
        161
    """

    def __init__(self, lm: PreTrainedModel, wording: Wording, context: int, steps: int) -> None:
        self.model, self.wording, self.context, self.steps = lm, wording, context, steps
        self.actor = language_actor(lm)
        template = wording.steps()
        self.rows = language.StepRows(template, template_tokenizer(template))

    @classmethod
    def new(cls, options: FormatOptions, family: TaskFamily) -> Self:
        """See :class:`RLFormat`. Rows have positions for episodes of any lengths."""
        wording = Wording.of_env(options.template or "compact", family.one())
        steps = options.context_episodes * family.episode_length
        lm = new_lm(template_tokenizer(wording.steps()), wording.tokens(steps, steps), **options.sizes)
        return cls(lm, wording, wording.tokens(steps, options.context_episodes), steps)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """See :class:`RLFormat`."""
        model, record = read_model(folder)
        if record is None or record.history is None:
            raise FileError(folder, "holds no model of histories", _REMEDY)
        history = _SavedHistory.parse(record.history, folder, remedy=_REMEDY)
        tokens = template_tokenizer(history.wording.steps()).vocab_size
        positions = model.lm.config.max_position_embeddings
        if tokens != model.lm.config.vocab_size or history.context > positions:
            found = f"describes {tokens} words and a context of {history.context} tokens, which are not its model's"
            raise FileError(folder, found, _REMEDY)
        return cls(model.lm, history.wording, history.context, history.steps)

    def save(self, folder: Path, trained_on: Mapping[str, Any]) -> None:
        """See :class:`RLFormat`."""
        saved = _SavedHistory(wording=self.wording, context=self.context, steps=self.steps, trained_on=dict(trained_on))
        write_model(folder, self.model, tokenizer=self.rows.tokenizer.config(), history=saved.model_dump())

    def loss(self) -> BCLoss:
        """See :class:`RLFormat`."""
        return BCLoss(self.actor, actor_normalizer="action")

    def batch(self, windows: TensorDictBase) -> TensorDictBase:
        """Rows of tokens."""
        return self.rows(windows)

    def policy(self, temperature: float) -> LanguageHistoryPolicy:
        """See :class:`RLFormat`."""
        template, tokenizer = self.rows.template, self.rows.tokenizer
        return LanguageHistoryPolicy(
            self.actor, template, tokenizer, self.context, steps=self.steps, temperature=temperature
        )


FORMATS: Mapping[str, type[RLFormat] | type[LanguageFormat]] = {"rl": RLFormat, "language": LanguageFormat}
