"""Run this file's function where AgileRL is installed: it writes an ILQL agent as plain tensors and numbers.

AgileRL's checkpoints are pickles, which this library never reads. This file needs nothing but safetensors; copy it, or
put its folder on the path::

    ilql = ILQL(dataset, net_config)
    ilql.load_checkpoint("checkpoint.pt")  # AgileRL unpickles its own file; not needed right after training
    export(ilql, "exported")

``torchrl_lang.modules.read_agilerl("exported")`` reads the folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

FORMAT = ("AgileRL ILQL", 1)
"""Name and version of what is written."""
OPTIONS = (
    *("alpha", "batch_size", "beta", "clip_weight", "cql_temp", "detach_pi", "detach_q", "detach_v", "dm_margin"),
    *("double_q", "exp_weights", "gamma", "lr", "per_token", "tau", "transition_weight", "value_max", "value_min"),
    "weight_decay",
)
"""Arguments of AgileRL's ``ILQL`` that are written."""


def export(ilql: Any, folder: str | Path) -> Path:
    """Write the weights of an ILQL agent to ``agent.safetensors``, its sizes and options to ``agent.json``.

    Args:
        ilql: the agent.
        folder: is created.

    Examples:
        >>> import json, tempfile, torch
        >>> from torchrl_lang.modules.agilerl.export import OPTIONS, export
        >>> agent = torch.nn.Linear(1, 1)  # stands for an agent
        >>> agent.net_config = {"n_head": 2}
        >>> for name in OPTIONS:
        ...     setattr(agent, name, None)
        >>> with tempfile.TemporaryDirectory() as home:
        ...     json.loads((export(agent, home) / "agent.json").read_text())["net_config"]
        {'n_head': 2}
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Copies, because the file holds no shared memory and the embeddings are tied.
    weights = {name: value.detach().cpu().clone().contiguous() for name, value in ilql.state_dict().items()}
    save_file(weights, folder / "agent.safetensors")
    options = {name: getattr(ilql, name) for name in OPTIONS}
    described = dict(zip(("format", "version"), FORMAT, strict=True), net_config=dict(ilql.net_config), options=options)
    (folder / "agent.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return folder
