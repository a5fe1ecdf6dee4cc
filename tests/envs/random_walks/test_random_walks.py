"""Shortest paths on directed graphs: the graph, the environment, its players and its metric, by hand."""

import math

import pytest
import torch
from tensordict import TensorDict

from tests.envs.helpers import say_after, transcript
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs.random_walks import (
    DirectedGraph,
    RandomWalkPlayer,
    RandomWalksEnv,
    ShortestPathPlayer,
    random_graph,
    walk_optimality,
)
from torchrl_lang.envs.random_walks.players import FrequentMovePlayer

# 3 -> 2 -> 1 -> 0 with a short cut 3 -> 1, and a detour 2 -> 3; node 4 leads to 3, nothing leads to 4.
EDGES = torch.zeros(5, 5, dtype=torch.bool)
for a, b in [(3, 2), (2, 1), (1, 0), (3, 1), (2, 3), (4, 3)]:
    EDGES[a, b] = True
GRAPH = DirectedGraph(EDGES)


def play(env, start, moves):
    """Rewards, the row and whether the walk was terminated."""
    td, rewards = env.reset(start=torch.tensor([start])), []
    for move in moves:
        td = say_after(env, td, move)
        rewards.append(td["reward"].item())
    return rewards, transcript(env, td), bool(td["terminated"])


def floyd_warshall(edges):
    far = torch.where(edges, 1.0, float("inf")).fill_diagonal_(0)
    for node in range(len(edges)):
        far = torch.minimum(far, far[:, node, None] + far[None, node])
    return far


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", [{"edge_probability": 0.15}, {"out_degree": 2}], ids=str)
def test_distances_are_those_of_floyd_and_warshall(seed, options):
    graph = random_graph(15, goal=3, seed=seed, **options)
    assert graph.distance.tolist() == floyd_warshall(graph.edges)[:, 3].long().tolist()
    assert graph.edges.any(-1).all()


def test_moves_by_hand():
    env = RandomWalksEnv(GRAPH, batch_size=[1], seed=0)
    assert play(env, 3, "ba") == ([-1.0, -1.0], "<s>d</s>b</a>b</s>a</a>a</s></eod>", True)
    # No edge from d to a, two nodes, no node: each costs a move and the walk stays where it is.
    rewards, row, terminated = play(env, 3, ["a", "bb", "", "b"])
    assert rewards == [-1.0] * 4
    assert not terminated
    assert row.startswith("<s>d</s>a</a>d</s>")
    assert row.endswith("d</s>b</a>b</s>")


def test_a_walk_is_truncated_after_its_moves_and_terminated_at_the_goal_with_its_last():
    env = RandomWalksEnv(GRAPH, max_turns=2, batch_size=[1], seed=0)
    for moves, ends in (("db", [(False, False), (False, True)]), ("ba", [(False, False), (True, False)])):
        td = env.reset(start=torch.tensor([2]))
        for move, end in zip(moves, ends, strict=True):
            td = say_after(env, td, move)
            assert (bool(td["terminated"]), bool(td["truncated"])) == end


def test_a_shortest_path_is_as_long_as_the_distance():
    graph = random_graph(30, out_degree=2, seed=1)
    env = RandomWalksEnv(graph, max_turns=15, batch_size=[200], seed=0)
    rollout = env.rollout(15, ShortestPathPlayer(graph, env.tokenizer), break_when_any_done=False)
    rows = rows_from_rollout(rollout, unfinished="drop")
    assert torch.equal(-rows["token_reward"].sum(-1).long(), graph.distance[rows["tokens"][:, 1]])
    assert (walk_optimality(rows, graph, 15) == 1).all()


def test_the_log_probability_of_a_walk_follows_the_degree_of_the_nodes_that_are_left():
    graph = DirectedGraph(torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]]).bool())  # node 1 has two edges, 2 has one
    env = RandomWalksEnv(graph, max_turns=4, batch_size=[64], seed=0)
    player = RandomWalkPlayer(graph, env.tokenizer, seed=0)
    rows = rows_from_rollout(env.rollout(4, player, break_when_any_done=False), unfinished="truncate")
    # Every second node of a walk is node 1, the only one with a choice.
    starts_at_1 = rows["tokens"][:, 1] == 1
    moves = -rows["token_reward"].sum(-1).long()
    choices = torch.where(starts_at_1, (moves + 1) // 2, moves // 2)
    torch.testing.assert_close(player.log_prob(rows), -math.log(2) * choices.double())


def test_the_most_frequent_moves_of_walks():
    env = RandomWalksEnv(GRAPH, max_turns=8, batch_size=[400], seed=0)
    rollout = env.rollout(8, RandomWalkPlayer(GRAPH, env.tokenizer, seed=0), break_when_any_done=False)
    rows = rows_from_rollout(rollout, unfinished="truncate")
    best = FrequentMovePlayer(GRAPH, env.tokenizer, rows).best
    assert best[1] == 0
    assert best[4] == 3
    assert GRAPH.edges[torch.arange(1, 5), best[1:]].all()


def test_random_walks_take_every_edge_equally_often_and_no_other():
    env = RandomWalksEnv(GRAPH, max_turns=1, batch_size=[4000], seed=0)
    td = env.reset(start=torch.full((4000,), 3))
    move = RandomWalkPlayer(GRAPH, env.tokenizer, seed=0)(td)["action"][:, 0]
    counts = torch.bincount(move, minlength=5)
    assert counts.nonzero().flatten().tolist() == [1, 2]
    assert abs(counts[1].item() - 2000) < 4 * 32  # four standard deviations


def walks(starts, moves):
    """Rows of walks from nodes of GRAPH that took as many moves, and arrived unless they took nine."""
    moves = torch.as_tensor(moves)
    rewards = torch.stack([torch.zeros(len(moves)), -moves.float()], -1)
    tokens = torch.tensor([[0, start] for start in starts])
    masks = {key: torch.ones(tokens.shape, dtype=torch.bool) for key in ("attention_mask", "agent_mask")}
    ended = moves[:, None] < 9
    return TensorDict(tokens=tokens, token_reward=rewards, terminated=ended, **masks, batch_size=[len(moves)])


def test_optimality_is_that_of_trlx():
    """(10 nodes at most - nodes of the walk) / (10 - nodes of the shortest path), as its example counts them."""
    nodes, best = torch.tensor([3, 7, 9, 10]), torch.tensor([3, 3, 4, 2])  # the last one never arrived
    assert torch.equal(walk_optimality(walks([3, 2, 4, 1], nodes - 1), GRAPH, 9), (10 - nodes) / (10 - best))
    with pytest.raises(ValueError, match="max_moves=3"):
        walk_optimality(walks([4], [3]), GRAPH, 3)
