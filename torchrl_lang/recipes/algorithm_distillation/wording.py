"""The words in which the language format writes the histories of a family of tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from torchrl_lang._checks import one_of
from torchrl_lang._files import Fields
from torchrl_lang.algorithm_distillation.entries import Discrete, entry_of_spec
from torchrl_lang.algorithm_distillation.language import Levels, StepTemplate, TokenKind, template_tokenizer
from torchrl_lang.algorithm_distillation.language.step_tokens import StepTokens
from torchrl_lang.envs.grids import HiddenTaskEnv, RoomEnv
from torchrl_lang.schema import OBSERVATION

__all__ = ["TemplateName", "Wording"]

TemplateName = Literal["compact", "spelled", "sparse"]
"""A template of :class:`~torchrl_lang.algorithm_distillation.language.StepTemplate`."""

_MOVES = ("stay", "up", "down", "left", "right")


@dataclass(frozen=True)
class Wording:
    """A template and its words, one for each value of a number; rewards are 0 or 1.

    Rows and columns of a room have words of their own, so that no word means two things.

    Args:
        template: name of the template.
        observation: the words of each number of an observation.
        action: the words of the actions.

    Examples:
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> from torchrl_lang.recipes.algorithm_distillation.wording import Wording
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
        entry = entry_of_spec(env.observation_spec_unbatched[OBSERVATION])
        assert isinstance(entry, Discrete)  # of all these families
        is_room = isinstance(env, RoomEnv)
        names = ("r", "c") if is_room else tuple(f"s{number}_" for number in range(len(entry.sizes)))
        observation = tuple(_numbered(name, size) for name, size in zip(names, entry.sizes, strict=True))
        return cls(template, observation, _MOVES if is_room else _numbered("arm", env.n_actions))

    @classmethod
    def from_json(cls, content: Fields) -> Wording:
        """The wording that ``dataclasses.asdict`` described; raises FileError if it describes none."""
        observation = content.list_of("observation", list)
        try:
            name = content.take("template", str)
            found = cls(cast(TemplateName, name), tuple(map(tuple, observation)), tuple(content.list_of("action", str)))
            found.steps()
        except (ValueError, TypeError, AttributeError) as error:
            raise content.error(f'describes no template as "{content.name}" ({error})') from error
        return found

    def steps(self) -> StepTemplate:
        """The template with its words."""
        makers: Mapping[str, Callable[..., StepTemplate]] = {
            "compact": StepTemplate.compact,
            "spelled": StepTemplate.spelled,
            "sparse": StepTemplate.sparse,
        }
        one_of("template", self.template, tuple(makers))
        return makers[self.template](
            [_levels(words) for words in self.observation], _levels(self.action), Levels([0, 1])
        )

    def tokens(self, steps: int, ends: int) -> int:
        """The largest number of tokens of a row of this many steps, of which this many end an episode."""
        template = self.steps()
        longest = StepTokens(template, template_tokenizer(template)).longest_step
        end = sum(slot.kind == TokenKind.END for slot in template.slots)
        return 1 + steps * (longest - end) + ends * end


def _numbered(name: str, count: int) -> tuple[str, ...]:
    return tuple(f"{name}{number}" for number in range(count))


def _levels(words: Sequence[str]) -> Levels:
    return Levels(range(len(words)), words)
