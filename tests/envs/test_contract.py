"""What every environment owes to TorchRL and to us."""

import random

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv, transforms
from torchrl.envs.utils import check_env_specs

from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs import TokenEnv, check_language_env
from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.envs.row_state import read_utterance
from torchrl_lang.schema import ROW_KEYS, check_row

from .conftest import ENVS
from .helpers import step, transcript


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [*((name, [2, 3]) for name in ENVS), *((name, []) for name in ("corridor", "parrot", "picture_by_token"))],
)
def test_rules_hold_for_every_batch_shape(name, batch_size):
    make, utterances, _ = ENVS[name]
    make_n = (lambda n: make(batch_size=[n])) if batch_size else None
    check_language_env(make(batch_size=batch_size), make_n, utterances=utterances, seed=3)


def test_a_batch_of_no_rows(make_env):
    env = make_env(batch_size=(0,), seed=0)
    assert env.rollout(2).batch_size == (0, 2)
    check_env_specs(env)


def test_rollouts_go_through_resets_and_torchrl_transforms_see_turns_and_returns(make_env):
    env = TransformedEnv(make_env(batch_size=[3], seed=0), Compose(StepCounter(), RewardSum()))
    rollout = env.rollout(60, break_when_any_done=False)
    check_row(rollout.reshape(-1))
    # A new episode begins where one has ended: the row is as short as the first one was.
    begun = rollout["next", "done"][:, :-1, 0]
    assert begun.any()
    lengths = rollout["attention_mask"].sum(-1)
    assert (lengths[:, 1:][begun] == lengths[0, 0]).all()
    total = rollout["next", "token_reward"].sum(-1, keepdim=True)
    torch.testing.assert_close(rollout["next", "episode_reward"], total)
    assert (rollout["next", "step_count"] >= 1).all()


def test_actions_of_another_type_or_shape_or_none_are_refused(make_env):
    env = make_env(batch_size=[2], seed=0)
    env.reset()
    action = env.action_spec.zero()
    for given in ({"action": action.float()}, {"action": action.bool()}, {"action": action[None]}, {}):
        with pytest.raises((KeyError, ValueError), match="'action'"):
            env._step(TensorDict(given))


def test_names_for_rows_in_another_order_are_refused(make_env):
    """Six numbers in two rows of three are not those of three rows of two."""
    env = make_env(batch_size=[3, 2], seed=0)
    key = next(iter(getattr(env, "env", env)._reset_entries), None)
    if key is None:
        pytest.skip("its resets name nothing")
    env.reset(**{key: torch.zeros(3, 2, 1, dtype=torch.int64)})
    with pytest.raises(ValueError, match=rf"'{key}' must be int64 of shape \(3, 2\).*\(2, 3\)"):
        env.reset(**{key: torch.zeros(2, 3, dtype=torch.int64)})


def test_groups_of_episodes_begin_alike(make_env):
    """In the order in which rows are reset, whenever that is; rows made of the steps have the number of their start."""
    env = make_env(batch_size=[6], group_size=3, seed=5)
    check_env_specs(env)
    td = env.reset()
    for value in (td["tokens"], td["group"], *getattr(env, "env", env)._task.values()):
        assert (value.unflatten(0, (2, 3)) == value.unflatten(0, (2, 3))[:, :1]).all()
    assert td["group"].unique().numel() == 2
    torch.manual_seed(0)  # of the actions: with some of them no group of a game by token is complete after 60
    rollout = env.rollout(60, break_when_any_done=False)
    number, size = rows_from_rollout(rollout, unfinished="drop")["group"].unique(return_counts=True)
    assert (len(number) > 2, int(size.max())) == (True, 3)
    first = torch.cat([torch.ones(6, 1).bool(), rollout["next", "done"][:, :-1, 0]], 1)
    group, opening = rollout["group"][first], rollout["tokens"][first]
    assert all((opening[group == one] == opening[group == one][:1]).all() for one in number)
    assert not torch.isin(make_env(batch_size=[6], group_size=3, seed=6).reset()["group"], number).any()
    assert "group" not in make_env(batch_size=[6]).reset().keys()


def test_starts_that_are_given_are_repeated_within_groups(make_env):
    env = make_env(batch_size=[6], group_size=3, seed=5)
    base = getattr(env, "env", env)
    starts = base.possible_starts(2)
    if len(starts) < 2:
        pytest.skip("its resets name nothing")
    key = base._reset_entries[0]
    td = env.reset(**{key: starts.repeat_interleave(3)})
    for value in (td["tokens"], *base._task.values()):
        assert (value.unflatten(0, (2, 3)) == value.unflatten(0, (2, 3))[:, :1]).all()
    message = "a group begin alike, but reset got different starts: repeat each start 3 times in a row"
    with pytest.raises(ValueError, match=message):
        env.reset(**{key: starts.repeat(3)})
    env.set_seed(0)
    env.reset(TensorDict({"_reset": torch.arange(6)[:, None] == 1}, batch_size=[6]))
    with pytest.raises(ValueError, match=message):  # a group has begun with one episode
        env.reset(**{key: starts.repeat_interleave(3)})


