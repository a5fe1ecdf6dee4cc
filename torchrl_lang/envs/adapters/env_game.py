"""One row of a language environment as a plain-Python text game."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchrl_lang.envs.language_env import LanguageEnv
from torchrl_lang.text.chat_tokenizer import padded_action
from torchrl_lang.text.rows import from_row


class EnvGame:
    """A :class:`~torchrl_lang.envs.LanguageEnv` as a :class:`~torchrl_lang.envs.TextGame`: strings in, strings out.

    Use it where games are expected: beside tools (:class:`~torchrl_lang.envs.ToolGame`), in TRL
    (:func:`~torchrl_lang.envs.trl_environment`), or to play by hand.

    Args:
        env: the environment, with one row.
        observe: converts the opening and the replies, for example to spell colours out.
        invalid_reply, invalid_reward: result of an utterance that the environment's tokenizer cannot encode or that is
            longer than an action; the environment does not step.

    Raises:
        ValueError: ``env`` is no language environment of one row.

    Examples:
        >>> from torchrl_lang.envs import EnvGame, WordleEnv
        >>> game = EnvGame(WordleEnv(["crane", "slate"], batch_size=[1]))
        >>> game.reset(seed=0)
        ''
        >>> game.step("crane")
        ('<g><g><g><g><g>', 0.0, True, False, {})
    """

    def __init__(
        self,
        env: LanguageEnv,
        *,
        observe: Callable[[str], str] = str,
        invalid_reply: str = "That is not a valid action.",
        invalid_reward: float = 0.0,
    ) -> None:
        if not isinstance(env, LanguageEnv) or env.batch_size.numel() != 1:
            raise ValueError(f"EnvGame plays a LanguageEnv of one row, got {type(env).__name__}{list(env.batch_size)}.")
        self.env, self.observe = env, observe
        self.invalid = invalid_reply, invalid_reward, False, False, dict[str, Any]()

    def reset(self, seed: int) -> str:
        """Begin the first episode of an environment with this seed."""
        self.env._set_seed(seed)  # set_seed would change PyTorch's global stream, too
        self._td = self.env.reset()
        return self._last_text()

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take an utterance as the action."""
        try:
            ids = padded_action(self.env.tokenizer, text, self.env.action_length)
        except (ValueError, LookupError):
            return self.invalid
        if ids is None:
            return self.invalid
        action = torch.tensor(ids, device=self.env.device)
        self._td = self.env.step(self._td.set("action", action.reshape(self.env.action_spec.shape)))["next"]
        reward, terminated, truncated = (self._td[key].item() for key in ("reward", "terminated", "truncated"))
        return self._last_text(), reward, terminated, truncated, {}

    def _last_text(self) -> str:
        """The environment's text at the end of the row."""
        turns = from_row(self._td.reshape(-1)[0], self.env.tokenizer).turns
        return self.observe(turns[-1].text if turns and turns[-1].reward is None else "")
