"""The maze of LMRL-Gym (arXiv 2311.18232): a grid, its description in words, and the language task in tensors."""

from __future__ import annotations

from typing import Literal, NamedTuple, Unpack

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang._checks import Count, checked
from torchrl_lang.envs.language_env import EpisodeOptions, LanguageEnv, Reply, TaskState
from torchrl_lang.envs.reset_inputs import in_range, refuse_rows
from torchrl_lang.envs.row_state import Rows, Utterance
from torchrl_lang.functional.decisions import utterance_ends
from torchrl_lang.functional.random import random_index
from torchrl_lang.text.tokenizers import CharTokenizer

Observation = Literal["partial", "full"]
"""The agent is shown the walls around it (``"partial"``), or also the goal's position and its own (``"full"``)."""

MOVES = {"move left": (0, -1), "move right": (0, 1), "move up": (-1, 0), "move down": (1, 0)}
"""The actions, and the row and column by which each moves the agent."""

STAY = len(MOVES)
"""The number, after those of the moves, of what is no move."""

SUCCESS, FAILURE = "Success", "Failure"
"""The replies to the move that reaches the goal, and to the turn after the last move."""

DOUBLE_T = """
#############
#.....#.....#
###.#####.###
###.#####.###
###.#####.###
###.......###
######.######
######.######
######G######
#############
"""
"""The maze of LMRL-Gym: two T-shaped parts that meet in a third one."""

_SIDES = {"to your right": (0, 1), "to your left": (0, -1), "above you": (-1, 0), "below you": (1, 0)}


class Maze:
    r"""A maze: a grid of free cells and walls, with a goal. Cells are numbered from 0 in reading order.

    Args:
        plan: one line a row: ``#`` a wall, ``.`` a free cell, ``G`` the goal; walls all around.

    Raises:
        ValueError: the plan has other characters, an open border or not one goal, or no path from a cell to it.

    Examples:
        >>> from torchrl_lang.envs.maze import Maze
        >>> maze = Maze()
        >>> len(maze.cells), maze.cells[maze.goal]
        (26, (8, 6))
        >>> maze.text(1, "partial")
        'There are walls above you, below you.'
        >>> Maze("####\n#.G#\n####").following.tolist()
        [[0, 1, 0, 0, 0], [0, 1, 1, 1, 1]]
    """

    cells: tuple[tuple[int, int], ...]
    """Row and column of each free cell."""
    goal: int
    """The number of the goal's cell."""
    starts: Tensor
    """int64 ``[S]``, the numbers of all other cells."""
    following: Tensor
    """int64 ``[C, 5]``, the cell after each of the :data:`MOVES`, and after what is no move."""

    def __init__(self, plan: str = DOUBLE_T) -> None:
        lines = plan.split()
        edge = {*"".join([*lines[:1], *lines[-1:], *(line[0] + line[-1] for line in lines)])}
        rectangle = edge == {"#"} and len({*map(len, lines)}) == 1
        if not rectangle or {*plan} - {"\n"} != {*"#.G"} or plan.count("G") != 1:
            raise ValueError(f"A maze is lines of #, . and one G, of one length, with walls all around, got {plan!r}.")
        free = [(row, column) for row, line in enumerate(lines) for column, at in enumerate(line) if at != "#"]
        number = {cell: index for index, cell in enumerate(free)}
        steps = [*MOVES.values(), (0, 0)]
        following = [[number.get((y + down, x + right), number[y, x]) for down, right in steps] for y, x in free]
        self.cells, self.following = tuple(free), torch.tensor(following)
        is_goal = torch.tensor([lines[y][x] == "G" for y, x in free])
        self.goal, self.starts = int(is_goal.long().argmax()), (~is_goal).nonzero()[:, 0]
        leads_there = is_goal
        for _ in free:
            leads_there = leads_there[self.following].any(-1)
        if not leads_there.all():
            raise ValueError(f"No path leads from {free[int(leads_there.long().argmin())]} to the goal of {plan!r}.")

    def text(self, cell: int, observation: Observation) -> str:
        """Describe a cell as the agent is shown it, without the line break at the end."""
        row, column = self.cells[cell]
        walls = [side for side, (down, right) in _SIDES.items() if (row + down, column + right) not in self.cells]
        around = "There are no walls near you."
        if walls:
            around = f"There {'is a wall' if len(walls) == 1 else 'are walls'} {', '.join(walls)}."
        if observation == "partial":
            return around
        goal, own = (_digits(self.cells[each]) for each in (self.goal, cell))
        return f"The goal is at position {goal}. Your current position is at position {own}. {around}"


def _digits(cell: tuple[int, int]) -> str:
    """A position as LMRL-Gym writes it, with a space between digits: ``1, 1 0``."""
    return ", ".join(" ".join(str(number)) for number in cell)


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
