"""AgileRL's ILQL as a process: reads batches from a folder, then runs training steps on demand.

It runs in AgileRL's own virtual environment and imports nothing of this project. It first prints what
it has loaded; then it answers each line of standard input, ``losses 3`` or ``step 3`` for batch 3, with the loss. Every
answer is a line of JSON. The worker that computes single terms (``agilerl_terms_worker.py``) shares ``serve``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from agilerl.algorithms.ilql import ILQL
from agilerl.data.rl_data import ConstantTokenReward, DataPoint, List_RL_Dataset
from agilerl.data.tokenizer import Tokenizer

# The terms and weights of ILQLLoss as it comes; the policy learns by behaviour cloning (beta is 0).
WEIGHTS = {
    "awac_weight": 1.0,
    "v_loss_weight": 1.0,
    "q_loss_weight": 1.0,
    "cql_loss_weight": 0.01,
    "dm_loss_weight": 0.0,
}


Batch = dict[str, torch.Tensor]


class Ids(Tokenizer):
    """The size of the vocabulary and the padding token, all that learning from ready rows asks of a tokenizer."""

    def __init__(self, vocabulary: int, pad: int) -> None:
        super().__init__(pad, -1, -1, -1, -1, -1)
        self.vocabulary = vocabulary

    def num_tokens(self) -> int:
        return self.vocabulary

    def encode(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("The rows are tokens already.")

    decode = id_to_token = token_to_id = get_vocab = encode


class Rows(List_RL_Dataset):
    """Rows of tokens as AgileRL's data points."""

    def __init__(self, points: list[DataPoint], tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, ConstantTokenReward(), None)
        self.points = points

    def get_item(self, idx: int) -> DataPoint:
        return self.points[idx]

    def size(self) -> int:
        return len(self.points)


def data_point(row: dict[str, np.ndarray]) -> DataPoint:
    """What ``DataPoint.from_obs`` makes of the row's text: a state for each token of the agent, and the row's last."""
    tokens = row["tokens"][row["attention_mask"]]
    actions = row["agent_mask"][1:].nonzero()[0]  # the state of a token is where the one before it stands
    terminal = int(row["terminated"][0])
    return DataPoint(
        raw_str="",
        tokens=tokens.tolist(),
        state_idxs=[*actions.tolist(), len(tokens) - 1],
        action_idxs=actions.tolist(),
        rewards=row["token_reward"][actions + 1].tolist(),
        terminals=[0] * len(actions) + [terminal],
        # Of whole utterances; only ILQL's evaluators read them.
        utterance_state_idxs=[len(tokens) - 1],
        utterance_action_idxs=[],
        utterance_rewards=[],
        utterance_terminals=[terminal],
    )


def read(folder: Path, tokenizer: Tokenizer) -> Rows:
    """The rows of a batch."""
    entries = {path.stem: np.load(path, allow_pickle=False) for path in folder.glob("*.npy")}
    count = len(entries["tokens"])
    return Rows([data_point({key: value[i] for key, value in entries.items()}) for i in range(count)], tokenizer)


def build(sizes: dict[str, Any], dataset: Rows) -> ILQL:
    network = {
        "arch": "gpt",
        "vocab_size": sizes["vocabulary"],
        "n_layer": sizes["layers"],
        "n_embd": sizes["width"],
        "n_head": sizes["heads"],
        "dim_feedfwd": 4 * sizes["width"],
        "block_size": sizes["max_length"],
        "activation": "GELU",
        "dropout": 0.0,
        "layer_norm_eps": 1e-5,
        "min_layers": 1,
        "max_layers": sizes["layers"],
        "bias": True,
    }
    return ILQL(dataset, network, lr=1e-4, tau=0.7, gamma=0.99, alpha=0.01).train()


def serve(folder: Path, prepare: Callable[[ILQL, list[Batch]], Callable[[str], dict[str, Any]]]) -> None:
    """Read the folder, report what was read, and answer each line of standard input.

    ``prepare`` gets the agent and the batches, and returns the function that answers.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints stays out of the answers
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = json.loads((folder / "sizes.json").read_text())
    tokenizer = Ids(sizes["vocabulary"], sizes["pad"])
    data = [read(folder / str(batch), tokenizer) for batch in range(sizes["batches"])]
    batches = [rows.collate(rows.points, "cpu") for rows in data]
    ilql = build(sizes, data[0])
    reply = prepare(ilql, batches)

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    answer(
        {
            "version": version("agilerl"),
            "torch": torch.__version__,
            "tokens": [int(batch["attn_mask"].sum()) for batch in batches],
            "decisions": [sum(len(point.action_idxs) for point in rows) for rows in data],
            "rewards": [float(batch["rewards"].sum()) for batch in batches],
            "trunk": sum(parameter.numel() for parameter in ilql.model.parameters()),
        }
    )
    for line in sys.stdin:
        answer(reply(line))


def training(ilql: ILQL, batches: list[Batch]) -> Callable[[str], dict[str, Any]]:
    """Answer ``losses 3`` and ``step 3``."""

    def reply(line: str) -> dict[str, Any]:
        what, batch = line.split()
        loss, _, _ = ilql.get_loss(batches[int(batch)], **WEIGHTS)
        loss.backward()
        if what == "step":
            ilql.optimizer.step()
            ilql.soft_update()
        ilql.optimizer.zero_grad()
        return {"loss": loss.item()}

    return reply


if __name__ == "__main__":
    serve(Path(sys.argv[1]), training)
