"""GEM's environments, reasoning-gym tasks among them, as games of ``TextGameEnv``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchrl_lang.envs.adapters.private_random import PrivateRandom

TERMINAL_STATE = "<\N{FULLWIDTH VERTICAL LINE}TERMINAL_STATE\N{FULLWIDTH VERTICAL LINE}>"
"""GEM's observation for "there is none"."""


def _as_is(text: Any) -> Any:
    return text


class GemGame:
    r"""An environment of GEM (package ``gem-llm``) as a :class:`~torchrl_lang.envs.TextGame`.

    The interface is ``reset(seed) -> (text, info)`` and ``step(text) -> (text, reward, terminated, truncated, info)``.
    ``info["prefix"]`` and ``info["suffix"]`` are written before and after an observation, as GEM's wrappers do, but a
    suffix asks for an action, so the last reply has none. A game that GEM reports as ``terminated`` is not
    ``truncated``, too: its single-turn tasks are both.

    GEM draws from Python's and NumPy's global random streams; every game has streams of its own here. Tasks of
    reasoning-gym draw a question of their dataset by the seed, whatever was played before.

    Args:
        env: the environment, ``gem.make("rg:leg_counting")`` for example; every row of a batch needs one of its own. It
            should not repeat earlier turns: use no wrapper that concatenates observations.
        observe: converts an observation, for example to shorten it.
        act: converts an utterance, for example ``lambda text: f"\\boxed{{{text}}}"`` for a task whose answers must be
            boxed.

    Examples:
        >>> from torchrl_lang.envs import GemGame
        >>> class Double:  # with the interface of gem.Env
        ...     def reset(self, seed=None):
        ...         self.number = seed
        ...         return f"double {seed}", {"suffix": "Answer in a box."}
        ...     def step(self, action):
        ...         right = action == f"\\boxed{{{2 * self.number}}}"
        ...         return "", float(right), True, True, {}
        >>> game = GemGame(Double(), act=lambda text: f"\\boxed{{{text}}}")
        >>> print(game.reset(seed=4))
        double 4
        Answer in a box.
        >>> game.step("8")
        ('', 1.0, True, False, {})
    """

    def __init__(self, env: Any, *, observe: Callable[[Any], str] = _as_is, act: Callable[[str], str] = str) -> None:
        self.env, self.observe, self.act, self._random = env, observe, act, PrivateRandom()

    def reset(self, seed: int) -> str:
        """Begin an episode with this seed; returns the first observation."""
        inner = getattr(self.env, "unwrapped", self.env)
        if hasattr(inner, "ds") and hasattr(inner, "idx"):
            inner.idx = 0  # a reasoning-gym task replaces its dataset after as many resets as it has questions
        self._random.seed(seed)
        with self._random.active():
            observation, info = self.env.reset(seed=seed)
        return self._text(observation, info, over=False)

    def step(self, text: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        """Pass an utterance on as an action."""
        with self._random.active():
            observation, reward, terminated, truncated, info = self.env.step(self.act(text))
        reply = self._text(observation, info, over=terminated or truncated)
        return reply, reward, terminated, truncated and not terminated, info

    def _text(self, observation: Any, info: dict[str, Any], *, over: bool) -> str:
        text = "" if observation == TERMINAL_STATE else self.observe(observation)
        suffix = "" if over else info.get("suffix", "")
        line_end = "\n" if suffix and text and not text.endswith("\n") else ""
        return info.get("prefix", "") + text + line_end + suffix
