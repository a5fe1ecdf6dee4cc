"""The trunk: the states that the language model reads, in groups, compiled and recomputed."""

from __future__ import annotations

import importlib
import pickle
import re
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import MaskedCategorical, OneHotCategorical
from transformers import GPT2Model

from tests.modules.toys import KINDS, WIDTH, rows, tiny_lm, without_blocks
from torchrl_lang.modules import LanguageActor, Trunk, UtteranceActor, causal_lm, language_actor
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.row_groups import length_groups
from torchrl_lang.objectives import BCLoss
from torchrl_lang.schema import ControlTokens
from torchrl_lang.transforms import KLConstrainedTransform

groups_module = importlib.import_module("torchrl_lang.modules.row_groups")


WAYS = {
    "groups": ("gpt2", 3, lambda trunk: None),
    "groups by cost": ("gpt2", "auto", lambda trunk: None),
    "recomputed": ("gpt2", 1, lambda trunk: trunk.gradient_checkpointing()),
    "recomputed llama": ("llama", 1, lambda trunk: trunk.gradient_checkpointing()),
    "compiled": ("gpt2", 1, lambda trunk: trunk.compile(backend="eager", fullgraph=True)),
}


@pytest.mark.parametrize("way", [*[*WAYS][:-1], pytest.param("compiled", marks=pytest.mark.slow)])
def test_the_way_rows_are_read_changes_no_state_and_no_gradient(way, monkeypatch):
    monkeypatch.setitem(groups_module._CALL, "cpu", 4)  # or rows this small would all be run together
    if way == "compiled":  # Dynamo traces the blocks of a model for seconds
        monkeypatch.setattr(GPT2Model, "forward", without_blocks)
    kind, groups, change = WAYS[way]
    lm, batch, found = tiny_lm(kind, layers=1 if way == "compiled" else 2), rows(n=6).reshape(2, 3), []
    for changed in (False, True):
        trunk = Trunk(lm, length_groups=groups if changed else 1).train()
        if changed:
            change(trunk)
        lm.zero_grad()
        states = trunk(batch["tokens"], batch["attention_mask"])[batch["attention_mask"]]
        states.square().sum().backward()
        found.append([states.detach(), *(p.grad.clone() for p in trunk.parameters() if p.grad is not None)])
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("groups", "widths"), [(1, [12]), (2, [3, 12]), ("auto", [3, 12])])
def test_rows_of_like_lengths_are_read_together(groups, widths, monkeypatch):
    monkeypatch.setitem(groups_module._CALL, "cpu", 1)
    lm, read = tiny_lm(layers=1), []
    trunk = Trunk(lm, length_groups=groups, share_prefixes=False)
    lm.transformer.h[0].register_forward_pre_hook(lambda block, inputs: read.append(inputs[0].shape[1]))
    length = torch.tensor([3, 12, 2, 11])
    trunk(torch.zeros(4, 12, dtype=torch.int64), torch.arange(12) < length[:, None])
    assert sorted(read) == widths


def test_which_models_can_be_read_piece_by_piece():
    assert all(Trunk(tiny_lm(kind)).cache_obstacle is None for kind in KINDS)
    small = {"vocab_size": 9, "layers": 1, "width": 8, "heads": 2, "max_length": 16}
    assert Trunk(causal_lm("mistral", sliding_window=4, **small)).cache_obstacle is None
    obstacles = {
        "bloom": "it takes no position_ids",
        "gpt_neo": "its local attention builds masks of its own",
        "qwen3_next": r"its layers are of the kinds \['linear_attention'\]",
    }
    config = {"gpt_neo": {"attention_types": [[["local"], 1]]}, "qwen3_next": {"layer_types": ["linear_attention"]}}
    for kind, obstacle in obstacles.items():
        trunk = Trunk(causal_lm(kind, **small, **config.get(kind, {})))
        assert trunk.cache_obstacle is not None
        assert re.search(obstacle, trunk.cache_obstacle)
    trunk = Trunk(tiny_lm("llama"))
    trunk.model.config._attn_implementation = "flash_attention_2"
    assert "attn_implementation='sdpa'" in trunk.cache_obstacle


@pytest.fixture
def no_blocks(monkeypatch):
    """Where it does not matter what is compiled: Dynamo traces the blocks of a model for seconds."""
    monkeypatch.setattr(GPT2Model, "forward", without_blocks)


@pytest.mark.slow
def test_copies_of_a_compiled_trunk_compile_anew(no_blocks):
    trunk, batch = Trunk(tiny_lm(layers=1)).compile(backend="eager"), rows()
    with torch.no_grad():
        before = trunk(batch["tokens"])
    other = pickle.loads(pickle.dumps(trunk))  # noqa: S301
    assert other.compiled
    assert not other._compiled
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        assert not torch.allclose(other(batch["tokens"]), before)
        torch.testing.assert_close(trunk(batch["tokens"]), before)


