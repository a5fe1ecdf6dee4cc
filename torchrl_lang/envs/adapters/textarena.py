"""TextArena's games as games of ``TextGameEnv`` (extra ``textarena``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os.path import commonprefix
from typing import Any
from unittest import mock

from torchrl_lang._checks import check_options, needs_extra
from torchrl_lang._files import one_line, shorten
from torchrl_lang.envs.adapters.private_random import PrivateRandom

MOST_TURNS = 1000
"""Turns of opponents in a row after which a game is taken to be stuck."""

WORD_LISTS = (
    "it needs word lists of NLTK that are not installed. Run 'python -m nltk.downloader words "
    "averaged_perceptron_tagger_eng', or set NLTK_DATA to a folder that has them"
)


class TextArenaGame:
    r"""A TextArena game as a :class:`~torchrl_lang.envs.TextGame`; the agent has one seat, functions have the others.

    The opening is the agent's first observation. A reply is the part of its observation that is new since its last
    turn, without the echo of its own action; the last one ends with the reason of the end. The only reward is the
    agent's reward at the end of the game. Some games have a text there after an invalid action: the reply shows it, and
    the reward is ``invalid_reward``.

    Every game is made again with its seed and has random streams of its own, which the opponents share: random
    opponents may use :mod:`random`. Nothing is downloaded.

    Args:
        name: id of the game, for example ``"GuessTheNumber-v0"``, but none that ends in ``-raw``.
        opponent: the function that plays the other seat, or one function per other seat in their order. It maps all
            that its seat has observed in this game to an action, as TextArena's agents do.
        seat: the agent's seat, from 0.
        error_allowance: invalid actions in a row that are tolerated before the game ends; by default the game's number.
        invalid_reward: reward of a game that ends with a text instead of a number.
        observe: converts the opening and the replies, for example to shorten them.
        options: further arguments of ``textarena.make``.

    Raises:
        ImportError: TextArena is not installed.
        ValueError: there is no such seat.
        RuntimeError: TextArena cannot make or begin the game, for example because word lists are missing; on a turn,
            the game is stuck.

    Examples:
        >>> from torchrl_lang.envs import TextArenaGame
        >>> game = TextArenaGame("GuessTheNumber-v0")
        >>> game.reset(seed=3)[-18:]
        '\nEnter your guess.'
        >>> game.step("10")
        ('\n[GAME] The target number is lower.', 0.0, False)
    """

    def __init__(
        self,
        name: str,
        *,
        opponent: Callable[[str], str] | Sequence[Callable[[str], str]] = (),
        seat: int = 0,
        error_allowance: int | None = None,
        invalid_reward: float = -1.0,
        observe: Callable[[str], str] = str,
        **options: Any,
    ) -> None:
        functions = [opponent] if callable(opponent) else opponent
        seats = range(1 + len(functions))
        check_options(seat=(seat, seats))
        self._opponents = dict(zip([other for other in seats if other != seat], functions, strict=True))
        self.name, self.seat, self.options, self.observe = name, seat, options, observe
        self.error_allowance, self.invalid_reward = error_allowance, invalid_reward
        self._random = PrivateRandom()
        self.reset(0)  # a game that cannot be made here should not fail in the first rollout

    def reset(self, seed: int) -> str:
        """Begin a game with this seed; the opponents play until it is the agent's turn."""
        self._random.seed(seed)
        with self._playing() as make:
            try:
                self.env = make(self.name, **self.options)
                self.env.reset(num_players=1 + len(self._opponents), seed=seed)
            except Exception as error:
                known = WORD_LISTS if isinstance(error, LookupError) and "nltk" in str(error) else one_line(error)
                raise RuntimeError(f"TextArena cannot begin {self.name} ({type(error).__name__}): {known}.") from error
            if self.error_allowance is not None:
                self.env.state.error_allowance = self.error_allowance
            self._seen, self._over = "", False
            return self.observe(self._play_others())

    def step(self, text: str) -> tuple[str, float, bool]:
        """Play the agent's action, then the opponents' until it is the agent's turn again or the game is over."""
        reward, state = 0.0, self.env.state
        with self._playing():
            if not self._over:  # an opponent may have ended the game before the agent's first turn
                self._over = self.env.step(text)[0]
            reply = self._play_others()
            role = state.role_mapping.get(self.seat)
            for echo in (f"\n[{role}] {text}", f"\n[{role}] [{text}]"):
                reply = reply[len(echo) :] if f"{reply}\n".startswith(f"{echo}\n") else reply
            if self._over:
                rewards, info = self.env.close()
                reason, reward = (info or {}).get(self.seat, {}).get("reason") or "", rewards[self.seat]
                if isinstance(reward, str):  # of some games after an invalid action
                    reason, reward = reward, self.invalid_reward
                reply += f"\n[GAME] {reason}" if reason not in reply else ""
        return self.observe(reply), reward, self._over

    @contextmanager
    def _playing(self) -> Iterator[Callable[..., Any]]:
        """Yields ``textarena.make``. Inside, games have this game's random streams, and NLTK downloads nothing."""
        with needs_extra("TextArenaGame", "textarena"):
            import nltk
            import textarena
        with self._random.active(), mock.patch.object(nltk, "download", return_value=False):
            yield textarena.make

    def _play_others(self) -> str:
        """Play until it is the agent's turn or the game is over; returns what the agent has not read yet."""
        for _ in range(MOST_TURNS):
            if self._over:
                self.env.state.current_player_id = self.seat
            seat, text = self.env.get_observation()
            if seat == self.seat:
                break
            self._over = self.env.step(self._opponents[seat](text))[0]
        else:
            raise RuntimeError(f"{self.name} is stuck: it took {MOST_TURNS} turns of other seats than {self.seat}.")
        if not isinstance(text, str):
            raise TypeError(f"{self.name} observed {shorten(text)}, expected a text: use the id without '-raw'.")
        same = len(commonprefix([self._seen, text]))  # noqa: RUF071 (of texts)
        if same < len(self._seen):  # the observation is not a log, so take its paragraphs from the first change on
            same = text.rfind("\n\n", 0, same) + 1
        self._seen = text
        return text[same:]
