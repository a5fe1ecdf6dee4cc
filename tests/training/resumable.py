"""A tiny training run that can be killed: ``python resumable.py FOLDER STEPS``. Run by ``test_resume.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer

from torchrl_lang.training import Checkpointer, RandomState, adamw, make_log, train_steps, warmup_cosine


class Regression(torch.nn.Module):
    """A small net with dropout, so that torch's global stream matters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )

    def forward(self, batch: TensorDict) -> TensorDict:
        return TensorDict(loss_fit=(self.net(batch["x"]) - batch["y"]).square().mean())


def main(folder: Path, steps: int) -> None:
    """Train, from wherever the last run in this folder got to."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loss = Regression()
    x = torch.randn(50, 4)
    generator = torch.Generator().manual_seed(1)
    data = TensorDictReplayBuffer(
        storage=LazyTensorStorage(50), sampler=SamplerWithoutReplacement(), batch_size=8, generator=generator
    )
    data.extend(TensorDict(x=x, y=x.sum(-1, keepdim=True), batch_size=[50]))
    optimizer = adamw(loss, 1e-2)
    scheduler = warmup_cosine(optimizer, steps, warmup=10)
    checkpointer = Checkpointer(folder / "checkpoints")
    for name, part in {
        "loss": loss,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "sampler": data.sampler,
        "random": RandomState(data=generator),
    }.items():
        checkpointer.register(name, part)
    start = checkpointer.restore()
    log = make_log(folder)
    log.rewind(start)
    run = train_steps(
        loss, data.sample, optimizer, steps=steps, start=start or 0, scheduler=scheduler, max_grad_norm=1.0
    )
    for step, figures in run:
        if step % 3 == 0:
            log.log(step, figures)
        if step % 25 == 0:
            metrics = {"return": -float(figures["loss"])}
            log.log(step, metrics)
            checkpointer.save(step, metrics)
    save_file(loss.state_dict(), folder / "final.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
