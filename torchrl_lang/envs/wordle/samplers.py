"""Games that branch off from an expert's: from every state, and the adversarial mixture of the ILQL paper."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_lang._checks import Count, checked
from torchrl_lang._random_stream import seeded_generators
from torchrl_lang.data.generate import EpisodeSampler, Policy, cat_rows, play_to_end, seed_of_games
from torchrl_lang.envs.wordle.env import WordleEnv
from torchrl_lang.envs.wordle.mixtures import MixturePlayer
from torchrl_lang.envs.wordle.optimal import OptimalPlayer
from torchrl_lang.envs.wordle.players import OPENERS, RandomWordPlayer, RepeatPlayer, WrongPlayer
from torchrl_lang.envs.wordle.words import TRIES, TURN_LENGTH, WORD_LENGTH, WordIndex, wordle_tokenizer
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, ROW_KEYS, TERMINATED, TOKENS, TRAIN_MASK, TRUNCATED, entry

__all__ = ["AdversarialGames", "BranchedGames", "GuessPair", "continue_games", "guess_pairs", "rows_before"]

KIND, GAME, BRANCH_TURN = "kind", "game", "branch_turn"
"""Entries of rows, int64 ``[N]``: the number of a row's kind, of its expert game, and of the guesses it continues."""

_OPENING = 2
"""Number of the expert's guesses that an adversarial game begins with."""

_CONTROL = wordle_tokenizer().control


class _ExpertGames(EpisodeSampler):
    """Games of an expert, and for each of them other games. Abstract: subclasses implement :meth:`_others`."""

    kinds: tuple[str, ...]

    def __init__(self, env: WordleEnv, players: dict[str, Policy], *, train_on_opening: bool, **numbers: int) -> None:
        super().__init__(env.tokenizer, env.row_length)
        self.env, self.players, self.train_on_opening, self.numbers = env, players, train_on_opening, numbers

    @abstractmethod
    def _others(self, expert: TensorDict, game: Tensor) -> list[TensorDict]:
        """The tagged rows of the other games, of the expert's rows and the numbers of their games."""

    def __call__(self, numbers: range, seed: int) -> TensorDict:
        """See ``EpisodeSampler.__call__``; the numbers are those of the expert's games."""
        seed, game = seed_of_games(seed, numbers), torch.arange(numbers.start, numbers.stop)
        with seeded_generators(seed, *self.players.values()):
            self.env.set_seed(seed)
            expert = _new_games(self.env, self.players["expert"], len(numbers))
            rows = cat_rows([block for block in [_tagged(expert, 0, game), *self._others(expert, game)] if len(block)])
        rows = rows[rows.get(GAME).argsort(stable=True)]
        if self.train_on_opening:
            return rows
        continued = _guesses_before(_guess_ends(rows)) < rows.get(BRANCH_TURN)[:, None]
        return rows.set(TRAIN_MASK, ~(entry(rows, AGENT_MASK) & continued))

    def notes(self) -> dict[str, Any]:
        """See ``EpisodeSampler.notes``; of six tries also the recipes' name of the task."""
        task = {"task": "wordle"} if self.env.max_tries == TRIES else {}
        env = {"words": list(self.env.words), "rules": self.env.rules, "max_tries": self.env.max_tries}
        names = {name: type(player).__name__ for name, player in self.players.items()}
        options = {**self.numbers, "train_on_opening": self.train_on_opening}
        return {**task, **env, **names, **super().notes(), "kinds": list(self.kinds), **options}


