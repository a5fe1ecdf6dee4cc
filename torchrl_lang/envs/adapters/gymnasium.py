"""Gymnasium environments with text observations and actions as games of ``TextGameEnv`` (extra ``gym``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchrl_lang._files import shorten

if TYPE_CHECKING:
    import gymnasium


class GymnasiumGame:
    """A Gymnasium environment as a :class:`~torchrl_lang.envs.TextGame`; one object plays one game at a time.

    Observations and actions are texts (``gymnasium.spaces.Text``). For other spaces pass functions, or use Gymnasium's
    own wrappers. A text that the action space does not contain is not passed on: the game replies with
    ``invalid_reply`` and the reward ``invalid_reward``, and the environment does not step.

    Args:
        env: the environment; every row of a batch needs one of its own.
        observe: converts an observation to text; by default it must be a text.
        act: converts an utterance to an action, or raises ``ValueError`` if it is none; by default the text itself.
        invalid_reply: reply to an utterance that is no action.
        invalid_reward: reward of such an utterance.

    Raises:
        TypeError: a space is not ``Text`` and there is no function for it.

    Examples:
        >>> import gymnasium
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.envs import GymnasiumGame, TextGameEnv
        >>> class Echo(gymnasium.Env):
        ...     observation_space = action_space = gymnasium.spaces.Text(8, charset="ab")
        ...     def reset(self, *, seed=None, options=None):
        ...         super().reset(seed=seed)
        ...         return "ab", {}
        ...     def step(self, action):
        ...         return action, float(len(action)), action == "a", False, {}
        >>> tokenizer = CharTokenizer.from_alphabet("abcno? ")
        >>> env = TextGameEnv(lambda: GymnasiumGame(Echo()), tokenizer, row_length=32, action_length=4)
        >>> env.tokenizer.decode(env.reset()["tokens"][0, :4])
        '<s>ab</s>'
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        *,
        observe: Callable[[Any], str] | None = None,
        act: Callable[[str], Any] | None = None,
        invalid_reply: str = "That is not a valid action.",
        invalid_reward: float = 0.0,
    ) -> None:
        from gymnasium.spaces import Text

        spaces = {"observe": (env.observation_space, observe), "act": (env.action_space, act)}
        for argument, (space, function) in spaces.items():
            if function is None and not isinstance(space, Text):
                raise TypeError(f"{env} has the space {shorten(space)}, expected Text: convert it by {argument}=.")
        self.env, self.observe, self.act = env, observe or (lambda text: text), act or str
        self.invalid = invalid_reply, invalid_reward, False, False, dict[str, Any]()

    def reset(self, seed: int) -> str:
        """Begin an episode with this seed; returns the first observation as text."""
        return self.observe(self.env.reset(seed=seed)[0])

    def step(self, text: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        """Pass an utterance on as an action."""
        try:
            action = self.act(text)
        except ValueError:
            return self.invalid
        if not self.env.action_space.contains(action):
            return self.invalid
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self.observe(observation), reward, terminated, truncated, info
