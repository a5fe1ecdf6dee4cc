"""The two formats of learning histories: what to train on them, how it acts, and how it is saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from tensordict import TensorDictBase
from torch import nn
from torchrl.objectives import LossModule
from transformers import PreTrainedModel

from torchrl_lang._files import Fields, FileError
from torchrl_lang.algorithm_distillation import (
    ADLoss,
    ADTransformer,
    HistoryActor,
    load_ad_model,
    save_ad_model,
)
from torchrl_lang.algorithm_distillation.language import LanguageHistoryPolicy, StepRows, template_tokenizer
from torchrl_lang.algorithm_distillation.policies import PromptablePolicy
from torchrl_lang.modules import language_actor
from torchrl_lang.modules.save import read_model, write_model
from torchrl_lang.objectives import BCLoss
from torchrl_lang.recipes.algorithm_distillation.families import TaskFamily
from torchrl_lang.recipes.algorithm_distillation.histories import HistoryOptions
from torchrl_lang.recipes.algorithm_distillation.wording import TemplateName, Wording
from torchrl_lang.recipes.new_model import new_lm
from torchrl_lang.recipes.options import option

__all__ = ["FORMATS", "Format", "FormatName", "FormatOptions", "LanguageFormat", "RLFormat"]

FormatName = Literal["rl", "language"]

_REMEDY = "train again, or copy the folder again"


@dataclass(frozen=True, kw_only=True)
class FormatOptions(HistoryOptions):
    """Options of a format and of its model.

    Raises:
        ValueError: a template is given with the RL format.
    """

    of_language: ClassVar[Mapping[str, Any]] = {"context_episodes": 3}
    """Other defaults of the language format, for the command line. A step is several tokens, and attention to twice as
    many episodes would make a training step three times as slow."""

    format: FormatName = option(
        "rl", "rl: a token for each step and heads for its numbers; language: text and a causal language model"
    )
    template: TemplateName | None = option(None, "how the language format writes a step; none: compact")
    context_episodes: int = option(6, "episodes that a model reads", at_least=1)
    width: int = option(64, "hidden size", at_least=1)
    layers: int = option(3, "transformer blocks", at_least=1)
    heads: int = option(4, "attention heads", at_least=1)
    temperature: float = option(1.0, "of the actions in an evaluation", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format == "rl" and self.template is not None:
            raise ValueError(f"template={self.template} is for text: give --format language, or no template.")

    @classmethod
    def from_given(cls, given: Mapping[str, Any]) -> Self:
        """See :meth:`Options.from_given`; with the language format its defaults where no values are given."""
        return super().from_given({**(cls.of_language if given.get("format") == "language" else {}), **given})

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of a model."""
        return {"width": self.width, "layers": self.layers, "heads": self.heads}


class Format(ABC):
    """A model of histories in one format. Abstract: see :class:`RLFormat` and :class:`LanguageFormat`.

    Attributes:
        model: what is trained.
    """

    model: nn.Module

    @classmethod
    @abstractmethod
    def new(cls, options: FormatOptions, family: TaskFamily) -> Self:
        """A model with random weights for windows of ``context_episodes`` episodes."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path) -> Self:
        """A model that :meth:`save` wrote.

        Raises:
            FileNotFoundError: there is no such model.
            FileError: a file is missing or damaged, or is not what was saved.
        """

    @abstractmethod
    def save(self, folder: Path, trained_on: Mapping[str, Any]) -> None:
        """Write the model, all that it needs to act and a description of its training to a folder, atomically."""

    @abstractmethod
    def loss(self) -> LossModule:
        """What to minimize: the negative log-likelihood of the source's actions."""

    @abstractmethod
    def batch(self, windows: TensorDictBase) -> TensorDictBase:
        """The input of the loss for windows of steps ``[B, L]``."""

    @abstractmethod
    def policy(self, temperature: float) -> PromptablePolicy:
        """A policy that acts with the model; at temperature 0 with the most likely actions."""