TRANSFORMS = {
    "rename": lambda: transforms.RenameTransform(["tokens", "token_reward"], ["input_ids", ("labels", "reward")]),
    "rename_the_action": lambda: transforms.RenameTransform(["tokens"], ["input_ids"], ["action"], ["utterance"]),
    "select": lambda: transforms.SelectTransform("tokens", "attention_mask"),
    "cast_the_action": lambda: transforms.DTypeCastTransform(torch.int64, torch.int32, in_keys_inv=["action"]),
    "cast_all": lambda: transforms.DTypeCastTransform(torch.float32, torch.float64),
}
# Each transform on a game in tensors, and one of them on one by token and on games on strings.
PAIRS = [("corridor", transform) for transform in TRANSFORMS]
PAIRS += [(name, "rename") for name in ("picture", "corridor_by_token", "visual_dialogue")]


@pytest.mark.parametrize(("name", "transform"), PAIRS)
def test_observations_can_be_renamed_dropped_and_cast(name, transform):
    """Nothing that a transform does to an observation must also be done to a state: there is none."""
    make_env = ENVS[name][0]
    env = TransformedEnv(make_env(batch_size=[2], seed=0), TRANSFORMS[transform]())
    check_env_specs(env, seed=0, break_when_any_done="both")
    rollout = env.rollout(40, break_when_any_done=False)
    assert rollout["next", "done"][:, :-1].any()  # and it goes on after that
    if transform == "rename":
        check_row(rollout.rename_key_("input_ids", "tokens").rename_key_(("labels", "reward"), "token_reward"))


def test_fullgraph_compile():
    """By token; Wordle is compiled in test_compiled_rollout.py."""
    torch._dynamo.reset()  # other tests compile the same code for environments of their own
    make = ENVS["corridor_by_token"][0]
    eager, compiled = make(batch_size=[3], seed=0), make(batch_size=[3], seed=0)
    step = torch.compile(compiled.step, fullgraph=True, backend="eager")
    one, other = eager.reset(), compiled.reset()
    for _ in range(5):
        action = eager.action_spec.rand()
        one = eager.step(one.set("action", action))["next"]
        other = step(other.set("action", action))["next"]
        assert (one == other).all()


FLAGS = ("done", "terminated", "truncated")


def random_utterances(env, draw, meaningful):
    """One utterance a row, sensible or not, with an end or full without one, never with padding inside."""
    control, k = env.tokenizer.control, env.action_length
    action = torch.full((env.batch_size.numel(), k), control.pad)
    for row in action:
        ids = env.tokenizer.encode(draw.choice(meaningful))
        if draw.random() < 0.5:
            drawn = draw.choices(range(env.tokenizer.vocab_size), k=k)
            ids = [token for token in drawn if token not in (control.pad, control.end_of_action)]
        ids = [*ids, control.end_of_action][:k]
        row[: len(ids)] = torch.tensor(ids)
    return action


@pytest.mark.parametrize("name", [name for name in ENVS if not name.endswith("by_token") and name != "picture"])
def test_the_same_text_gives_the_same_rows(name):
    make, meaningful, _ = ENVS[name]
    whole, wrapped = make(batch_size=[4], seed=3), TokenEnv(make(batch_size=[4], seed=3))
    draw = random.Random(0)
    one, other = whole.reset(), wrapped.reset()
    assert (one == other).all()
    while not one["done"].all():
        utterance = random_utterances(whole, draw, meaningful)
        live = ~one["done"]
        one = step(whole, utterance)
        # Each row is fed its own tokens; rows that are through wait for the others.
        earned, spoken = torch.zeros(4, 1), ~live
        for token in utterance.unbind(-1):
            other = step(wrapped, token, _step=~spoken) if not spoken.all() else other
            earned = earned + torch.where(spoken, 0, other["reward"])
            spoken = spoken | (token == whole.tokenizer.control.end_of_action)[:, None]
        assert torch.equal(earned, one["reward"])
        assert (one.select(*ROW_KEYS, *FLAGS) == other.select(*ROW_KEYS, *FLAGS)).all()


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
    assert (came.select(*ROW_KEYS) == state.select(*ROW_KEYS)).all()
    assert (play(env, None, moves[made:]) == play(other, None, moves[made:])).all()


def test_what_stands_behind_an_end_or_padding_is_no_part_of_an_utterance():
    control = CorridorEnv(batch_size=[1]).tokenizer.control
    end, pad = control.end_of_action, control.pad
    read = read_utterance(torch.tensor([[8, end, 9], [8, pad, end], [pad, 8, 9], [8, 8, 8]]), control)
    assert read.length.tolist() == [1, 1, 0, 3]
    assert read.closed.tolist() == [True, False, True, False]