class BranchedGames(_ExpertGames):
    """Games of an expert, and from every state of each game ``branches`` games in which a suboptimal player continues.

    A branch begins with the expert's guesses and their colours and continues from there, with a hidden word drawn from
    those that fit the colours (see :func:`continue_games`). (The ILQL paper's released code begins a new game instead.)
    Beside the entries of rows there are:

    ===============  ================  ===============================================================================
    key              dtype, shape      meaning
    ===============  ================  ===============================================================================
    ``kind``         int64 ``[N]``     0 the expert's game, 1 a branch (:attr:`kinds`)
    ``game``         int64 ``[N]``     the number of the expert's game; its rows are adjacent, the expert's own first
    ``branch_turn``  int64 ``[N]``     number of the expert's guesses that a branch begins with; 0 in the expert's rows
    ``train_mask``   bool ``[N, T]``   False on those guesses; only if not ``train_on_opening``
    ===============  ================  ===============================================================================

    The expert's guesses stay in ``agent_mask``, so a branch is a complete row of the game with all its rewards. Losses
    exclude them by ``train_mask``, because the expert's row has them already; to include them, exclude the entry:
    ``rows.exclude("train_mask")``.

    Args:
        env: the environment, of any batch size; it is seeded and not closed.
        expert: plays the whole games; default :class:`~torchrl_lang.envs.wordle.OptimalPlayer` with the paper's
            openers.
        suboptimal: plays the branches; default :class:`~torchrl_lang.envs.wordle.WrongPlayer`.
        branches: number of branches of each state.
        train_on_opening: write no ``train_mask``.

    Raises:
        ValueError: ``branches`` is below 1.

    Examples:
        >>> from torchrl_lang.envs.wordle import WordleEnv
        >>> from torchrl_lang.envs.wordle.samplers import BranchedGames
        >>> games = BranchedGames(WordleEnv(["crane", "slate", "point", "crate"], batch_size=[8]), branches=2)
        >>> rows = games(range(3), seed=0)
        >>> rows["game"].unique().tolist(), int((rows["kind"] == 0).sum())
        ([0, 1, 2], 3)
        >>> states = rows["branch_turn"][rows["game"] == 0].tolist()
        >>> states[:3]  # the expert's game, and two branches from its beginning
        [0, 0, 0]
    """

    kinds = ("expert", "branch")
    """Names of the kinds, in the order of their numbers."""

    @checked
    def __init__(
        self,
        env: WordleEnv,
        expert: Policy | None = None,
        suboptimal: Policy | None = None,
        *,
        branches: Count = 1,
        train_on_opening: bool = False,
    ) -> None:
        suboptimal = suboptimal or WrongPlayer(env.words, rules=env.rules, action_length=env.action_length)
        players = {"expert": expert or optimal_player(env), "suboptimal": suboptimal}
        super().__init__(env, players, train_on_opening=train_on_opening, branches=branches)

    def _others(self, expert: TensorDict, game: Tensor) -> list[TensorDict]:
        states = _guess_ends(expert).sum(-1)
        row = torch.arange(len(expert)).repeat_interleave(states)
        turn = torch.arange(len(row)) - (states.cumsum(0) - states)[row]
        row, turn = (each.repeat_interleave(self.numbers["branches"]) for each in (row, turn))
        branches = continue_games(self.env, self.players["suboptimal"], rows_before(expert[row], turn))
        return [_tagged(branches, 1, game[row], turn)]


class AdversarialGames(_ExpertGames):
    """Games of an expert, adversarial continuations of them, and suboptimal games (arXiv 2206.11871, section 5).

    Of each expert game of three or more guesses, ``adversarial_games`` games begin with its first two guesses and are
    continued by an adversary, who repeats one of them. ``suboptimal_games`` games for each expert game are played from
    the beginning by a mixture of consistent and random words. So after the expert's first guesses most games are lost,
    and a method that averages over the data (single-step RL) ranks them below the suboptimal ones, while a multi-step
    method finds the expert's continuation.

    Rows have ``kind`` (0 expert, 1 adversarial, 2 suboptimal, :attr:`kinds`), ``game`` and ``branch_turn`` (2 in
    adversarial rows), as in :class:`BranchedGames`. Losses train on the expert's guesses of adversarial rows, too:
    without them there would be nothing to average over.

    Args:
        env: the environment, of any batch size; it is seeded and not closed.
        expert: default :class:`~torchrl_lang.envs.wordle.OptimalPlayer` with the paper's openers.
        adversary: default :class:`~torchrl_lang.envs.wordle.RepeatPlayer` with ``first_n=2``.
        suboptimal: default :class:`~torchrl_lang.envs.wordle.RandomWordPlayer` with ``prob_smart=0.5``.
        adversarial_games: number of adversarial games of each expert game of three or more guesses.
        suboptimal_games: number of suboptimal games for each expert game.
        train_on_opening: with False, a ``train_mask`` excludes the expert's guesses of adversarial rows.

    Raises:
        ValueError: a number is negative.

    Examples:
        >>> from torchrl_lang.envs.wordle import WordleEnv, demo_words
        >>> from torchrl_lang.envs.wordle.samplers import AdversarialGames
        >>> games = AdversarialGames(WordleEnv(demo_words(50), batch_size=[16]), suboptimal_games=3)
        >>> rows = games(range(10), seed=0)
        >>> [int((rows["kind"] == kind).sum()) for kind in (0, 2)]
        [10, 30]
    """

    kinds = ("expert", "adversarial", "suboptimal")
    """Names of the kinds, in the order of their numbers."""

    @checked
    def __init__(
        self,
        env: WordleEnv,
        expert: Policy | None = None,
        adversary: Policy | None = None,
        suboptimal: Policy | None = None,
        *,
        adversarial_games: Annotated[int, 0] = 5,
        suboptimal_games: Annotated[int, 0] = 5,
        train_on_opening: bool = True,
    ) -> None:
        options: Any = {"rules": env.rules, "action_length": env.action_length}
        players = {
            "expert": expert or optimal_player(env),
            "adversary": adversary or RepeatPlayer(env.words, first_n=_OPENING, **options),
            "suboptimal": suboptimal or RandomWordPlayer(env.words, prob_smart=0.5, **options),
        }
        numbers = {"adversarial_games": adversarial_games, "suboptimal_games": suboptimal_games}
        super().__init__(env, players, train_on_opening=train_on_opening, **numbers)

    def _others(self, expert: TensorDict, game: Tensor) -> list[TensorDict]:
        blocks, (lost, own) = [], self.numbers.values()
        long = (_guess_ends(expert).sum(-1) > _OPENING).nonzero().flatten().repeat_interleave(lost)
        if len(long):
            states = rows_before(expert[long], torch.full_like(long, _OPENING))
            continued = continue_games(self.env, self.players["adversary"], states)
            blocks.append(_tagged(continued, 1, game[long], _OPENING))
        if own:
            others = _new_games(self.env, self.players["suboptimal"], len(expert) * own)
            blocks.append(_tagged(others, 2, game.repeat_interleave(own)))
        return blocks


