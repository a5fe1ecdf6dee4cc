"""TextWorld as a task of the recipes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, get_args

from tensordict import TensorDict
from torch import Tensor

from torchrl_lang._checks import check_options
from torchrl_lang._files import write_file
from torchrl_lang.data.generate import EpisodeSampler, Policy, PolicySampler, cat_rows, seed_of_games
from torchrl_lang.envs.textworld.env import TextWorldEnv
from torchrl_lang.envs.textworld.games import (
    Apart,
    GameSets,
    TextWorldSpec,
    build_games,
    game_texts,
    split_games,
    theme_words,
)
from torchrl_lang.envs.textworld.players import ExpertPlayer, RandomAdmissiblePlayer
from torchrl_lang.envs.textworld.text import TEMPLATES, clean_command, drawn_exchange, exchanged, is_meta
from torchrl_lang.evaluation import GameRecords
from torchrl_lang.recipes.tasks.base import Player, Task, named_player
from torchrl_lang.recipes.tasks.textworld import PRESETS, TextWorldData, TextWorldPlay
from torchrl_lang.schema import ROW_KEYS, TERMINATED, TRUNCATED
from torchrl_lang.text import CharTokenizer, Episode, from_row, to_rows, word_tokenizer
from torchrl_lang.text.chat_tokenizer import padded_action

_BY_KIND: dict[str, dict[str, Any]] = {
    "coin_collector": {"template": "exits", "row_length": 192, "action_length": 4, "max_turns": 15},
    "simple": {"template": "orders", "row_length": 512, "action_length": 12, "max_turns": 25},
}
"""Template and limits for each kind of game."""
_OTHER_KINDS = {"template": "short", "row_length": 1024, "action_length": 16, "max_turns": 30}


class ExchangedCopies(PolicySampler):
    """Games of a policy, each several times: copies have the names of ``env.exchange`` in other places.

    A copy is what the game and the policy would have written with other names. One that does not fit into a row ends
    earlier, truncated, with a warning.

    Args:
        env: see :class:`PolicySampler`; an environment with ``exchange``.
        policy: see :class:`PolicySampler`.
        copies: rows of each game, the game itself among them.
    """

    def __init__(self, env: TextWorldEnv, policy: Policy, *, copies: int) -> None:
        super().__init__(env, policy)
        self.words, self.copies = env.exchange, copies

    def __call__(self, numbers: range, seed: int) -> TensorDict:
        """See ``EpisodeSampler.__call__``."""
        games = super().__call__(numbers, seed).select(*ROW_KEYS, TERMINATED, TRUNCATED)
        episodes = [from_row(row, self.tokenizer) for row in games.unbind(0)]
        first = seed_of_games(seed, numbers) + 1
        copies = [self._copy(episode, first + n) for n, episode in enumerate(episodes * (self.copies - 1))]
        return cat_rows([games, to_rows(copies, self.tokenizer, self.row_length, on_overflow="truncate")])

    def _copy(self, episode: Episode, seed: int) -> Episode:
        words = drawn_exchange(self.words, seed)
        return replace(episode, turns=[replace(turn, text=exchanged(turn.text, words)) for turn in episode.turns])


@dataclass(frozen=True)
class TextWorldTask(Task):
    """Games built by TextWorld, split into training, validation and test games.

    The games of the seeds ``seed``, ``seed + 1``, ... are built and split by their *solutions* (the commands of the
    engine's walkthrough), so that no evaluated game can be won by a memorized sequence of commands. The number of
    solutions is the engine's: 108 corridors of ``coin_collector`` at level 5; 36 ways to cook in ``simple``. Games with
    one solution differ in the wording of objective and rooms. With ``apart="games"`` only equal games stay together.

    The tokenizer has the words of the training games, and for ``custom`` ones or with ``exchange`` all words of the
    engine's names (:func:`~torchrl_lang.envs.textworld.games.theme_words`); it spells other words letter by letter.
    With ``exchange`` these words trade places in each training episode, never in the games of other splits.
    ``options`` are those of the ``kind`` of :class:`~torchrl_lang.envs.textworld.TextWorldSpec`, such as
    ``{"level": 5}``, as sorted pairs; :meth:`of` takes a mapping. The other fields are described in
    :class:`TextWorldGames`.

    Raises:
        ValueError: unknown kind, option, template or ``apart``; later, when games are built, too few for training.
    """

    name: ClassVar[str] = "textworld"
    data_options = TextWorldData
    play_options = TextWorldPlay
    presets = PRESETS
    baselines = ("random", "expert")
    turns_name = "commands"
    splits = ("test", "valid", "train")
    evaluated: ClassVar[Mapping[str, Any]] = {"split": "valid", "order": "cycle"}
    kept_entries = ("won",)

    kind: Any = "coin_collector"
    options: tuple[tuple[str, bool | int | str | None], ...] = ()
    games: int = 400
    valid: int = 32
    test: int = 48
    seed: int = 0
    apart: Apart = "solutions"
    template: str = "exits"
    row_length: int = 192
    action_length: int = 4
    max_turns: int = 15
    exchange: bool = False

    def __post_init__(self) -> None:
        check_options(apart=(self.apart, get_args(Apart)), template=(self.template, TEMPLATES))
        TextWorldSpec(self.kind, self.seed, **dict(self.options))

    @classmethod
    def of(cls, kind: str, *, options: Mapping[str, Any] | None = None, **fields: Any) -> TextWorldTask:
        """Games of a kind, with the template and the limits that fit the kind where ``fields`` do not give others.

        Examples:
            >>> from torchrl_lang.envs.textworld.task import TextWorldTask
            >>> task = TextWorldTask.of("coin_collector", options={"level": 5}, games=100, valid=16, test=16)
            >>> task.template, TextWorldTask.from_notes(task.notes()) == task
            ('exits', True)
        """
        pairs = tuple(sorted((options or {}).items()))
        return cls(kind, pairs, **{**_BY_KIND.get(kind, _OTHER_KINDS), **fields})

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> TextWorldTask:
        """See :meth:`Task.from_notes`."""
        options = notes.get("options")
        pairs = sorted(options.items()) if isinstance(options, Mapping) else options
        return super().from_notes({**notes, "options": pairs})

    def notes(self) -> dict[str, Any]:
        """See :meth:`Task.notes`."""
        return {**super().notes(), "options": dict(self.options)}

    @lru_cache(maxsize=8)  # noqa: B019  # equal tasks have the same games
    def sets(self) -> GameSets:
        """The files of the splits; games that do not exist yet are built."""
        options, numbers = dict(self.options), range(self.seed, self.seed + self.games)
        games = build_games([TextWorldSpec(self.kind, number, **options) for number in numbers])
        return split_games(games, valid=self.valid, test=self.test, apart=self.apart, seed=self.seed)

    @lru_cache(maxsize=8)  # noqa: B019
    def tokenizer(self) -> CharTokenizer:
        """The words of the training games, from a file beside them, because collecting them means playing all games."""
        games, template = self.sets().train, TEMPLATES[self.template]
        # A word is a symbol with the space before it and another without, as after "type 0 ".
        words = theme_words() if self.kind == "custom" or self.exchange else []
        names = [f"{mark}{word}" for word in words for mark in " \n"] + [f"{digit} " for digit in range(10) if words]
        content = [[game.name for game in games], repr(template), word_tokenizer(["a, b"]).config(), *names]
        path = games[0].with_name(f"words-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]}.json")
        if not path.exists():
            texts = game_texts(games, template, workers=os.cpu_count() or 1, steps=200)
            write_file(path, json.dumps(word_tokenizer([*texts, *names]).config()))
        return CharTokenizer.from_config(json.loads(path.read_text(encoding="utf-8")))

    def env(self, batch_size: int, *, split: str = "train", **options: Any) -> TextWorldEnv:
        """The environment on the games of a split."""
        fixed = {name: getattr(self, name) for name in ("template", "row_length", "action_length", "max_turns")}
        fixed |= {"exchange": theme_words()} if self.exchange and split == "train" else {}
        return TextWorldEnv(getattr(self.sets(), split), self.tokenizer(), batch_size=[batch_size], **fixed | options)

    def behavior_policy(self, options: TextWorldData) -> Player:
        """The experts."""
        first = None if options.first_command is None else self._action(options.first_command)
        player = ExpertPlayer(epsilon=options.epsilon, foreign=options.foreign, first=first, seed=options.seed)
        return Player(player, {"offers": ("expert", "admissible")})

    def _action(self, command: str) -> list[int]:
        action, first = padded_action(self.tokenizer(), command, self.action_length), clean_command(command)
        if action is None or not first or is_meta(first):
            found = f"no command of a game with up to {self.action_length} tokens, such as inventory"
            raise ValueError(f"--first-command {command!r} is {found}.")
        return action

    def maker(self, options: TextWorldData) -> EpisodeSampler | None:
        """Copies of the experts' games, if there are to be several of each."""
        if options.copies == 1:
            return None
        player = self.behavior_policy(options)
        env = self.env(min(options.batch, options.episodes), **player.env_options)
        return ExchangedCopies(env, player.policy, copies=options.copies)

    def number_of_episodes(self, options: TextWorldData) -> int:
        """Number of episodes."""
        return options.episodes

    def player(self, name: str, seed: int | None = None) -> Player:
        """``"random"``: admissible commands, uniformly; ``"expert"``: the engine's walkthrough."""
        players = {
            "random": lambda: Player(RandomAdmissiblePlayer(seed=seed), {"offers": "admissible"}),
            "expert": lambda: Player(ExpertPlayer(), {"offers": "expert"}, is_random=False),
        }
        return named_player(name, players)()

    def won(self, records: GameRecords) -> Tensor:
        """Games that the engine counts as won, bool ``[N]``."""
        return records.kept["won"]  # of play_games(..., keep=["won"])

    def number_of_games(self, split: str | None) -> int:
        """Number of games in a split."""
        return len(getattr(self.sets(), split or self.splits[0]))
