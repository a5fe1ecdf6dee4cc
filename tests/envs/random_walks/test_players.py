"""The scripted random walk."""

import math

import torch

from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs.random_walks import DirectedGraph, RandomWalkPlayer, RandomWalksEnv, random_graph


def test_the_log_probability_of_a_walk_is_minus_the_log_of_its_choices():
    graph = random_graph(8, out_degree=3, seed=1)
    env = RandomWalksEnv(graph, max_turns=7, batch_size=[32], seed=0)
    player = RandomWalkPlayer(graph, env.tokenizer, seed=0)
    rows = rows_from_rollout(env.rollout(7, player, break_when_any_done=False), unfinished="truncate")
    moves = -rows["token_reward"].sum(-1)
    torch.testing.assert_close(player.log_prob(rows), -math.log(3) * moves.double())


def test_the_log_probability_follows_the_degree_of_the_nodes_that_are_left():
    graph = DirectedGraph(torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]]).bool())  # node 1 has two edges, 2 has one
    env = RandomWalksEnv(graph, max_turns=4, batch_size=[64], seed=0)
    player = RandomWalkPlayer(graph, env.tokenizer, seed=0)
    rows = rows_from_rollout(env.rollout(4, player, break_when_any_done=False), unfinished="truncate")
    # Every second node of a walk is node 1, the only one with a choice.
    starts_at_1 = rows["tokens"][:, 1] == 1
    moves = -rows["token_reward"].sum(-1).long()
    choices = torch.where(starts_at_1, (moves + 1) // 2, moves // 2)
    torch.testing.assert_close(player.log_prob(rows), -math.log(2) * choices.double())
