"""A run that is cut off and resumed ends as one that was not (``tests/campaigns`` kills whole commands)."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer

from torchrl_lang.training import Checkpointer, RandomState, adamw, train_steps, warmup_cosine
from torchrl_lang.training.logging import make_log


class Regression(torch.nn.Module):
    """A small net with dropout, so that torch's global stream matters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))

    def forward(self, batch: TensorDict) -> TensorDict:
        return TensorDict(loss_fit=(self.net(batch["x"]) - batch["y"]).square().mean())


def train(folder, cut_off=None):
    """From wherever the last run in this folder got to; returns the state at the end."""
    torch.manual_seed(0)
    loss, x = Regression(), torch.randn(50, 4)
    generator = torch.Generator().manual_seed(1)
    data = TensorDictReplayBuffer(
        storage=LazyTensorStorage(50), sampler=SamplerWithoutReplacement(), batch_size=8, generator=generator
    )
    data.extend(TensorDict(x=x, y=x.sum(-1, keepdim=True), batch_size=[50]))
    optimizer = adamw(loss, 1e-2)
    scheduler, random = warmup_cosine(optimizer, 60, warmup=10), RandomState(data=generator)
    parts = {"loss": loss, "optimizer": optimizer, "scheduler": scheduler, "sampler": data.sampler, "random": random}
    checkpointer = Checkpointer(folder / "checkpoints")
    for name, part in parts.items():
        checkpointer.register(name, part)
    start, log = checkpointer.restore(), make_log(folder)
    log.rewind(start)
    options = {"steps": 60, "start": start or 0, "scheduler": scheduler, "max_grad_norm": 1.0}
    for step, figures in train_steps(loss, data.sample, optimizer, **options):
        if step % 3 == 0:
            log.log(step, figures)
        if step == cut_off:
            break
        if step % 25 == 0:
            checkpointer.save(step, log.log(step, {"return": -figures["loss"]}))
    return loss.state_dict()


def test_cut_off_and_resumed(tmp_path):
    whole = train(tmp_path / "whole")
    for cut_off in (10, 37, 50):  # before and between checkpoints, and when one is due
        train(tmp_path / "cut", cut_off)
    for name, value in train(tmp_path / "cut").items():
        assert torch.equal(value, whole[name]), name
    logs = [(tmp_path / name / "log.csv").read_text() for name in ("whole", "cut")]
    assert logs[0] == logs[1]  # every figure once
