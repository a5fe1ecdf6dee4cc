"""What the state of a loss knows of the reference that it holds."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.objectives.models import VOCAB, WIDTH, acted, labelled, make_actor, make_heads, make_rows, total
from tests.transforms.world import stored
from torchrl_lang.modules import causal_lm, language_actor
from torchrl_lang.objectives import BCLoss, KTOLoss, OREOLoss, PPOLoss, PsiLoss, QSFTLoss
from torchrl_lang.transforms import adapters_off, frozen_copy

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")

Q, V = make_heads()
MAKE = {
    "bc": lambda actor, reference, **options: BCLoss(actor, kl_weight=0.5, reference=reference, **options),
    "ppo": lambda actor, reference, **options: PPOLoss(
        actor, copy.deepcopy(V), kl_weight=0.5, kl_estimator="exact", reference=reference, **options
    ),
    "oreo": lambda actor, reference, **options: OREOLoss(actor, copy.deepcopy(V), reference, kl_weight=0.5, **options),
    "psi": lambda actor, reference, **options: PsiLoss(actor, copy.deepcopy(Q), prior=reference, **options),
    "kto": lambda actor, reference, **options: KTOLoss(actor, reference, **options),
    "qsft": lambda actor, reference, **options: QSFTLoss(actor, reference, value_min=-20, value_max=20, **options),
}


@pytest.fixture(params=sorted(MAKE))
def make(request):
    """Makes a loss whose reference is the model of a seed, and whose policy has trained on from there."""

    def make(seed=0, **options):
        actor = make_actor(seed)
        loss = MAKE[request.param](actor, frozen_copy(actor), **options)
        moved(loss)
        return loss

    return make


def moved(loss, by=0.1):
    """Its parameters have trained on; the same change in each call, as after a resume from the same data."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in loss.parameters():
            if parameter.requires_grad:
                parameter.add_(by * torch.randn(parameter.shape, generator=generator))


def value(loss):
    return total(loss(labelled(acted(make_rows())))).detach()


def test_the_same_reference_loads_and_gives_the_same_loss(make):
    loss, other = make(), make()
    moved(loss)
    assert value(loss) != value(other)
    state = stored(loss.state_dict())
    assert "reference_fingerprint" in state
    assert not any(name.startswith("reference_weights") for name in state)
    assert not any("reference" in name for name, _ in (*loss.named_parameters(), *loss.named_buffers()))
    other.load_state_dict(state)
    assert value(other) == value(loss)


@pytest.mark.parametrize("strict", [True, False])
def test_another_reference_raises_and_both_are_named(make, strict):
    loss, other = make(), make(seed=5)
    state = stored(torch.nn.ModuleDict({"loss": loss}).state_dict())
    with pytest.raises(RuntimeError, match=r"another reference model(.|\n)*embed_weights=True") as error:
        torch.nn.ModuleDict({"loss": other}).load_state_dict(state, strict=strict)
    for holder in (loss, other):
        assert bytes(holder.reference.fingerprint.tolist()).hex()[:8] in str(error.value)


def test_embedded_weights_restore_the_reference(make):
    loss, other = make(embed_weights=True), make(seed=5, embed_weights=True)
    state = stored(loss.state_dict())
    other.load_state_dict(state)
    assert value(other) == value(loss)
    moved(other)  # what trains later is not the reference
    again = other.state_dict()
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state if name.startswith("reference_"))
    make().load_state_dict(state)  # beside the same reference without weights
    name = next(name for name in state if name.startswith("reference_weights."))
    with pytest.raises(RuntimeError, match="not those that were saved with it"):
        other.load_state_dict({**state, name: state[name] + 1})


def test_a_state_without_a_fingerprint(make):
    loss = make()
    state = {name: tensor for name, tensor in loss.state_dict().items() if name != "reference_fingerprint"}
    with pytest.raises(RuntimeError, match=r"Missing key.*reference_fingerprint"):
        loss.load_state_dict(state)
    assert loss.load_state_dict(state, strict=False).missing_keys == ["reference_fingerprint"]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*reference_fingerprint"):
        BCLoss(make_actor()).load_state_dict(MAKE["bc"](make_actor(), frozen_copy(make_actor())).state_dict())


def lora(seed, **options):
    torch.manual_seed(seed)
    lm = causal_lm("llama", vocab_size=VOCAB, layers=2, width=WIDTH, heads=2, max_length=32)
    actor = language_actor(get_peft_model(lm, LoraConfig(target_modules=["q_proj"])))
    loss = MAKE["bc"](actor, adapters_off(actor), **options)
    moved(loss)
    return loss


def test_adapters_switched_off_load_with_the_policy():
    """The reference is the base model, which is part of the policy: loading the policy restores it."""
    loss, other = lora(0), lora(1)
    assert value(loss) != value(other)
    other.load_state_dict(stored(loss.state_dict()))
    assert value(other) == value(loss)
    assert torch.equal(other.state_dict()["reference_fingerprint"], loss.state_dict()["reference_fingerprint"])
    embedded = lora(2)
    embedded.load_state_dict(stored(lora(0, embed_weights=True).state_dict()))
    assert value(embedded) == value(loss)


def test_a_loss_in_another_dtype_has_another_reference():
    state = MAKE["bc"](make_actor(), frozen_copy(make_actor()), embed_weights=True).double().state_dict()
    loss = MAKE["bc"](make_actor(), frozen_copy(make_actor()))
    with pytest.raises(RuntimeError, match=r"convert it by \.to\(dtype\)"):
        loss.load_state_dict(state)
    loss.double().load_state_dict(state)
