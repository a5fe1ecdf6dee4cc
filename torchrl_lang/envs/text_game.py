"""Plain-Python text games, from strings to strings, as a batched language environment."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Unpack

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang._checks import Count, check_given, checked
from torchrl_lang._files import shorten
from torchrl_lang.envs.game_turn import GamePlace, GameTurn, TextGame, ToolText, padded_features
from torchrl_lang.envs.language_env import LanguageEnv, LanguageOptions, Reply, TaskState
from torchrl_lang.envs.reset_inputs import in_range
from torchrl_lang.envs.row_state import Rows, Utterance, complete_opening, complete_reply
from torchrl_lang.envs.seeded_env import feature_specs
from torchrl_lang.functional.random import random_index
from torchrl_lang.schema import FEATURES, FEATURES_MASK
from torchrl_lang.text.chat_tokenizer import ChatTokenizer, decode_action
from torchrl_lang.text.tokenizers import Tokenizer

OnBadText = Literal["truncate", "raise"]


class GameOptions(LanguageOptions, total=False):
    """Options of :class:`TextGameEnv` that its subclasses pass on."""

    read: Callable[[str], str] | None
    on_bad_text: OnBadText


UNREADABLE = "\N{REPLACEMENT CHARACTER}"
"""The text that a game gets if the tokenizer cannot decode the agent's tokens."""