def optimal_player(env: WordleEnv) -> OptimalPlayer:
    """The paper's expert for the words of an environment, with those of its openers that are valid there."""
    valid = env.is_valid(WordIndex(OPENERS).letters.to(env.device)).tolist()
    openers = [word for word, is_valid in zip(OPENERS, valid, strict=True) if is_valid]
    return OptimalPlayer(env.words, rules=env.rules, openers=openers or None, action_length=env.action_length)


# -- states of games, and play from them -------------------------------------------------------------------------------


def rows_before(rows: TensorDictBase, turn: Tensor) -> TensorDict:
    """The rows as they were before guess number ``turn``, counted from zero: the states of a game.

    Args:
        rows: rows ``[N, T]`` of Wordle.
        turn: int64 ``[N]``, each below the row's number of guesses.

    Returns:
        The entries of a row, ``[N, T]``; ``WordleEnv.reset(set_state=True)`` accepts them.

    Raises:
        ValueError: a row has no guess of this number.

    Examples:
        >>> import torch
        >>> from torchrl_lang.data.generate import play_to_end
        >>> from torchrl_lang.envs.wordle import RandomWordPlayer, WordleEnv
        >>> from torchrl_lang.envs.wordle.samplers import rows_before
        >>> env = WordleEnv(["fuzzy"], batch_size=[1], seed=0)
        >>> rows = play_to_end(env, RandomWordPlayer(["crane"], seed=0))
        >>> state = rows_before(rows, torch.tensor([1]))
        >>> env.tokenizer.decode(state["tokens"][state["attention_mask"]])
        '<a>crane</a><b><b><b><b><b></s>'
    """
    tokens, attention, agent, reward = (entry(rows, key) for key in ROW_KEYS)
    ends = _guess_ends(rows)
    guesses = ends.sum(-1)
    if ((turn < 0) | (turn >= guesses)).any():
        raise ValueError(f"turn must be below each row's number of guesses, at most {int(guesses.amax())}.")
    made, guessed = _guesses_before(ends), agent | ends
    kept = attention & ((made < turn[:, None]) | ((made == turn[:, None]) & ~guessed))
    values = torch.where(kept, tokens.long(), _CONTROL.pad), kept, agent & kept, reward * kept
    state = dict(zip(ROW_KEYS, values, strict=True))
    return TensorDict(state, batch_size=rows.batch_size, device=tokens.device)


def continue_games(env: WordleEnv, policy: Policy, rows: TensorDictBase) -> TensorDict:
    """Let a policy play unfinished games to their end, on from the state of each row.

    The hidden word of each game is drawn uniformly from the words that fit the row's colours: as the environment draws
    it uniformly at first, this is its distribution given the game so far.

    Args:
        env: the environment, of any batch size; games are played in batches of this size.
        policy: reads a row, writes ``action``.
        rows: unfinished rows ``[N, T]`` of this environment, ``N`` at least 1.

    Returns:
        The finished rows ``[N]`` in the same order, on the CPU.

    Raises:
        ValueError: a row is finished, or no word of the environment fits its colours.

    Examples:
        >>> import torch
        >>> from torchrl_lang.data.generate import play_to_end
        >>> from torchrl_lang.envs.wordle import RandomWordPlayer, WordleEnv
        >>> from torchrl_lang.envs.wordle.samplers import continue_games, rows_before
        >>> words = ["crane", "slate", "point", "crate"]
        >>> env, player = WordleEnv(words, batch_size=[4], seed=0), RandomWordPlayer(words, seed=0)
        >>> states = rows_before(play_to_end(env, player), torch.zeros(4, dtype=torch.int64))
        >>> bool(continue_games(env, player, states)["terminated"].all())
        True
    """
    n, blocks = env.batch_size.numel(), []
    for block in rows.select(*ROW_KEYS).split(n):
        filled = block[torch.arange(n) % len(block)]  # the last block may be smaller
        given: dict[str, Any] = {key: filled.get(key).reshape(*env.batch_size, -1) for key in ROW_KEYS}
        start = env.reset(set_state=True, **given)
        for player in policy.modules() if isinstance(policy, nn.Module) else ():
            if isinstance(player, MixturePlayer):
                player.begin_games()
        blocks.append(play_to_end(env, policy, start, reward_key=None).cpu()[: len(block)])
    return cat_rows(blocks)


