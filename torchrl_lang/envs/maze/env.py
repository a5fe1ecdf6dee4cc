"""The maze of LMRL-Gym as a language task in tensors, with one token for each text."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang._checks import Count, checked
from torchrl_lang.envs.language_env import EpisodeOptions, LanguageEnv, Reply, TaskState
from torchrl_lang.envs.maze.grid import FAILURE, MOVES, STAY, SUCCESS, Maze, Observation
from torchrl_lang.envs.reset_inputs import in_range, refuse_rows
from torchrl_lang.envs.row_state import Rows, Utterance
from torchrl_lang.functional import random_index
from torchrl_lang.functional.decisions import utterance_ends
from torchrl_lang.text.tokenizers import CharTokenizer


class MazeTexts(NamedTuple):
    """The texts of a maze as tokens, one each."""

    tokenizer: CharTokenizer
    """Its first ids are the texts about cells, then :data:`SUCCESS` and :data:`FAILURE`, then the moves."""
    shown: Tensor
    """int64 ``[C]``: the token that the agent is shown in each cell, in the goal that of success."""
    first_move: int
    """The token of the first of the :data:`MOVES`."""


@checked
def maze_texts(maze: Maze, observation: Observation) -> MazeTexts:
    """Number the texts of a maze.

    Examples:
        >>> from torchrl_lang.envs.maze import Maze, maze_texts
        >>> maze_texts(Maze(), "partial").shown[:6]
        tensor([0, 1, 2, 1, 3, 0])
    """
    texts = [maze.text(cell, observation) for cell in maze.starts.tolist()]
    symbols = [*dict.fromkeys(texts), SUCCESS, FAILURE, *MOVES]
    shown = torch.full((len(maze.cells),), symbols.index(SUCCESS))
    shown[maze.starts] = torch.tensor([symbols.index(text) for text in texts])
    return MazeTexts(CharTokenizer.from_alphabet(symbols), shown, symbols.index(next(iter(MOVES))))


class MazeEnv(LanguageEnv):
    """Find the goal of a maze from texts about the walls around, or also the positions (LMRL-Gym, arXiv 2311.18232).

    The agent writes ``move left``, ``move right``, ``move up`` or ``move down``. A move into a wall, and all that is no
    move, leave it where it is. The move that reaches the goal has reward 0 and the reply ``Success``, any other one
    reward -1, and what is no move -4. After ``max_moves`` turns any utterance has reward -1 and the reply ``Failure``
    and truncates the episode, so that the worst return of moves is ``-1 - max_moves``.

    A row is ``<s>There are walls above you, below you.</s>move left</a>There is a wall above you.</s>...``: the texts
    of LMRL-Gym without the line breaks at their ends. Each is one token, so a turn has four.

    Starts are uniform over the ``S`` cells other than the goal, and each ``S`` episodes from a multiple of ``S`` on
    begin once in every one. ``reset`` accepts ``start`` int64 ``[*B]``, an index of ``maze.starts``, as an entry of the
    tensordict or by keyword. With ``set_state=True`` it draws one of the starts that fit the row, or checks the given
    one.

    Args:
        maze: default the maze of LMRL-Gym.
        observation: ``"partial"``, the walls around the agent; ``"full"``, also the goal's position and its own.
        max_moves: number of turns in which the goal can be reached.
        **options: ``batch_size``, ``group_size``, ``seed`` and ``device``, as in
            :class:`~torchrl_lang.envs.LanguageEnv`.

    Raises:
        ValueError: an option is out of range; on ``reset``, ``start`` is out of range, or no start, or not the given
            one, fits a row.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.maze import MazeEnv
        >>> env = MazeEnv(batch_size=[1])
        >>> td = env.reset(start=torch.tensor([24]))
        >>> move = env.tokenizer.encode("move down") + [env.tokenizer.control.end_of_action]
        >>> td = env.step(td.set("action", torch.tensor([move])))["next"]
        >>> env.tokenizer.decode(td["tokens"][td["attention_mask"]])
        '<s>There are walls to your right, to your left.</s>move down</a>Success</s></eod>'
    """

    _reset_entries = ("start",)

    @checked
    def __init__(
        self,
        maze: Maze | None = None,
        *,
        observation: Observation = "partial",
        max_moves: Count = 100,
        **options: Unpack[EpisodeOptions],
    ) -> None:
        self.maze = Maze() if maze is None else maze
        self.observation, self.max_moves, self._number_of_starts = observation, max_moves, len(self.maze.starts)
        self._texts = maze_texts(self.maze, observation)
        # An opening of 3 tokens, 5 per turn (with one word too many), and the end-of-dialogue token.
        limits = {"row_length": 4 + 5 * (max_moves + 1), "action_length": 2, "max_turns": max_moves + 1}
        super().__init__(self._texts.tokenizer, **limits, **options)
        self._failure = self.tokenizer.encode(FAILURE)[0]
        self._shown: Tensor
        self._following: Tensor
        self._starts: Tensor
        self.register_buffer("_shown", self._texts.shown.to(self.device), persistent=False)
        self.register_buffer("_following", self.maze.following.to(self.device), persistent=False)
        self.register_buffer("_starts", self.maze.starts.to(self.device), persistent=False)

    def _open(self, episode: Tensor, fresh: Tensor, options: TensorDictBase | None) -> tuple[Tensor, Tensor, TaskState]:
        named, number = self._named(options, "start"), len(self._starts)
        if named is None:
            block = episode.div(number, rounding_mode="floor")
            start = (episode + random_index(self._key, block, number)) % number
        else:
            start = in_range("start", named, fresh, number)
        cell = self._starts[start]
        return self._shown[cell][:, None], torch.ones_like(cell), {"cell": cell, "episode": episode}

    def _reply(self, utterance: Utterance, task: TaskState, live: Tensor) -> tuple[Reply, TaskState]:
        named = utterance.tokens[:, 0] - self._texts.first_move
        is_move = (utterance.length == 1) & (named >= 0) & (named < len(MOVES))
        failed = self._turns >= self.max_moves
        cell = self._following[task["cell"], torch.where(is_move & ~failed, named, STAY)]
        arrived = cell == self.maze.goal
        reward = torch.where(is_move | failed, arrived.float() - 1, -4.0)
        text = torch.where(failed, self._failure, self._shown[cell])
        return Reply(text[:, None], torch.ones_like(text), reward, arrived), {**task, "cell": cell}

    def _restore(self, rows: Rows, task: TaskState, fresh: Tensor, options: TensorDictBase | None) -> TaskState:
        turns = read_turns(self._texts, rows.tokens, rows.attention_mask, rows.agent_mask)
        cell = self._starts.expand(len(rows.tokens), -1)  # of each start, int64 [N, S]
        fits = self._shown[cell] == rows.tokens[:, 1:2]
        for turn in range(turns.move.shape[1]):
            moved = self._following[cell, turns.move[:, turn, None]]
            seen = (self._shown[moved] == turns.text[:, turn, None]) & (moved != self.maze.goal)
            played = (turn < turns.number)[:, None]
            cell, fits = torch.where(played, moved, cell), fits & (seen | ~played)
        if self._named(options, "start") is not None:
            fits = fits & (self._starts == task["cell"][:, None])
        refuse_rows(rows.tokens, fresh, [(~fits.any(-1), "texts that no game from its start in this maze has")])
        rank = random_index(self._key, task["episode"], fits.sum(-1).clamp_min(1))
        start = (fits.cumsum(-1) <= rank[:, None]).sum(-1).clamp_max(len(self._starts) - 1)
        return {**task, "cell": cell.gather(-1, start[:, None])[:, 0]}


class MazeTurns(NamedTuple):
    """The turns of a batch of rows, in order."""

    move: Tensor
    """int64 ``[N, M]``: the number of the move, :data:`STAY` for what is no move."""
    text: Tensor
    """int64 ``[N, M]``: the token of the reply."""
    number: Tensor
    """int64 ``[N]``: number of turns."""


def read_turns(texts: MazeTexts, tokens: Tensor, attention_mask: Tensor, agent_mask: Tensor) -> MazeTurns:
    """Read the moves and replies of rows; ``M`` is the greatest number of turns.

    Args:
        texts: the texts of the maze.
        tokens: integer ``[N, T]``.
        attention_mask: bool ``[N, T]``.
        agent_mask: bool ``[N, T]``.
    """
    tokens = tokens.long()
    ends = utterance_ends(tokens, attention_mask, agent_mask, texts.tokenizer.control.end_of_action)
    row, end = ends.nonzero(as_tuple=True)
    turn, number = ends.cumsum(-1)[row, end] - 1, ends.sum(-1)
    named = tokens[row, end - 1] - texts.first_move
    alone = agent_mask[row, end - 1] & ~agent_mask[row, end - 2]
    is_move = alone & (named >= 0) & (named < len(MOVES))
    move = tokens.new_zeros(len(tokens), int(number.max()) if len(tokens) else 0)
    text = torch.zeros_like(move)
    move[row, turn] = torch.where(is_move, named, STAY)
    text[row, turn] = tokens[row, (end + 1).clamp_max(tokens.shape[-1] - 1)]
    return MazeTurns(move, text, number)