@pytest.mark.slow
def test_many_modes_do_not_crowd_each_other_out(no_blocks):
    """Dynamo compiles a function a few times only, here once, then never again."""
    frames = []

    def backend(graph, inputs):
        frames.append(1)
        return graph

    trunk, batch = Trunk(tiny_lm(layers=1), length_groups=1).compile(backend=backend), rows()
    modes = [(True, True, False), (False, True, False), (True, False, True)]
    with torch._dynamo.config.patch(recompile_limit=1):
        for training, grad, autocast in modes:
            trunk.train(training)
            with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                trunk(batch["tokens"])
    assert len(frames) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_an_actor_has_the_distribution_of_the_next_token_at_every_position(kind):
    lm, batch = tiny_lm(kind), rows()
    actor = language_actor(lm)
    dist = actor.get_dist(batch.clone())
    assert dist.batch_shape == (7, 20)
    expected = lm(batch["tokens"], attention_mask=batch["attention_mask"].long()).logits.log_softmax(-1)
    real = batch["attention_mask"]
    torch.testing.assert_close(dist.logits[real], expected[real], atol=1e-5, rtol=1e-5)
    said = actor(batch.clone())
    torch.testing.assert_close(said["next_token_log_prob"], dist.log_prob(said["next_token"]), atol=1e-5, rtol=1e-5)
    other = language_actor(Trunk(lm), head=nn.Linear(WIDTH, 5))
    assert other.get_dist(batch).logits.shape == (7, 20, 5)


def test_parts_of_an_actor_in_many_pieces():
    nets, keys = [nn.Embedding(12, 4), nn.Linear(4, 4), nn.Linear(4, 9)], ["tokens", "embedded", "hidden", "logits"]
    pieces = [TensorDictModule(net, [keys[i]], [keys[i + 1]]) for i, net in enumerate(nets)]
    prob = ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["action"], distribution_class=Categorical)
    actor, batch = ProbabilisticTensorDictSequential(*pieces, prob), rows()
    parts = split_actor(actor)
    hidden = parts.trunk(batch.clone()).select("hidden")
    torch.testing.assert_close(parts.head(hidden)["logits"].log_softmax(-1), actor.get_dist(batch.clone()).logits)
    with pytest.raises(ValueError, match="writes 'logits'"):
        split_actor(ProbabilisticTensorDictSequential(*pieces[:-1], prob))


class Sharpened(Categorical):
    """Tokens at another temperature."""

    def __init__(self, logits):
        super().__init__(logits=2 * logits)


@pytest.mark.parametrize(
    ("kind", "keys", "found"),
    [
        (MaskedCategorical, ["logits", "mask"], r"reads \['logits', 'mask'\]"),
        (Sharpened, ["logits"], "Sharpened changes them"),
        (OneHotCategorical, ["logits"], None),
    ],
)
def test_the_distribution_of_an_actor_is_the_softmax_of_its_logits(kind, keys, found):
    bigrams = TensorDictModule(nn.Embedding(12, 12), ["tokens"], ["logits"])
    legal = TensorDictModule(lambda logits: torch.ones_like(logits) > 0, ["logits"], ["mask"])
    prob = ProbabilisticTensorDictModule(in_keys=keys, out_keys=["next_token"], distribution_class=kind)
    actor = LanguageActor(bigrams, legal, prob)
    if found is None:
        assert split_actor(actor).prob is prob
        return
    for build in (
        BCLoss,
        KLConstrainedTransform,
        lambda actor: UtteranceActor(actor, ControlTokens(0, 1, 2, 3, 4, 5), 3),
    ):
        with pytest.raises(ValueError, match=f"softmax of an actor's logits, but .*{found}.*before the distribution"):
            build(actor)


def best_cost(length, call):
    """By trying every way to cut the sorted rows."""
    ordered = sorted(max(n, 1) for n in length)
    found = []
    for count in range(len(ordered)):
        for cuts in combinations(range(1, len(ordered)), count):
            ends = [0, *cuts, len(ordered)]
            found.append(sum((b - a) * ordered[b - 1] + call for a, b in pairwise(ends)))
    return min(found)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 60))
def test_no_split_costs_less(length, call):
    length = torch.tensor(length)
    groups = length_groups(length, call=call)
    assert sum(chosen.shape[0] * width + call for chosen, width in groups) == best_cost(length.tolist(), call)
    assert torch.cat([chosen for chosen, _ in groups]).sort().values.tolist() == list(range(length.shape[0]))
    assert all(width == max(int(length[chosen].max()), 1) for chosen, width in groups)


def test_many_different_lengths_are_rounded_but_nearly_nothing_is_lost():
    length = torch.arange(1, 1001)
    groups = length_groups(length, call=0)
    assert len(groups) == 48
    assert sum(chosen.shape[0] * width for chosen, width in groups) <= 1.03 * int(length.sum())
    assert length_groups(length[:0]) == []
