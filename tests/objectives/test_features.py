"""Every loss works on rows with features in front: its numbers are those of rows that are read one by one."""

from __future__ import annotations

import pytest
import torch

from tests.objectives import models
from tests.objectives import test_contract as contract
from tests.objectives.models import LOSSES, WIDTH, losses_of, make_rows, rows_for, unread
from torchrl_lang.data import row_buffer
from torchrl_lang.data.generate import play_to_end
from torchrl_lang.envs import TextGameEnv
from torchrl_lang.evaluation import play_games
from torchrl_lang.modules import FeatureEmbedding, Trunk, UtteranceActor, causal_lm, language_actor, with_features
from torchrl_lang.objectives import BCLoss
from torchrl_lang.text import CharTokenizer
from torchrl_lang.training import adamw, train_steps

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")

P, F = 2, 3


@pytest.fixture(autouse=True)
def projectors(monkeypatch):
    """The trunk of every actor of the suite reads features, by a projector of its own."""
    plain = models.make_actor

    def make_actor(seed=0, **options):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return with_features(plain(seed, **options), FeatureEmbedding(F, WIDTH))

    monkeypatch.setattr(models, "make_actor", make_actor)


@pytest.fixture(params=sorted(LOSSES.keys() - {"chai", "ppo"}))
def make_loss(request):
    return LOSSES[request.param]


@pytest.fixture
def rows(request):
    name = request.node.callspec.params["make_loss"]
    rows = rows_for(name) if name.startswith(("dpo", "ipo", "kto")) else make_rows()
    rows["features"] = torch.randn(*rows["tokens"].shape[:-1], P, F, generator=torch.Generator().manual_seed(8))
    return models.acted(rows) if name.startswith("ppo") else rows


@pytest.fixture
def masked(rows):
    mask = torch.tensor([[1, 1], [0, 1], [1, 0], [0, 0], [1, 1], [0, 1]]).bool()
    shape = rows["features"].shape[:-1]
    return rows.set("features_mask", mask.reshape(6, *[1] * (len(shape) - 2), P).expand(shape).clone())


def read_one_by_one(trunk, tokens, attention_mask=None, features=None, features_mask=None):
    """What a trunk writes, by a plain loop over rows and the language model alone."""
    out = torch.zeros(*tokens.shape, WIDTH)
    words = trunk.model.get_input_embeddings()
    for row in range(tokens.shape[0]):
        ids = tokens[row][attention_mask[row]]
        shown = features[row] if features_mask is None else features[row][features_mask[row]]
        embedded = words(ids) if trunk.returns is None else trunk.returns.embed(ids, words, trunk.vocab_size)
        whole = torch.cat([trunk.features.project(shown), embedded])
        out[row, : len(ids)] = trunk.model(inputs_embeds=whole[None]).last_hidden_state[0, len(shown) :]
    return out


def test_numbers_and_gradients_are_those_of_rows_read_one_by_one(make_loss, masked, monkeypatch):
    loss = make_loss()
    masked["features"][~masked["features_mask"]] = torch.nan
    found, gradients = loss(masked), contract.gradients(loss, masked)
    monkeypatch.setattr(Trunk, "forward", read_one_by_one)
    contract.assert_same(found, loss(masked), rtol=1e-4, atol=1e-6)
    contract.assert_same(gradients, contract.gradients(loss, masked), rtol=1e-3, atol=1e-5)
    trunks = [module for module in loss.modules() if isinstance(module, Trunk)]
    trained = {p for trunk in trunks for p in trunk.features.parameters()} - unread(loss)
    assert all(p.grad.any() for p in trained)  # every projector is trained


def test_keys_name_the_features(make_loss, masked):
    loss = make_loss()
    assert "features" in loss.in_keys
    assert "features_mask" in loss.optional_in_keys
    expected = loss(masked)
    found = loss(*(masked[key] for key in loss.in_keys), features_mask=masked["features_mask"])
    contract.assert_same(contract.by_key(loss, found), expected)
    with pytest.raises(KeyError, match=r"Loss needs 'features', found only .*set_keys\(features="):
        loss(masked.exclude("features"))
    moved = masked.clone()
    for name in ("features", "features_mask"):
        moved.rename_key_(name, ("image", name))
    loss.set_keys(features=("image", "features"), features_mask=("image", "features_mask"))
    assert ("image", "features") in loss.in_keys
    contract.assert_same(loss(moved), expected, rtol=0, atol=0)


def test_values_are_estimated_with_the_features(monkeypatch):
    rows, loss = make_rows(), models.make_ppo()
    rows["features"] = torch.randn(6, P, F)
    found = loss.estimate(rows.clone())
    monkeypatch.setattr(Trunk, "forward", read_one_by_one)
    expected = loss.estimate(rows.clone())
    for key in ("advantage", "value_target", "state_value"):
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5)


def test_a_plain_model_may_have_a_column_of_that_name():
    """Ids of another kind, which no trunk reads."""
    loss, rows = BCLoss(with_features(models.make_actor(), None)), make_rows()
    assert "features" not in loss.in_keys
    assert "features_mask" not in loss.optional_in_keys
    named = rows.clone().set("features", torch.arange(6))
    contract.assert_same(losses_of(loss(named)), losses_of(loss(rows)), rtol=0, atol=0)


# -- what only the features say can be learned by a policy that reads them, and by no other ----------------------------

LETTERS = CharTokenizer.from_alphabet("abcd?")


class Picture:
    """The text is the same in all games; a one-hot vector, behind one of zeros, says which letter is right."""

    def reset(self, seed):
        self.answer = seed % 4
        self.features = torch.stack([torch.zeros(4), torch.eye(4)[self.answer]])[seed // 4 % 2 :]
        return "?"

    def step(self, text):
        return "", float(text == "abcd"[self.answer]), True


def actor_of(reads, width=32):
    torch.manual_seed(0)
    shape = {"vocab_size": LETTERS.vocab_size, "layers": 1, "width": width, "heads": 2, "max_length": 16}
    actor = language_actor(causal_lm(**shape, initializer_range=0.1))
    return with_features(actor, FeatureEmbedding(4, width)) if reads else actor


@pytest.mark.slow
@pytest.mark.parametrize("reads", [True, False])
def test_behavior_cloning_of_right_answers(reads):
    env = TextGameEnv(Picture, LETTERS, row_length=12, action_length=2, features=(2, 4), batch_size=[512], seed=0)
    control = LETTERS.control
    others = tuple({*range(LETTERS.vocab_size)} - {*LETTERS.encode("abcd")})
    guesser = UtteranceActor(actor_of(False), control, 2, temperature=9.0, forbidden=others, seed=1)
    guesses, actor = play_to_end(env, guesser), actor_of(reads)
    loss = BCLoss(actor)
    buffer = row_buffer(guesses[guesses["token_reward"].sum(-1) == 1.0], 64, seed=0)
    for _ in train_steps(loss, buffer.sample, adamw(loss, 5e-3), steps=60, max_grad_norm=1.0):
        pass
    found = float(play_games(env, UtteranceActor(actor, control, 2, method="greedy"), games=512, seed=1).returns.mean())
    assert found > 0.98 if reads else abs(found - 0.25) < 0.1
