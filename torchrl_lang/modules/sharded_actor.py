"""Shard the language model of an actor over processes."""

from __future__ import annotations

from typing import Any

from tensordict.nn import ProbabilisticTensorDictSequential
from torch.distributed.device_mesh import DeviceMesh

from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.frozen.frozen_states import block_list
from torchrl_lang.modules.save import language_model_of
from torchrl_lang.modules.sharding import shard
from torchrl_lang.modules.trunk import trunk_of


def shard_actor(actor: ProbabilisticTensorDictSequential, mesh: DeviceMesh) -> None:
    """Shard an actor's blocks and its language model with FSDP2, once, also that of a frozen copy.

    All actors over the same model use the sharded one.
    """
    trunk: Any = trunk_of(split_actor(actor).trunk)
    if trunk.sharded_root is not None:
        return
    if not trunk._owners:  # a copy, which has no language model around it yet
        trunk._owners = (language_model_of(actor), trunk.model)
    model = trunk._owners[-2]
    shard(model, block_list(trunk.model)[1], mesh)
