"""What all TextWorld recipes share: which games are to learn from and which to judge by, and how they are told."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from torchrl_lang.data import CharTokenizer
from torchrl_lang.envs.textworld import (
    TEMPLATES,
    RandomAdmissiblePlayer,
    TextWorldEnv,
    TextWorldSpec,
    build_games,
    game_texts,
    word_tokenizer,
)
from torchrl_lang.evaluation import GameRecords, Summary, play_games, summarize
from torchrl_lang.functional.checks import one_of
from torchrl_lang.storage import Fields, read_json
from torchrl_lang.storage.errors import shorten

__all__ = ["GameSets", "TextWorldTask", "solution", "split_games"]

Split = Literal["train", "valid", "test"]
Apart = Literal["solutions", "games"]

_FITTING: dict[str, dict[str, Any]] = {
    "coin_collector": {"template": "exits", "row_length": 192, "action_length": 4, "max_turns": 15},
    "simple": {"template": "orders", "row_length": 512, "action_length": 12, "max_turns": 25},
}
"""How games of a kind are told, where nothing else is said."""
_OTHERS = {"template": "short", "row_length": 1024, "action_length": 16, "max_turns": 30}


@dataclass(frozen=True)
class TextWorldTask:
    """Games that TextWorld builds, in three sets: to learn from, to watch the learning, and for the final table.

    All ``games`` are built, from the seeds ``seed``, ``seed + 1``, ... They are dealt out by their *solutions*, the
    commands of the engine's walkthrough: all games of one solution are in one set. So no judged game equals a game of
    training, and none is won by a sequence of commands that was learned by heart. How many solutions there are is the
    engine's: 108 corridors of ``coin_collector`` at level 5 (four choices of the first exit, three of each later one);
    36 ways to cook in ``simple`` (two hiding places of the key, six foods, three places of the food). Games of one
    solution differ in the wording of objective and rooms. With ``apart="games"`` only equal games are kept together:
    those whose world, words and solution are the same. Then a judged game may have a solution that was learned, and
    has to be read all the same.

    The tokenizer knows the words of the training games; other words are spelt.

    Args:
        kind: a kind of :class:`~torchrl_lang.envs.textworld.TextWorldSpec`.
        options: its options, such as ``{"level": 5}``, as sorted pairs; give :meth:`of` keywords instead.
        games: games that are built; 1 to 3 s a game and core, once for all, in the user's cache.
        valid: watch the learning on at least so many of them.
        test: keep at least so many for the final table.
        seed: seed of the first game; another one also deals the solutions out in another way.
        apart: what no two sets have in common, "solutions" or merely "games".
        template: the name of one of :data:`~torchrl_lang.envs.textworld.TEMPLATES`.
        row_length, action_length, max_turns: of the environment.

    Raises:
        ValueError: the kind, one of its options, the template or what is apart is unknown; on building, too few games
            are left to learn from.
    """

    name: ClassVar[str] = "textworld"

    kind: Any = "coin_collector"
    options: tuple[tuple[str, Any], ...] = ()
    games: int = 400
    valid: int = 32
    test: int = 48
    seed: int = 0
    apart: Apart = "solutions"
    template: str = "exits"
    row_length: int = 192
    action_length: int = 4
    max_turns: int = 15

    def __post_init__(self) -> None:
        one_of("apart", self.apart, get_args(Apart))
        one_of("template", self.template, tuple(TEMPLATES))
        if any(not isinstance(value, (str, int, float, type(None))) for _, value in self.options):
            raise ValueError(f"The options of a kind of games are plain values, got {shorten(self.options)}.")
        try:
            self._specs(1)
        except TypeError as error:
            raise ValueError(str(error)) from error

    @classmethod
    def of(cls, kind: str, *, options: Mapping[str, Any] | None = None, **fields: Any) -> TextWorldTask:
        """Games of a kind, told as fits the kind where ``fields`` do not say otherwise.

        Examples:
            >>> from torchrl_lang.recipes.textworld_task import TextWorldTask
            >>> from torchrl_lang.storage import Fields
            >>> task = TextWorldTask.of("coin_collector", options={"level": 5}, games=100, valid=16, test=16)
            >>> notes = Fields(task.notes(), "config.json", "train again")
            >>> task.template, TextWorldTask.from_notes(notes) == task
            ('exits', True)
        """
        pairs = tuple(sorted((options or {}).items()))
        return cls(kind, pairs, **{**_FITTING.get(kind, _OTHERS), **fields})

    def specs(self) -> list[TextWorldSpec]:
        """What is built."""
        return self._specs(self.games)

    def _specs(self, number: int) -> list[TextWorldSpec]:
        return [TextWorldSpec(self.kind, self.seed + n, **dict(self.options)) for n in range(number)]

    def sets(self) -> GameSets:
        """The files of the three sets, built where they are not there yet."""
        return _sets(self)

    def tokenizer(self) -> CharTokenizer:
        """The words of the training games."""
        return _tokenizer(self)

    def env(self, batch_size: int, *, split: Split = "train", **options: Any) -> TextWorldEnv:
        """The environment on one of the sets, by default on the games to learn from."""
        told: dict[str, Any] = {
            "template": self.template,
            "row_length": self.row_length,
            "action_length": self.action_length,
            "max_turns": self.max_turns,
        }
        games = getattr(self.sets(), split)
        return TextWorldEnv(games, self.tokenizer(), batch_size=[batch_size], **{**told, **options})

    def example(self, seed: int | None) -> tuple[RandomAdmissiblePlayer, dict[str, Any]]:
        """A player of random admissible commands, and the options of :meth:`env` that it needs."""
        return RandomAdmissiblePlayer(seed=seed), {"offers": "admissible"}

    def judge(
        self,
        policy: Any,
        *,
        games: int,
        seed: int,
        name: str = "",
        batch: int = 256,
        device: Any = None,
        split: Split = "valid",
        **options: Any,
    ) -> tuple[Summary, GameRecords]:
        """Play the games of a set in turn, again from the first where ``games`` are more than there are, and sum up."""
        env = self.env(min(batch, games), split=split, order="cycle", device=device, **options)
        try:
            records = play_games(env, policy, games=games, seed=seed, keep=["won"])
        finally:
            env.close()
        return self.summary(records, name), records

    def summary(self, records: GameRecords, name: str) -> Summary:
        """Figures of games that were played with ``keep=["won"]``."""
        return summarize(records, name=name, won=self.won)

    def won(self, records: GameRecords) -> Tensor:
        """Games that were won, bool ``[N]``, as the environment said.

        Raises:
            KeyError: the records do not hold it.
        """
        won = records.kept.get("won", None)
        if won is None:
            raise KeyError("The records do not say which games were won: play them with play_games(..., keep=['won']).")
        return won

    def notes(self) -> dict[str, Any]:
        """For a data set's manifest."""
        return {"task": self.name, **asdict(self), "options": dict(self.options)}

    @classmethod
    def from_notes(cls, notes: Fields) -> TextWorldTask:
        """From a data set's manifest, or a run's record.

        Raises:
            FileError: a field is missing, of another type, or describes no games.
        """
        numbers = {name: notes.at_least(name, 1) for name in ("games", "row_length", "action_length", "max_turns")}
        numbers |= {name: notes.at_least(name, 0) for name in ("valid", "test", "seed")}
        words = {name: notes.take(name, str) for name in ("kind", "template", "apart")}
        options = tuple(sorted(notes.take("options", dict).items()))
        try:
            return cls(options=options, **words, **numbers)  # type: ignore[arg-type]
        except ValueError as error:
            raise notes.error(f"holds no task ({str(error).rstrip('.')})") from error


