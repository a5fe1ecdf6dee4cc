"""Wordle as a batch of language tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Unbounded

from torchrl_lang._checks import Count, checked
from torchrl_lang.envs.language_env import EpisodeOptions, LanguageEnv, Reply, TaskState
from torchrl_lang.envs.reset_inputs import in_range, refuse_rows
from torchrl_lang.envs.row_state import Rows, Utterance
from torchrl_lang.envs.seeded_env import token_ids
from torchrl_lang.envs.wordle.rules import GREEN, SOLVED, CandidateSets, Rules, answer, colours_of_codes
from torchrl_lang.envs.wordle.transcript import COLOUR_TOKENS, read_turns
from torchrl_lang.envs.wordle.words import (
    TURN_LENGTH,
    WORD_LENGTH,
    WordIndex,
    WordList,
    is_letter,
    load_words,
    wordle_tokenizer,
    words_and_guesses,
)
from torchrl_lang.functional.random import random_index
from torchrl_lang.schema import PRIVILEGED


class WordleEnv(LanguageEnv):
    """Wordle: guess a hidden word of five letters; each guess gets five colours.

    A row is ``<a>crane</a><b><y><b><b><g></s>purge</a><g><g><g><g><g></s></eod>``. The reward is 0 for the guess that
    solves the game and -1 for any other, so the return is ``-(k - 1)`` for a game solved by the k-th guess and
    ``-max_tries`` for a lost game. The game terminates when it is solved or all tries are used.

    A guess is invalid if it does not consist of five letters or, with ``guesses``, is not on the list. It costs a try,
    has reward -1 and gets no colours.

    ``reset`` accepts ``hidden_word``, int64 ``[*B]``, the word's index for each row that is reset, as an entry of its
    tensordict or by keyword, ``reset(hidden_word=...)``. Use the keyword if the environment is wrapped:
    ``TransformedEnv`` and ``ParallelEnv`` remove the entry (see :class:`~torchrl_lang.envs.LanguageEnv`). With
    ``set_state=True`` the game continues from given rows. The hidden word is then the given one, which must agree with
    all colours so far, or drawn uniformly from the words that do. Only ``privileged`` shows the hidden word.

    A game takes ``13 * T + 55`` bytes of state and ``14 * T + 7`` of observation, about 1 KB each with six tries (``T``
    is 74), whatever the list. With ``consistent`` the state takes another ``W / 8`` bytes (282 for the 2,250 shipped),
    the observation as many if packed and ``W`` if not. Data shared by all games takes 56 bytes per word of a list, and
    390 more with the sets.

    Args:
        words: the possible hidden words, a list or the path of a file with one word per line; default
            :func:`~torchrl_lang.envs.wordle.words.common_words`.
        batch_size: number of parallel games, as a torch size.
        rules: ``"official"`` counts repeated letters as the newspaper's game does, ``"ilql"`` does not (see
            :func:`~torchrl_lang.envs.wordle.rules.feedback`).
        max_tries: number of guesses in a game.
        guesses: the valid guesses: any five letters by default, ``"words"`` for the possible hidden words, or a list
            or path of more words (hidden words are always valid).
        action_length: width of an action in tokens, at least 6: a word and its end.
        consistent: adds the observation ``consistent``, the words that agree with all colours so far: as bool
            ``[*B, W]``, or with ``"packed"`` as bits, uint8 ``[*B, ceil(W / 8)]``, which
            :meth:`CandidateSets.members <torchrl_lang.envs.wordle.rules.CandidateSets.members>` unpacks.
        privileged: adds the observation ``privileged``, the letters of the hidden word, int64 ``[*B, 5]``, for the
            critic of :class:`~torchrl_lang.modules.PrivilegedTrunk`. No player may read it.
        group_size: as many games have the same hidden word, see :class:`~torchrl_lang.envs.LanguageEnv`.
        seed: seed of the hidden words.
        device: device of the tensors.

    Raises:
        ValueError: an option is out of range or a word list is invalid; on ``reset``, a hidden word is out of range or
            disagrees with the given row, or no game has such a row.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.envs.wordle import WordleEnv
        >>> env = WordleEnv(["crane", "purge", "slate"], batch_size=[1], seed=0)
        >>> td = env.reset(TensorDict(hidden_word=torch.tensor([1]), batch_size=[1]))
        >>> for word in ("crane", "purge"):
        ...     td["action"] = torch.tensor([env.tokenizer.encode(word) + [env.tokenizer.control.end_of_action]])
        ...     td = env.step(td)["next"]
        >>> env.tokenizer.decode(td["tokens"][td["attention_mask"]])
        '<a>crane</a><b><y><b><b><g></s>purge</a><g><g><g><g><g></s></eod>'
        >>> td["reward"].item(), td["terminated"].item()
        (0.0, True)
    """

    _reset_entries = ("hidden_word",)
    _spared_state = ("possible",)

    @checked
    def __init__(
        self,
        words: WordList | None = None,
        batch_size: int | Sequence[int] = (1,),
        *,
        rules: Rules = "official",
        max_tries: Count = 6,
        guesses: WordList | None = None,
        action_length: Annotated[int, WORD_LENGTH + 1] = WORD_LENGTH + 1,
        consistent: Literal[False, True, "packed"] = False,
        privileged: bool = False,
        group_size: int | None = None,
        seed: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        word_list = load_words(words)
        self.n_words, self.observes_privileged, self.observes_consistent = len(word_list), privileged, consistent
        self._new_observations = ("consistent",) * (consistent is True) + (PRIVILEGED,)
        turn = max(TURN_LENGTH, action_length + 1)  # an invalid guess may be longer than a valid one's turn
        own: EpisodeOptions = {"batch_size": batch_size, "group_size": group_size, "seed": seed, "device": device}
        super().__init__(wordle_tokenizer(), row_length=1 + turn * max_tries + 1, action_length=action_length, **own)
        self.words, self.max_tries, self.rules = tuple(word_list), max_tries, rules
        self._number_of_starts = len(word_list)
        self._index = WordIndex(word_list, self.device)
        self._valid = None if guesses is None else WordIndex(words_and_guesses(word_list, guesses), self.device)
        self._sets = CandidateSets(self._index.letters, rules)
        self._colours: Tensor
        self._answers: Tensor
        colours = colours_of_codes(self.device)
        self.register_buffer("_colours", colours, persistent=False)
        self.register_buffer("_answers", torch.tensor(COLOUR_TOKENS, device=self.device)[colours], persistent=False)

    @property
    def hidden_word(self) -> Tensor:
        """Index of each game's hidden word, int64 ``[*B]``, a copy."""
        return self._current("word")

    def is_valid(self, guess: Tensor) -> Tensor:
        """True for valid guesses: int64 tokens ``[..., 5]`` to bool ``[...]``."""
        if self._valid is not None:
            return self._valid.find(guess) >= 0
        return is_letter(guess).all(-1)

    def _open(self, episode: Tensor, fresh: Tensor, options: TensorDictBase | None) -> tuple[Tensor, Tensor, TaskState]:
        word = random_index(self._key, episode, self.n_words)
        given = self._named(options, "hidden_word")
        word = word if given is None else in_range("hidden_word", given, fresh, self.n_words)
        task = {"word": word, "tries": torch.zeros_like(word), "episode": episode}
        if self.observes_consistent:
            task["possible"] = self._sets.all(self._n)
        return torch.zeros((self._n, 0), dtype=torch.int64, device=self.device), torch.zeros_like(word), task

    def _reply(self, utterance: Utterance, task: TaskState, live: Tensor) -> tuple[Reply, TaskState]:
        guess = utterance.tokens[:, :WORD_LENGTH]
        valid = (utterance.length == WORD_LENGTH) & self.is_valid(guess)
        code = answer(guess, self._index.letters.index_select(0, task["word"]), self.rules).to(torch.int32)
        solved = valid & (code == SOLVED)
        tries = task["tries"] + 1
        task = {**task, "tries": tries}
        if self.observes_consistent:
            colours = self._colours.index_select(0, code)
            task["possible"] = self._sets.filter(task["possible"], guess, colours, heard=valid & live)
        reward, terminated = torch.where(solved, 0.0, -1.0), solved | (tries >= self.max_tries)
        return Reply(self._answers.index_select(0, code), torch.where(valid, WORD_LENGTH, 0), reward, terminated), task

    def _restore(self, rows: Rows, task: TaskState, fresh: Tensor, options: TensorDictBase | None) -> TaskState:
        turns = read_turns(rows.tokens, rows.attention_mask, rows.agent_mask)
        possible = turns.filter(self._sets)
        size = self._sets.size(possible)
        solved = (turns.colours == GREEN).all(-1).any(-1)
        if self._named(options, "hidden_word") is None:
            word = self._sets.pick(possible, random_index(self._key, task["episode"], size.clamp_min(1)))
            agrees = size > 0
        else:
            word = task["word"]
            agrees = self._sets.members(possible).gather(-1, word[:, None])[:, 0]
        wrong, remedy = self._valid_guesses(rows) != turns.answered, "use rows played with these words and rules"
        faults = [
            (wrong, f"a valid guess without colours, or colours of another: {remedy}"),
            (size == 0, f"colours that fit no word of the list: {remedy}"),
            (solved | (turns.tries >= self.max_tries), "no guess left: the game is solved or out of tries"),
            (~agrees, "colours that do not fit its hidden_word: omit it, or give one that fits"),
        ]
        refuse_rows(rows.tokens, fresh, faults)
        task = {**task, "word": word, "tries": turns.tries}
        if self.observes_consistent:
            task["possible"] = possible
        return task

    def _valid_guesses(self, rows: Rows) -> Tensor:
        """Number of valid guesses in each row, int64 ``[N]``."""
        end = self.tokenizer.control.end_of_action
        said = torch.where(rows.agent_mask, rows.tokens, end).unfold(-1, WORD_LENGTH + 2, 1)  # between ends
        alone = (said[..., 0] == end) & (said[..., -1] == end)
        return (alone & self.is_valid(said[..., 1:-1])).sum(-1)

    def _task_observation(self, task: TaskState) -> Mapping[str, Tensor]:
        observed = {}
        if self.observes_consistent:
            packed = task["possible"]
            observed["consistent"] = packed if self.observes_consistent == "packed" else self._sets.members(packed)
        if self.observes_privileged:
            observed[PRIVILEGED] = self._index.letters.index_select(0, task["word"])
        return observed

    def _task_observation_spec(self) -> dict[str, Any]:
        batch, n, device, specs = self.batch_size, self.n_words, self.device, {}
        if self.observes_consistent == "packed":
            specs["consistent"] = Unbounded(shape=(*batch, -(-n // 8)), dtype=torch.uint8, device=device)
        elif self.observes_consistent:
            specs["consistent"] = Binary(n=n, shape=(*batch, n), dtype=torch.bool, device=device)
        if self.observes_privileged:
            specs[PRIVILEGED] = token_ids(self.tokenizer.vocab_size, batch, WORD_LENGTH, device=device)
        return specs
