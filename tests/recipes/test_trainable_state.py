"""What a checkpoint holds of a loss whose lower layers are frozen."""

import pytest
import torch
from torchrl.objectives import SoftUpdate

from torchrl_lang import modules
from torchrl_lang.objectives import ILQLLoss
from torchrl_lang.recipes.runs import TrainableState


def make(seed=0, top_layers=1):
    torch.manual_seed(seed)
    actor = modules.language_actor(modules.causal_lm(vocab_size=11, layers=2, width=8, heads=2, max_length=16))
    if top_layers is not None:
        modules.train_top_layers(actor, top_layers)
    loss = ILQLLoss(actor, modules.qvalue_module(modules.QValueHead(8, 11)), modules.value_module(modules.ValueHead(8)))
    SoftUpdate(loss, tau=0.5)
    return loss


def change(loss):
    """All that moves in training: what has a gradient, and the target."""
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(parameter.requires_grad)
        loss.target_qvalue_network_params.data.apply_(lambda value: value.add_(2))
    return loss


def test_what_moves_comes_back_and_what_is_frozen_is_not_kept():
    loss, other = change(make()), make()
    state = TrainableState(loss).state_dict()
    assert not any(".h.0." in key or "wte" in key for key in state)
    assert any(".h.1." in key for key in state)
    assert any(key.startswith("target_qvalue") for key in state)
    TrainableState(other).load_state_dict(state)
    for (key, ours), theirs in zip(other.state_dict().items(), loss.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), key
    whole = make(top_layers=None)
    assert TrainableState(whole).state_dict().keys() == whole.state_dict().keys()


@pytest.mark.parametrize("saved", [None, 1])
def test_other_frozen_weights_are_refused(saved):
    """Also those of a state that says nothing of them; then nothing has changed."""
    loss = make(seed=1)
    before = {key: value.clone() for key, value in loss.state_dict().items()}
    with pytest.raises(ValueError, match="other frozen weights"):
        TrainableState(loss).load_state_dict(TrainableState(change(make(top_layers=saved))).state_dict())
    assert all(torch.equal(value, before[key]) for key, value in loss.state_dict().items())