@dataclass(frozen=True)
class GameSets:
    """Files of games in three sets that have nothing in common of what is to be apart."""

    train: tuple[Path, ...]
    valid: tuple[Path, ...]
    test: tuple[Path, ...]


def solution(game: Path) -> str:
    """The commands of a game's walkthrough, a line each, from the ``.json`` beside its file."""
    return "\n".join(_content(game)["metadata"]["walkthrough"])


def _whole(game: Path) -> str:
    """All that a game is, but for the numbers that it was made from."""
    content = {key: value for key, value in _content(game).items() if key != "metadata"}
    return json.dumps([content, solution(game)], sort_keys=True)


def _content(game: Path) -> dict[str, Any]:
    return read_json(game.with_suffix(".json"), remedy=f"delete {game}, it is then built again")


def split_games(games: Sequence[Path], *, valid: int, test: int, apart: Apart = "solutions", seed: int = 0) -> GameSets:
    """Deal out games, those alike together: to ``test``, then to ``valid``, until they are served, the rest to train.

    The order is that of hashes, so it is the same for everyone, has nothing to do with what the games are like, and is
    another one for another ``seed``.

    Raises:
        ValueError: nothing is left to learn from.
    """
    alike: dict[bytes, list[Path]] = {}
    salt = f"{seed}\n" if seed else ""
    for game in games:
        common = solution(game) if apart == "solutions" else _whole(game)
        alike.setdefault(hashlib.sha256((salt + common).encode()).digest(), []).append(game)
    sets: dict[str, list[Path]] = {"test": [], "valid": [], "train": []}
    wanted = {"test": test, "valid": valid, "train": len(games)}
    for _, members in sorted(alike.items()):
        served = next(name for name, given in sets.items() if len(given) < wanted[name])
        sets[served] += members
    if not sets["train"]:
        raise ValueError(
            f"{len(games)} games, {len(alike)} when {apart} are apart, leave none to learn from besides valid={valid} "
            f"and test={test}: build more games, or judge on fewer."
        )
    return GameSets(**{name: tuple(sorted(given)) for name, given in sets.items()})


@lru_cache(maxsize=8)
def _sets(task: TextWorldTask) -> GameSets:
    games = build_games(task.specs())
    return split_games(games, valid=task.valid, test=task.test, apart=task.apart, seed=task.seed)


@lru_cache(maxsize=8)
def _tokenizer(task: TextWorldTask) -> CharTokenizer:
    """Kept beside the games: playing them all takes a while, and every process that plays needs the words."""
    games, template = task.sets().train, TEMPLATES[task.template]
    content = [[game.name for game in games], repr(template), word_tokenizer(["a, b"]).config()]
    path = games[0].with_name(f"words-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]}.json")
    if not path.exists():
        tokenizer = word_tokenizer(game_texts(games, template, workers=os.cpu_count() or 1, steps=200))
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".writing", delete=False) as file:
            json.dump(tokenizer.config(), file)
        os.replace(file.name, path)
    return CharTokenizer.from_config(json.loads(path.read_text(encoding="utf-8")))
