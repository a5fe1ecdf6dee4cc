"""What environments refuse, one row a check; ranges of options are tested in ``test_checks.py``."""

import pytest
import torch
from torchrl.envs import StepCounter, TransformedEnv

from torchrl_lang.envs import CompiledRollout, EnvGame, LongGameEnv, PromptEnv, TokenEnv, trl_environment
from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.envs.grids import BernoulliBanditEnv, DarkKeyDoorEnv, DarkRoomEnv
from torchrl_lang.envs.random_walks import DirectedGraph, RandomWalksEnv, random_graph
from torchrl_lang.envs.textworld import TextWorldSpec
from torchrl_lang.text import CharTokenizer

from .conftest import Countdown, countdown_env, guess_number_env

LETTERS = CharTokenizer.from_alphabet("abc")
EDGES = torch.tensor([[0, 0, 0], [1, 0, 1], [0, 1, 0]], dtype=torch.bool)


def prompts(shown, **options):
    return PromptEnv(shown, lambda *texts: [0.0], LETTERS, row_length=9, action_length=3, batch_size=[1], **options)


REFUSED = [
    (lambda: CorridorEnv(seed=1.5), "integer"),
    (lambda: LongGameEnv(Countdown, LETTERS, row_length=44, action_length=4, window=1000), "window"),
    (lambda: countdown_env(on_bad_text="ignore"), "on_bad_text"),
    (lambda: countdown_env(features=(2, 3.0)), "features"),
    (lambda: prompts(["a"], features=[[1.0]]), "features"),
    (lambda: prompts(["a"], features=[[[1.0]]] * 4), "features"),
    (lambda: prompts([]), "prompts"),
    (lambda: prompts("ab"), "list of texts as prompts, got 'ab'"),
    (lambda: prompts(["a"]).reset(game_seed=torch.tensor([4])), r"game_seed must lie in \[0, 1\), got \[4\]"),
    (lambda: CompiledRollout(guess_number_env(), None, 3), r"env\.rollout"),
    (lambda: CompiledRollout(CorridorEnv(), None, 3, keep="games"), "keep"),
    (lambda: TokenEnv(TransformedEnv(CorridorEnv(), StepCounter())), "TransformedEnv\\(TokenEnv\\(env\\)"),
    (lambda: EnvGame(CorridorEnv(batch_size=[2])), "one row"),
    (lambda: trl_environment(Countdown, method="reset"), "method"),
    (lambda: trl_environment(Countdown)().reset(seed="1"), "integer"),
    (lambda: CorridorEnv(batch_size=[2]).reset(word=3), "word"),
    (lambda: CorridorEnv(batch_size=[2]).reset(place=torch.ones(2)), "place"),
    (lambda: DarkRoomEnv(start=(1.0, 1)), "row"),
    (lambda: DarkRoomEnv(start=(9, 0)), "row"),
    (lambda: DarkRoomEnv(start="corner"), "start must be"),
    (lambda: DarkKeyDoorEnv(2, task=16), "task"),
    (lambda: DarkRoomEnv(3, task=1.5), "task"),
    (lambda: DarkRoomEnv(3, task=torch.tensor([0, -1]), batch_size=2), "task"),
    (lambda: BernoulliBanditEnv(torch.ones(3)), "probabilities"),
    (lambda: BernoulliBanditEnv(torch.tensor([[0.5, 1.5]])), "probabilities"),
    (lambda: DirectedGraph(torch.eye(3).bool()), "diagonal"),
    (lambda: DirectedGraph(EDGES, goal=5), "goal"),
    (lambda: DirectedGraph(EDGES.float()), "edges must be bool"),
    (lambda: random_graph(5, out_degree=5), "out_degree"),
    (lambda: RandomWalksEnv(DirectedGraph(EDGES)).reset(start=torch.tensor([0])), "goal"),
    (lambda: RandomWalksEnv(DirectedGraph(EDGES.T.clone())), "max_turns"),
    (lambda: TextWorldSpec("maze"), "kind must"),
    (lambda: TextWorldSpec("simple", level=3), r"'simple' has no options \['level'\]"),
]


@pytest.mark.parametrize(("call", "noun"), REFUSED)
def test_refusals(call, noun):
    with pytest.raises((ValueError, TypeError), match=noun):
        call()


def test_rows_of_another_width_and_type():
    env = guess_number_env(batch_size=[1])
    td = env.reset().select("tokens", "attention_mask", "agent_mask", "token_reward").clone()
    with pytest.raises(ValueError, match=rf"width 10, but this environment's row_length is {env.row_length}"):
        env.reset(td.apply(lambda value: value[:, :10]), set_state=True)
    with pytest.raises(TypeError, match="tokens must be int64"):
        env.reset(td.set("tokens", td["tokens"].float()), set_state=True)