class TextGameEnv(LanguageEnv):
    r"""A batch of plain-Python games; each row of the batch has its own game object.

    Every episode has a game seed, derived from the environment's seed and the number of the episode. ``reset`` accepts
    other seeds, as an entry ``game_seed`` int64 ``[*B]`` of its tensordict or by keyword, ``reset(game_seed=...)``; use
    the keyword if the environment is wrapped (see :class:`~torchrl_lang.envs.LanguageEnv`). :attr:`game_seed` returns
    the current seeds.

    ``reset(tensordict, set_state=True)`` begins the games of ``game_seed`` and replays the agent's turns of the rows. A
    replayed row must equal the given one, token by token and reward by reward. So it is an error if the row belongs to
    another seed, or if the game's randomness does not come from its seed.

    Nothing that the agent writes crashes the environment: the game gets control tokens by name, and
    ``"\N{REPLACEMENT CHARACTER}"`` instead of an utterance that the tokenizer cannot decode. Nor does the text of a
    game: a text that the tokenizer cannot encode is dropped, and an opening that leaves no room for an utterance is
    cut. Each warns once, and the row is ``truncated`` at its next turn, or at this one if a reply was dropped. A reply
    that is longer than the rest of its row fills it, and the row is ``truncated`` at once.
    ``on_bad_text="raise"`` raises an error in all three cases.

    With ``features=(P, F)`` a game also shows what is no text, such as an image: after ``reset`` its attribute
    ``features`` holds up to ``P`` vectors of ``F`` numbers, which stay the same during the game. Observations then have
    ``features`` float32 ``[*B, P, F]`` and ``features_mask`` bool ``[*B, P]``, True on the vectors that the game has,
    for models that read them (:func:`~torchrl_lang.modules.with_features`).

    If a game raises an error, a note on it names the game, its seed and turn, and the agent's utterance. If it returns
    something other than a :class:`TextGame` should, such as a reward that is not finite, the error message does. The
    next call must then be a full reset.

    With ``workers`` above 1 as many games are reset or stepped at a time, each in a thread, for games that wait: for a
    server, a process or a model. Rows and errors are the same as without, as long as games share nothing that they
    change. The threads end with the step. Games that compute in Python gain from several environments in a
    ``ParallelEnv`` instead; games of TextArena and GEM run one at a time.

    Args:
        make_game: makes a new game, a :class:`TextGame`; called once per row of the batch.
        read: maps the text of an utterance to what the game gets, such as
            :func:`~torchrl_lang.envs.game_turn.without_thoughts`; by default the text itself. Rows keep all of it.
        features: number and width of the vectors that a game shows; None if games show none.
        on_bad_text: what to do if a game's text cannot be encoded or does not fit: ``"truncate"`` or ``"raise"``.
        workers: number of games that are reset or stepped at a time.
        tokenizer: encodes the texts of the games.
        **options: ``row_length``, ``action_length``, ``max_turns``, ``batch_size``, ``group_size``, ``seed`` and
            ``device``, as in :class:`~torchrl_lang.envs.LanguageEnv`.

    Raises:
        TypeError: a game returns values of wrong types, or a reward that is not finite; the message names the game and
            its turn.
        ValueError: the chat template changes earlier messages, which :class:`~torchrl_lang.envs.LongGameEnv` allows;
            features of a game do not fit ``features``; with ``on_bad_text="raise"`` a text cannot be encoded or does
            not fit; on ``reset``, a row differs from the replay of its game seed.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.envs import TextGameEnv
        >>> class Parrot:
        ...     def reset(self, seed):
        ...         return "bye"
        ...     def step(self, text):
        ...         return text, float(len(text)), text == "bye"
        >>> env = TextGameEnv(Parrot, CharTokenizer.from_alphabet("abey"), row_length=32, action_length=4)
        >>> env.tokenizer.decode(env.reset()["tokens"][0, :5])
        '<s>bye</s>'
    """

    _reset_entries = ("game_seed",)
    _spared_state = (FEATURES, FEATURES_MASK)
    _may_rewrite = False
    """Whether a chat template may change earlier messages."""

    @checked
    def __init__(
        self,
        make_game: Callable[[], TextGame],
        tokenizer: Tokenizer,
        *,
        read: Callable[[str], str] | None = None,
        features: tuple[int, int] | None = None,
        on_bad_text: OnBadText = "truncate",
        workers: Count = 1,
        **options: Unpack[LanguageOptions],
    ) -> None:
        number, width = features or (None, None)
        check_given(number_of_features=(number, 1), width_of_features=(width, 1))
        self._workers, self.on_bad_text, self.read, self.features = workers, on_bad_text, read, features
        self._warned: set[str] = set()
        if isinstance(tokenizer, ChatTokenizer) and tokenizer.row_format.rewrites and not self._may_rewrite:
            change = f"The chat template changes earlier messages ({tokenizer.row_format.rewrites}), and rows only grow"
            raise ValueError(f"{change}: use LongGameEnv, or a row format with history='kept'.")
        super().__init__(tokenizer, **options)
        self._games: list[Any] = [make_game() for _ in range(self._n)]

    @property
    def game_seed(self) -> Tensor:
        """The seeds of the current games, int64 ``[*B]``."""
        return self._current("game_seed")

    def _open(self, episode: Tensor, fresh: Tensor, options: TensorDictBase | None) -> tuple[Tensor, Tensor, TaskState]:
        seed = self._named(options, "game_seed")
        if seed is None:
            seed = self._draw_seeds(episode)
        elif self._number_of_starts is not None:
            seed = in_range("game_seed", seed, fresh, self._number_of_starts)
        texts: list[list[int]] = [[] for _ in self._games]
        cut = [False] * self._n
        with self._all_or_none():
            seeds = seed.tolist()
            places = {row: GamePlace(row, seeds[row], 0) for row in _true(fresh)}
            for row, returned in self._begin_all(places):
                texts[row], cut[row] = self._fit_opening(places[row].read_opening(returned), places[row])
            standing = self._standing() | self._shown(places)
        was_cut = torch.tensor(cut, dtype=torch.bool, device=self.device)
        return *self._pad(texts), {"game_seed": seed, "cut": was_cut, **standing}

    def _reply(self, utterance: Utterance, task: TaskState, live: Tensor) -> tuple[Reply, TaskState]:
        texts: list[list[int]] = [[] for _ in self._games]
        rewards, terminated, truncated = [0.0] * self._n, [False] * self._n, [False] * self._n
        seeds, turns = task["game_seed"].tolist(), self._turns.tolist()
        lengths, uttered = utterance.length.tolist(), utterance.tokens.tolist()
        # The end-of-action token, and the end-of-state token if there is one, need room, too.
        ends = 1 + self.tokenizer.control.marks_turns
        room = (self.row_length - self._begun().rows.length - utterance.length - ends).tolist()
        with self._all_or_none():
            places = {row: GamePlace(row, seeds[row], turns[row] + 1) for row in _true(live)}
            for row, returned in self._play_all({row: uttered[row][: lengths[row]] for row in places}, places):
                turn = places[row].read_turn(returned)
                texts[row], lost = self._fit_reply(turn, places[row], room[row])
                rewards[row], terminated[row], truncated[row] = turn.reward, turn.terminated, turn.truncated or lost
            standing = self._standing()
        tokens, length = self._pad(texts)
        reward = torch.tensor(rewards, dtype=torch.float32, device=self.device)
        ended = torch.tensor([terminated, truncated], dtype=torch.bool, device=self.device)
        return Reply(tokens, length, reward, ended[0], ended[1] | task["cut"]), {**task, **standing}

    def _restore(self, rows: Rows, task: TaskState, fresh: Tensor, options: TensorDictBase | None) -> TaskState:
        with self._all_or_none():
            if self._named(options, "game_seed") is None:
                raise KeyError("reset(set_state=True) needs the seeds of the rows, the entry game_seed.")
            seeds, lengths = task["game_seed"].tolist(), rows.length.tolist()
            for row in _true(fresh):
                tokens, agent, rewards = (values[row, : lengths[row]].tolist() for values in rows[:3])
                played = self._replay(row, seeds[row], tokens, agent)
                if played != (tokens, rewards):
                    texts = f"{self._decode(tokens)!r}, the replay {self._decode(played[0])!r}"
                    raise ValueError(f"Row {row} differs from the replay of game seed {seeds[row]}: it is {texts}.")
        return {**task, **self._standing()}

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Drop all rows if the block fails, because then some games are a turn ahead of their rows."""
        rows, self._rows = self._rows, None
        yield
        self._rows = rows

    # -- all games, each by itself; a subclass that asks all of them at once overrides these ---------------------------

    def _draw_seeds(self, episode: Tensor) -> Tensor:
        """Seeds of the episodes for which ``reset`` got none, int64 ``[N]``."""
        return random_index(self._key, episode, self._number_of_starts or 2**31)

    def _begin_all(self, places: Mapping[int, GamePlace]) -> Iterable[tuple[int, Any]]:
        """Begin the games of some rows; yields each row and the result of its game's ``reset``."""
        return self._each("reset", {row: place.seed for row, place in places.items()}, places)

    def _play_all(self, uttered: Mapping[int, list[int]], places: Mapping[int, GamePlace]) -> Iterable[tuple[int, Any]]:
        """Play a turn in the games of some rows; yields each row and the result of its game's ``step``."""
        return self._each("step", {row: self._read(ids) for row, ids in uttered.items()}, places)

    def _each(self, method: str, args: Mapping[int, Any], places: Mapping[int, GamePlace]) -> Iterable[tuple[int, Any]]:
        """Each row and the result of its game's ``method(argument)``, in order, ``workers`` of them at a time."""
        is_learning = torch.is_grad_enabled()  # each thread has a flag of its own

        def call(row: int) -> tuple[int, Any]:
            try:
                with torch.set_grad_enabled(is_learning):
                    return row, getattr(self._games[row], method)(args[row])
            except Exception as error:
                error.add_note(f"{places[row]} was in {method}({args[row]!r}).")
                raise

        threads_needed = min(self._workers, len(args))
        if threads_needed < 2:
            return (call(row) for row in args)  # a generator makes a game's StopIteration an error; map would just end
        # New threads for each step: nothing to close or to copy, and none is left after an error.
        with ThreadPoolExecutor(threads_needed) as threads:
            return list(threads.map(call, args))

    def _standing(self) -> TaskState:
        """Further state of the games, tensors ``[N, ...]``."""
        return {}

    def _features(self, place: GamePlace) -> Any:
        """The features of a game that has begun, for environments with ``features``."""
        return self._games[place.row].features

    def _shown(self, places: Mapping[int, GamePlace]) -> TaskState:
        """The features of the games that have begun in some rows; zeros in the others."""
        if self.features is None:
            return {}
        shown = {row: place.read_features(self._features(place), self.features) for row, place in places.items()}
        return {key: value.to(self.device) for key, value in padded_features(shown, self._n, self.features).items()}

    def _task_observation(self, task: TaskState) -> Mapping[str, Tensor]:
        return {key: task[key] for key in (FEATURES, FEATURES_MASK) if key in task}

    def _task_observation_spec(self) -> dict[str, Any]:
        return {} if self.features is None else feature_specs(self.batch_size, self.features, self.device)

    # -- one game ------------------------------------------------------------------------------------------------------

    def _replay(self, row: int, seed: int, tokens: list[int], agent: list[bool]) -> tuple[list[int], list[float]]:
        """Replay the agent's turns of a row in a new game; returns the tokens and rewards of the resulting row."""
        end, place = self.tokenizer.control.end_of_action, GamePlace(row, seed, 0)
        begun = dict(self._begin_all({row: place}))[row]
        opening, _ = self._fit_opening(place.read_opening(begun), place)
        ids = complete_opening(opening, self.tokenizer.control)
        rewards = [0.0] * len(ids)
        utterance: list[int] = []
        for token, is_agent, after_agent in zip(tokens, agent, [False, *agent], strict=False):
            if token == end and (is_agent or after_agent):
                place = place._replace(turn=place.turn + 1)
                played = place.read_turn(dict(self._play_all({row: utterance}, {row: place}))[row])
                reply, lost = self._fit_reply(played, place, self.row_length)
                if played.truncated or lost:
                    raise ValueError(f"{place} was truncated: reset its row without set_state.")
                turn = [*utterance, token, *complete_reply(reply, played.terminated, self.tokenizer.control)]
                earned = [0.0] * len(turn)
                earned[len(utterance) - (0 if is_agent else 1)] = played.reward
                ids, rewards, utterance = ids + turn, rewards + earned, []
            elif is_agent:
                utterance.append(token)
        return ids, torch.tensor(rewards, dtype=torch.float32).tolist()

    # -- text ----------------------------------------------------------------------------------------------------------

    def _fit_opening(self, text: str, place: GamePlace) -> tuple[list[int], bool]:
        """Ids of an opening that leaves room for an utterance, and whether a part of it was cut."""
        chat = self.tokenizer if isinstance(self.tokenizer, ChatTokenizer) else None
        encode = chat.encode_opening if chat else self.tokenizer.encode
        ids = self._encode_or_lose(encode, text, place)
        if ids is None:
            return chat.encode_opening("") if chat else [], True
        room = max(0, self.row_length - self.action_length - (1 if chat else 3))  # end of the action; of the state, too
        if len(ids) <= room:
            return ids, False
        self._lose_tokens(place, "opens", len(ids), room)
        prompt = chat.prompt_ids if chat else []  # asks for an utterance, so it is never cut
        return [*ids[: room - len(prompt)], *prompt], True

    def _fit_reply(self, turn: GameTurn, place: GamePlace, room: int) -> tuple[list[int], bool]:
        """Ids of a reply, and whether it was dropped. Replies longer than the row are cut when the row is written."""
        encode = self.tokenizer.encode
        if isinstance(self.tokenizer, ChatTokenizer):
            encode = partial(self.tokenizer.encode_reply, role=self._role(turn), answer=not turn.terminated)
        ids = self._encode_or_lose(encode, turn.text, place)
        room -= turn.terminated and self.tokenizer.control.marks_turns  # the end of the dialogue
        if self.on_bad_text == "raise" and ids and len(ids) > room:
            self._lose_tokens(place, "replies", len(ids), room)
        return ids or [], ids is None

    def _role(self, turn: GameTurn) -> str:
        """The role of the message of a game's reply in a chat."""
        is_tool = isinstance(turn.text, ToolText) and "assistant>tool" in self.tokenizer.row_format.joins  # type: ignore
        return "tool" if is_tool else "user"

    def _encode_or_lose(self, encode: Callable[[str], list[int]], text: str, place: GamePlace) -> list[int] | None:
        """Ids of a text, or None if the tokenizer cannot encode it."""
        try:
            return encode(text)
        except (ValueError, LookupError, TypeError) as error:
            found = f"wrote {shorten(text)}, which the tokenizer cannot encode ({str(error)[:200]})"
        self._lose(place, found, "use a tokenizer with all words of the game, or change the game's texts")
        return None

    def _lose_tokens(self, place: GamePlace, does: str, number: int, room: int) -> None:
        found = f"{does} with {number} tokens, of which {max(0, room)} fit into row_length={self.row_length}"
        self._lose(place, found, f"give at least row_length={self.row_length + number - room}")

    def _lose(self, place: GamePlace, found: str, remedy: str) -> None:
        """Raise, or warn that text is lost: once per environment for openings, once for replies."""
        if self.on_bad_text == "raise":
            raise ValueError(f"{place} {found}: {remedy}.")
        kind = "reply" if place.turn else "opening"
        if kind not in self._warned:
            self._warned.add(kind)
            done = "the row is truncated, and later ones will be without a warning"
            advice = f"To avoid this, {remedy}; on_bad_text='raise' raises an error instead."
            warnings.warn(f"{place} {found}: {done}. {advice}", stacklevel=2)

    def _read(self, ids: list[int]) -> str:
        """The game's form of an utterance."""
        text = self._decode(ids)
        return text if self.read is None else self.read(text)

    def _decode(self, ids: list[int]) -> str:
        try:
            return decode_action(self.tokenizer, ids)
        except (ValueError, LookupError):
            return UNREADABLE

    def _pad(self, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """int64 ``[N, R]``, right-padded, and the lengths, int64 ``[N]``."""
        length, tensor = [*map(len, texts)], partial(torch.tensor, dtype=torch.int64, device=self.device)
        width = max(length, default=0)
        rows = [[*text, *[self.tokenizer.control.pad] * (width - len(text))] for text in texts]
        return tensor(rows).reshape(self._n, width), tensor(length)


def _true(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()
