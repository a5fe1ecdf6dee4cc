"""TextWorld games as a batch of text games that the engine plays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor
from torchrl.data import Categorical, Unbounded

from torchrl_lang._checks import check_options
from torchrl_lang._files import shorten
from torchrl_lang.envs.game_turn import GamePlace
from torchrl_lang.envs.language_env import TaskState
from torchrl_lang.envs.seeded_env import flags, token_ids
from torchrl_lang.envs.text_game import GameOptions, TextGameEnv
from torchrl_lang.envs.textworld.engine import EnginePool, Failed, require_textworld
from torchrl_lang.envs.textworld.games import game_files
from torchrl_lang.envs.textworld.text import (
    SILENT,
    TEMPLATES,
    WORD,
    Template,
    clean_command,
    drawn_exchange,
    exchanged,
    is_meta,
    without_reply,
)
from torchrl_lang.text.chat_tokenizer import padded_action
from torchrl_lang.text.tokenizers import Tokenizer

_OF_THE_TURN = ("invalid", "was_admissible")
_NUMBERS = {"game": torch.int64, "score": torch.float32, "points": torch.float32}
_ENTRIES = _NUMBERS | dict.fromkeys(("won", "lost", "engine_failed", *_OF_THE_TURN), torch.bool)
"""The entries that have one value per row."""
_KEPT_ACTIONS = 10_000
"""Number of commands whose ids are kept."""
Offer = Literal["expert", "admissible", "invalid", "was_admissible"]


class TextWorldEnv(TextGameEnv):
    """A batch of TextWorld games, which the engine plays in parallel processes.

    The ``game_seed`` of an episode, modulo the number of games, selects its game. So
    ``reset(game_seed=torch.arange(n))`` begins ``n`` selected games, and ``order="cycle"`` plays all games equally
    often and in order. An action is one command; of a text with several commands only the first is played. Commands to
    the engine itself (save, restart, undo, those that print hidden state) are not passed on: they cost a turn and get
    the reply :data:`~torchrl_lang.envs.textworld.text.REFUSED`.

    The reward of a turn is the increase of the score. Transforms can change it:
    :class:`~torchrl_lang.transforms.LivingCost`, :class:`~torchrl_lang.transforms.EntryReward` and others.

    The tensordict has these entries beside the row:

    =====================  ======================  =====================================================================
    key                    dtype, shape            meaning
    =====================  ======================  =====================================================================
    ``game``               int64 ``[*B, 1]``       number of the current game
    ``score``              float32 ``[*B, 1]``     score so far
    ``points``             float32 ``[*B, 1]``     points of the last turn
    ``won``, ``lost``      bool ``[*B, 1]``        how the game has ended
    ``engine_failed``      bool ``[*B, 1]``        the engine did not answer, and the row is truncated
    ``invalid``            bool ``[*B, 1]``        the last command did nothing: it was not understood, impossible, or
                                                   for the engine (``offers="invalid"``)
    ``was_admissible``     bool ``[*B, 1]``        the last command was one of the admissible ones, word by word
                                                   (``offers="was_admissible"``)
    ``expert_action``      int64 ``[*B, K]``       an expert's next command (``offers="expert"``)
    ``admissible_action``  int64 ``[*B, M, K]``    all admissible commands (``offers="admissible"``), without the
                                                   template's hidden verbs and commands longer than ``K`` tokens
    ``admissible_mask``    bool ``[*B, M]``        True for the commands in ``admissible_action``, False for padding
    =====================  ======================  =====================================================================

    Processes start at the first reset and end with :meth:`close`, with the environment, or with the program. A process
    that is killed, or that does not answer within ``time_limit`` seconds, is replaced, with a warning, and its games
    are replayed. If the same command fails again, its row is truncated; other rows continue. After :meth:`close` a
    reset or a step starts new processes. The environment can be pickled and copied at any time.

    Args:
        games: files of games, as :func:`build_games` returns them.
        tokenizer: encodes all texts of the games, as :func:`word_tokenizer` does.
        template: format of observations, a :class:`Template` or the name of one of :data:`TEMPLATES`.
        offers: further entries, see above. All of them cost engine time, the expert's plan most.
        max_admissible: ``M``.
        order: ``"random"`` draws games from the environment's seed, ``"cycle"`` plays them in turn.
        exchange: words in lower case, such as :func:`~torchrl_lang.envs.textworld.games.theme_words`, that take each
            other's places at random in each episode: in the texts, and back in the commands. So a few games teach to
            copy names, not to know them. The template must be in lower case. Episodes whose ``game_seed`` is below the
            number of games have the names of the game.
        workers: number of engine processes; default the number of cores, at most one per row.
        time_limit: seconds that the engine may take per command.
        **options: ``row_length``, ``action_length``, ``max_turns`` and others of
            :class:`~torchrl_lang.envs.TextGameEnv`.

    Raises:
        ImportError: the engine is not installed; the message names the extra.
        ValueError: there is no game, or a name is unknown; on ``reset`` and ``step``, the expert's command does not
            fit into ``action_length`` tokens, or more than ``max_admissible`` commands are admissible.
        FileError: a game's file, or the ``.json`` beside it, is missing or damaged, or the engine fails in the game.
    """

    def __init__(
        self,
        games: Sequence[str | Path],
        tokenizer: Tokenizer,
        *,
        template: Template | str = "plain",
        offers: Iterable[Offer] | Offer = (),
        max_admissible: int = 64,
        order: str = "random",
        exchange: Sequence[str] = (),
        workers: int | None = None,
        time_limit: float = 10.0,
        **options: Unpack[GameOptions],
    ) -> None:
        require_textworld()
        self.games = game_files(games)
        self.offers: tuple[str, ...] = (offers,) if isinstance(offers, str) else tuple(offers)
        named = (template, TEMPLATES) if isinstance(template, str) else (None, (None,))
        check_options(template=named, order=(order, ("random", "cycle")))
        check_options(**{f"offers[{n}]": (name, get_args(Offer)) for n, name in enumerate(self.offers)})
        self.template = TEMPLATES[template] if isinstance(template, str) else template
        self.order, self.max_admissible = order, max_admissible
        are_words = not isinstance(exchange, str) and all(WORD.fullmatch(str(each)) for each in exchange)
        if exchange and not (are_words and len({*exchange}) == len(exchange) and self.template.lower):
            needed = 'exchange needs different words in lower case and such a template, as "lower"'
            raise ValueError(f"{needed}, got {shorten(exchange)} for {self.template}.")
        self.exchange = tuple(exchange)
        self._words: dict[int, tuple[dict[str, str], dict[str, str]]] = {}
        """Of each row the words shown in place of the engine's, and the engine's in place of these."""
        hidden = {*_OF_THE_TURN} - {*self.offers}
        self._shown_entries = [key for key in _ENTRIES if key not in hidden]
        self._actions: dict[str, list[int] | None] = {}
        no_game: Any = lambda: None  # noqa: E731 (the pool plays)
        super().__init__(no_game, tokenizer, **options)
        self._states: dict[int, dict[str, Any]] = {}
        """The engine's last state of each row."""
        self._entries: dict[int, dict[str, Any]] = {}
        # Without the admissible commands the engine counts every turn as a move, and no turn is invalid.
        asks = {"admissible", *_OF_THE_TURN} & {*self.offers}
        infos = self.template.infos | ({"admissible_commands"} if asks else set())
        workers = max(1, min(os.cpu_count() or 1, self._n)) if workers is None else workers
        self.pool = EnginePool(workers, sorted(infos), expert="expert" in self.offers, time_limit=time_limit)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """End the engine's processes."""
        self.pool.close()
        super().close(raise_if_closed=raise_if_closed)

    def possible_starts(self, most: int) -> Tensor:
        """See :meth:`LanguageEnv.possible_starts`: one for each game."""
        return super().possible_starts(min(most, len(self.games)))

    # -- the games, all at once ----------------------------------------------------------------------------------------

    def _draw_seeds(self, episode: Tensor) -> Tensor:
        return episode.clone() if self.order == "cycle" else super()._draw_seeds(episode)

    def _begin_all(self, places: Mapping[int, GamePlace]) -> Iterator[tuple[int, Any]]:
        number = {row: place.seed % len(self.games) for row, place in places.items()}
        self._words |= {row: self._exchanged(place.seed) for row, place in places.items()}
        for row, state in self.pool.begin({row: self.games[game] for row, game in number.items()}).items():
            self._states[row] = state
            self._entries[row] = {**dict.fromkeys(_ENTRIES, 0), "game": number[row], "score": state["score"]}
            yield row, self._shown_text(row, self.template.write("opening", state))

    def _exchanged(self, seed: int) -> tuple[dict[str, str], dict[str, str]]:
        """The exchanged words in the episode of a seed, from the engine's and back."""
        if not self.exchange or seed < len(self.games):
            return {}, {}
        words = drawn_exchange(self.exchange, seed)
        return words, {word: other for other, word in words.items()}

    def _shown_text(self, row: int, text: str) -> str:
        """A text or command of the engine in the template's case, with the words of the row's episode."""
        return exchanged(self.template.cased(text), self._words[row][0])

    def _play_all(self, uttered: Mapping[int, list[int]], places: Mapping[int, GamePlace]) -> Iterator[tuple[int, Any]]:
        texts = {row: clean_command(self._read(ids)) for row, ids in uttered.items()}
        commands = {row: exchanged(text, self._words[row][1]) for row, text in texts.items()}
        states = self.pool.step({row: command for row, command in commands.items() if not is_meta(command)})
        for row, command in commands.items():
            before, entries = self._states[row], self._entries[row]
            entries |= {"points": 0, "invalid": False, "was_admissible": False}
            state = states.get(row, {**before, "feedback": without_reply(before["feedback"]), "acted": False})
            if isinstance(state, Failed):
                entries["engine_failed"] = True
                yield row, (self.template.cased(SILENT), 0.0, False, True, {})
                continue
            self._states[row] = state
            entries |= {key: state[key] for key in ("score", "won", "lost")}
            entries |= {"points": float(state["score"] - before["score"]), "invalid": not state["acted"]}
            admissible = before.get("admissible_commands") or ()
            entries["was_admissible"] = not is_meta(command) and command in map(clean_command, admissible)
            reply = self._shown_text(row, self.template.write("reply", state))
            yield row, (reply, entries["points"], state["done"], False, {})

    # -- entries beside the rows ---------------------------------------------------------------------------------------

    def _task_observation(self, task: TaskState) -> Mapping[str, Tensor]:
        return {key: value for key, value in task.items() if key not in ("game_seed", "cut")}

    def _task_observation_spec(self) -> dict[str, Any]:
        batch, device, vocabulary = self.batch_size, self.device, self.tokenizer.vocab_size
        kinds = {
            torch.int64: Categorical(len(self.games), shape=(*batch, 1), dtype=torch.int64, device=device),
            torch.float32: Unbounded(shape=(*batch, 1), dtype=torch.float32, device=device),
            torch.bool: flags(batch, 1, device),
        }
        specs: dict[str, Any] = {key: kinds[_ENTRIES[key]].clone() for key in self._shown_entries}
        if "expert" in self.offers:
            specs["expert_action"] = token_ids(vocabulary, batch, self.action_length, device=device)
        if "admissible" in self.offers:
            shape = (self.max_admissible, self.action_length)
            specs["admissible_action"] = token_ids(vocabulary, batch, *shape, device=device)
            specs["admissible_mask"] = flags(batch, self.max_admissible, device)
        return specs

    def _standing(self) -> TaskState:
        out, states = {}, [self._states[row] for row in range(self._n)]
        for key in self._shown_entries:
            values = [self._entries[row][key] for row in range(self._n)]
            out[key] = torch.tensor(values, dtype=_ENTRIES[key], device=self.device)[:, None]
        if "expert" in self.offers:
            commands = [self._shown_text(row, state["expert"]) for row, state in enumerate(states)]
            plans = [self._utterance(command) for command in commands]
            if None in plans:
                long = commands[plans.index(None)]
                raise ValueError(f"The expert's {long!r} does not fit into action_length={self.action_length}.")
            expert = torch.tensor(plans, dtype=torch.int64, device=self.device)
            out["expert_action"] = expert.reshape(self._n, self.action_length)
        if "admissible" in self.offers:
            out |= self._admissible([state.get("admissible_commands") or () for state in states])
        return out

    def _admissible(self, commands: Sequence[Sequence[str]]) -> TaskState:
        shape = (self._n, self.max_admissible, self.action_length)
        actions = torch.full(shape, self.tokenizer.control.pad, dtype=torch.int64)
        number = torch.zeros(self._n, 1, dtype=torch.int64)
        for row, texts in enumerate(commands):
            visible = [self._shown_text(row, text) for text in self.template.visible(texts)]
            fitting = [ids for ids in map(self._utterance, visible) if ids is not None]
            if len(fitting) > self.max_admissible:
                raise ValueError(f"{len(fitting)} commands are admissible, max_admissible is {self.max_admissible}.")
            if fitting:
                actions[row, : len(fitting)] = torch.tensor(fitting)
                number[row] = len(fitting)
        mask = torch.arange(self.max_admissible) < number
        return {"admissible_action": actions.to(self.device), "admissible_mask": mask.to(self.device)}

    def _utterance(self, command: str) -> list[int] | None:
        """A command as an action, ``K`` ids, or None if it does not fit."""
        if command not in self._actions:
            if len(self._actions) == _KEPT_ACTIONS:
                self._actions.clear()  # exchanged names make new commands without end
            self._actions[command] = padded_action(self.tokenizer, command, self.action_length)
        return self._actions[command]