class RLFormat(Format):
    """Steps as they are: an :class:`~torchrl_lang.algorithm_distillation.ADTransformer` with a token for each step.

    Args:
        model: the model.

    Examples:
        >>> from torchrl_lang.recipes.algorithm_distillation.formats import FormatOptions, RLFormat
        >>> options = FormatOptions(size=3, width=8, heads=2)
        >>> RLFormat.new(options, options.family()).model.context
        120
    """

    model: ADTransformer

    def __init__(self, model: ADTransformer) -> None:
        self.model = model

    @classmethod
    def new(cls, options: FormatOptions, family: TaskFamily) -> Self:
        """See :class:`Format`."""
        context = options.context_episodes * family.episode_length
        return cls(ADTransformer.for_env(family.env(family.split.train[:1], 1), context=context, **options.sizes))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """See :class:`Format`."""
        return cls(load_ad_model(folder))

    def save(self, folder: Path, trained_on: Mapping[str, Any]) -> None:
        """See :func:`~torchrl_lang.algorithm_distillation.save_ad_model`."""
        save_ad_model(folder, self.model, trained_on=trained_on)

    def loss(self, **weights: Any) -> ADLoss:
        """See :class:`Format`; ``weights`` are options of :class:`~torchrl_lang.algorithm_distillation.ADLoss`."""
        return ADLoss(self.model, **weights)

    def batch(self, windows: TensorDictBase) -> TensorDictBase:
        """The windows."""
        return windows

    def policy(self, temperature: float) -> HistoryActor:
        """See :class:`Format`."""
        return HistoryActor(self.model, temperature=temperature)


class LanguageFormat(Format):
    """Steps as text: a causal language model that is trained on the words of the actions.

    The folder of a saved model is one of :func:`~torchrl_lang.modules.save_language_model`, with the words and the
    length of the context in its manifest.

    Args:
        lm: the language model, of the tokens of ``template_tokenizer``.
        wording: how steps are written.
        context: tokens that the policy reads at most.
        steps: steps that it reads at most.

    Examples:
        >>> from torchrl_lang.recipes.algorithm_distillation.formats import FormatOptions, LanguageFormat
        >>> options = FormatOptions(format="language", size=3, context_episodes=2, width=8, heads=2)
        >>> LanguageFormat.new(options, options.family()).context
        161
    """

    model: PreTrainedModel

    def __init__(self, lm: PreTrainedModel, wording: Wording, context: int, steps: int) -> None:
        self.model, self.wording, self.context, self.steps = lm, wording, context, steps
        self.actor = language_actor(lm)
        template = wording.steps()
        self.rows = StepRows(template, template_tokenizer(template))

    @classmethod
    def new(cls, options: FormatOptions, family: TaskFamily) -> Self:
        """See :class:`Format`. Rows have positions for episodes of any lengths."""
        wording = Wording.of_env(options.template or "compact", family.env(family.split.train[:1], 1))
        tokenizer = template_tokenizer(wording.steps())
        steps = options.context_episodes * family.episode_length
        lm = new_lm(
            vocab_size=tokenizer.vocab_size,
            max_length=wording.tokens(steps, steps),
            pad=tokenizer.control.pad,
            **options.sizes,
        )
        return cls(lm, wording, wording.tokens(steps, options.context_episodes), steps)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """See :class:`Format`."""
        model, record = read_model(folder)
        if record is None or record.history is None:
            raise FileError(folder, "holds no model of histories", _REMEDY)
        history = Fields(record.history, folder / "torchrl_lang.json", _REMEDY, "history")
        wording, context = Wording.from_json(history.object("wording")), history.at_least("context", 1)
        steps = history.at_least("steps", 1)
        tokens, positions = template_tokenizer(wording.steps()).vocab_size, model.lm.config.max_position_embeddings
        if tokens != model.lm.config.vocab_size or context > positions:
            raise history.error(
                f"describes {tokens} words and a context of {context} tokens, but the model has "
                f"{model.lm.config.vocab_size} words and {positions} positions"
            )
        return cls(model.lm, wording, context, steps)

    def save(self, folder: Path, trained_on: Mapping[str, Any]) -> None:
        """See :class:`Format`."""
        sizes = {"context": self.context, "steps": self.steps}
        history = {"wording": asdict(self.wording), **sizes, "trained_on": dict(trained_on)}
        write_model(folder, self.model, tokenizer=self.rows.tokenizer.config(), history=history)

    def loss(self) -> BCLoss:
        """See :class:`Format`."""
        return BCLoss(self.actor, actor_normalizer="action")

    def batch(self, windows: TensorDictBase) -> TensorDictBase:
        """Rows of tokens."""
        return self.rows(windows)

    def policy(self, temperature: float) -> LanguageHistoryPolicy:
        """See :class:`Format`."""
        options: dict[str, Any] = {"temperature": temperature, "steps": self.steps}
        return LanguageHistoryPolicy(self.actor, self.rows.template, self.rows.tokenizer, self.context, **options)


FORMATS: Mapping[FormatName, type[RLFormat] | type[LanguageFormat]] = {"rl": RLFormat, "language": LanguageFormat}
