"""The rules of the rooms and their best returns, in plain loops over one episode."""

import itertools
from functools import cache

MOVES = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)]


def moved(size, cell, action):
    row, column = cell[0] + MOVES[action][0], cell[1] + MOVES[action][1]
    return (min(max(row, 0), size - 1), min(max(column, 0), size - 1))


def room_step(size, goal, once):
    """``step(state, action)`` of a Dark Room: the next state, the reward and whether the task has ended."""

    def step(cell, action):
        cell = moved(size, cell, action)
        return cell, int(cell == goal), once and cell == goal

    return step


def key_door_step(size, key, door):
    """``step`` of Dark Key-to-Door; a state is a cell and whether the agent has the key."""

    def step(state, action):
        cell, has_key = state
        cell = moved(size, cell, action)
        if has_key:
            return (cell, True), int(cell == door), cell == door
        return (cell, cell == key), int(cell == key), False

    return step


def play(step, state, actions, length):
    """Rows of ``(state, reward, terminated, truncated)``, one for each action until the episode is done."""
    rows = []
    for number, action in enumerate(actions, 1):
        state, reward, ended = step(state, action)
        rows.append((state, reward, ended, not ended and number == length))
        if ended or number == length:
            break
    return rows


def best_return(step, state, length):
    """The largest return of an episode, by trying every action in every state with every number of steps left."""

    @cache
    def best(state, left):
        if left == 0:
            return 0
        following = [step(state, action) for action in range(5)]
        return max(reward + (0 if ended else best(cell, left - 1)) for cell, reward, ended in following)

    return best(state, length)


def cells(size):
    return list(itertools.product(range(size), repeat=2))
