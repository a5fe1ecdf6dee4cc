"""Token by token or utterance by utterance: the same episode."""

import pytest
import torch

from torchrl_lang.envs import TokenEnv
from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.envs.row_state import read_utterance
from torchrl_lang.schema import ROW_KEYS

from .conftest import ENVS
from .helpers import step, transcript

FLAGS = ("done", "terminated", "truncated")


def random_utterances(env, generator, meaningful):
    """One utterance a row, sensible or not, with an end or full without one, never with padding inside."""
    n, k = env.batch_size.numel(), env.action_length
    control = env.tokenizer.control
    action = torch.full((n, k), control.pad)
    for row in range(n):
        if torch.randint(2, (), generator=generator):
            text = meaningful[int(torch.randint(len(meaningful), (), generator=generator))]
            ids = [*env.tokenizer.encode(text), control.end_of_action][:k]
        else:
            draw = torch.randint(env.tokenizer.vocab_size, (k,), generator=generator)
            ids = [t for t in draw.tolist() if t not in (control.pad, control.end_of_action)]
            ids = ids if len(ids) == k else [*ids, control.end_of_action]
        action[row, : len(ids)] = torch.tensor(ids)
    return action


@pytest.mark.parametrize("name", [name for name in ENVS if not name.endswith("by_token") and name != "picture"])
def test_the_same_text_gives_the_same_rows(name):
    make, meaningful, _ = ENVS[name]
    whole, wrapped = make(batch_size=[4], seed=3), TokenEnv(make(batch_size=[4], seed=3))
    generator = torch.Generator().manual_seed(0)
    one, other = whole.reset(), wrapped.reset()
    assert (one == other).all()
    while not one["done"].all():
        utterance = random_utterances(whole, generator, meaningful)
        live = ~one["done"]
        one = step(whole, utterance)
        # Each row is fed its own tokens; rows that are through wait for the others.
        earned, spoken = torch.zeros(4, 1), ~live
        for token in utterance.unbind(-1):
            other = step(wrapped, token, _step=~spoken) if not spoken.all() else other
            earned = earned + torch.where(spoken, 0, other["reward"])
            spoken = spoken | (token == whole.tokenizer.control.end_of_action)[:, None]
        assert torch.equal(earned, one["reward"])
        for key in (*ROW_KEYS, *FLAGS):
            assert torch.equal(one[key], other[key]), key


def test_partial_reset_keeps_the_begun_utterances_of_others():
    env = TokenEnv(CorridorEnv(length=4, start=1, batch_size=[2], seed=0))
    env.reset()
    right, end = env.tokenizer.encode("r")[0], env.tokenizer.control.end_of_action
    td = step(env, [right, right])
    td = env.reset(td.exclude("reward").set("_reset", torch.tensor([[True], [False]])))
    assert td["attention_mask"].sum(-1).tolist() == [3, 4]
    td = step(env, [end, end])
    assert [transcript(env, td, row) for row in range(2)] == ["<s>1</s></a>1</s>", "<s>1</s>r</a>2</s>"]


@pytest.mark.parametrize("made", [0, 1, 2, 4])
def test_set_state_goes_on_from_any_token(made):
    def play(env, td, moves):
        for token in moves:
            td = step(env, [token, token])
        return td

    env = TokenEnv(CorridorEnv(length=4, batch_size=[2], seed=0))
    right, end = env.tokenizer.encode("r")[0], env.tokenizer.control.end_of_action
    moves = [right, end, end, right, end, right, right, right, end]
    state = play(env, env.reset(), moves[:made])
    assert not state["done"].any()
    other = TokenEnv(CorridorEnv(length=4, batch_size=[2], seed=99))
    other.reset()
    came = other.reset(state.select(*ROW_KEYS).clone(), set_state=True)
    for key in ROW_KEYS:
        assert torch.equal(came[key], state[key])
    assert (play(env, None, moves[made:]) == play(other, None, moves[made:])).all()


def test_what_stands_behind_an_end_or_padding_is_no_part_of_an_utterance():
    control = CorridorEnv(batch_size=[1]).tokenizer.control
    end, pad = control.end_of_action, control.pad
    read = read_utterance(torch.tensor([[8, end, 9], [8, pad, end], [pad, 8, 9], [8, 8, 8]]), control)
    assert read.length.tolist() == [1, 1, 0, 3]
    assert read.closed.tolist() == [True, False, True, False]