def _new_games(env: WordleEnv, policy: Policy, games: int) -> TensorDict:
    """Finished rows ``[games]`` of new games, on the CPU."""
    waves = range(0, games, env.batch_size.numel())
    return cat_rows([play_to_end(env, policy, reward_key=None).cpu() for _ in waves])[:games]


def _tagged(rows: TensorDict, kind: int, game: Tensor, turn: Tensor | int = 0) -> TensorDict:
    """The rows with their kind, the number of their expert game, and the number of guesses that they continue."""
    entries = {KIND: torch.full_like(game, kind), GAME: game, BRANCH_TURN: torch.zeros_like(game) + turn}
    return rows.select(*ROW_KEYS, TERMINATED, TRUNCATED).update(entries)


def _guess_ends(rows: TensorDictBase) -> Tensor:
    """The tokens that end a guess, bool ``[N, T]``."""
    return (entry(rows, TOKENS) == _CONTROL.end_of_action) & entry(rows, ATTENTION_MASK)


def _guesses_before(ends: Tensor) -> Tensor:
    """Number of guesses that ended before each token, int64 ``[N, T]``."""
    return ends.cumsum(-1) - ends.long()


# -- pairs of guesses --------------------------------------------------------------------------------------------------


class GuessPair(NamedTuple):
    """Two guesses in the same state, as :func:`guess_pairs` finds them."""

    tokens: Tensor
    """int64 ``[T]``, the row before the guess, without padding."""
    expert: Tensor
    """int64 ``[5]``, the expert's guess."""
    other: Tensor
    """int64 ``[5]``, the other player's guess."""


def guess_pairs(rows: TensorDictBase, kind: int = 1) -> list[GuessPair]:
    """For each row of a kind, the expert's guess in the state where the row branches off, and the row's own.

    They are what a ranking by learned values is tested on: ``Comparison(*pair)`` is an input of
    :func:`~torchrl_lang.evaluation.preference_rates`.

    Args:
        rows: rows of :class:`BranchedGames` or :class:`AdversarialGames`, e.g. ``dataset[:]``; all guesses are valid.
        kind: the number of the kind: 1 for branches, or for the adversary's guesses after the expert's first two; 2 for
            first guesses of the suboptimal player.

    Returns:
        The pairs in the order of the rows. Rows whose guess is the expert's, or whose expert's row is missing, have
        none.

    Examples:
        >>> from torchrl_lang.envs.wordle import RandomWordPlayer, WordIndex, WordleEnv
        >>> from torchrl_lang.envs.wordle.samplers import BranchedGames, guess_pairs
        >>> env = WordleEnv(["crane"], batch_size=[2])
        >>> games = BranchedGames(env, RandomWordPlayer(["crane"]), RandomWordPlayer(["slate"]), branches=2)
        >>> pairs = guess_pairs(games(range(1), seed=0))
        >>> [(WordIndex.text(pair.expert), WordIndex.text(pair.other)) for pair in pairs]
        [('crane', 'slate'), ('crane', 'slate')]
    """
    tokens, kinds = entry(rows, TOKENS).long(), entry(rows, KIND)
    games, turns = entry(rows, GAME).tolist(), entry(rows, BRANCH_TURN).tolist()
    expert_row = {game: row for row, game in enumerate(games) if kinds[row] == 0}
    guesses, pairs = _guess_ends(rows).sum(-1), []
    for row in (kinds == kind).nonzero().flatten().tolist():
        expert, length = expert_row.get(games[row]), 1 + turns[row] * TURN_LENGTH
        if expert is None or guesses[expert] <= turns[row]:
            continue
        best, other = (tokens[each, length : length + WORD_LENGTH] for each in (expert, row))
        if not torch.equal(best, other):
            pairs.append(GuessPair(tokens[row, :length], best, other))
    return pairs
