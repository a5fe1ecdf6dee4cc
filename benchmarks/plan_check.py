"""Predictions of ``plan`` beside measurements: memory and time of training steps and of acting, one core or one GPU.

The peak of memory is that of all tensors, weights and optimizer included. On a CPU the time is the processor time of
this process, and before each step a matrix product and a copy measure what the same core reaches at that moment: the
prediction is for these rates.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import SoftUpdate
from transformers import PreTrainedModel

from benchmarks.common import device, median, one_core, row, seconds, smoking
from benchmarks.memory import peak_bytes
from torchrl_lang.functional.fast_linear import fast_linear
from torchrl_lang.modules import (
    QValueHead,
    TiedQValueHead,
    UtteranceActor,
    ValueHead,
    causal_lm,
    language_actor,
    qvalue_module,
    value_module,
)
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.objectives import BCLoss, CQLLoss, DPOLoss, ILQLLoss, PPOLoss, QSFTLoss
from torchrl_lang.recipes.algorithms import BC
from torchrl_lang.recipes.initial_model import choose_weights
from torchrl_lang.recipes.planning import memory, report
from torchrl_lang.recipes.planning.options import Plan
from torchrl_lang.schema import ControlTokens
from torchrl_lang.training import adamw, total_loss
from torchrl_lang.transforms import adapters_off, frozen_copy

ON_CUDA = True
ROWS: dict[str, Any] = {"batch_size": 4, "row_length": 64, "card": "CPU-core", "mfu": 1.0, "mbu": 1.0}
LONG: dict[str, Any] = {"batch_size": 8, "row_length": 1024, "card": "H100", "bf16": True}
MODELS = {"cpu": ("GPT-2", "SmolLM2-135M"), "cuda": ("SmolLM2-360M", "Qwen2.5-1.5B")}
CASES: dict[str, dict[str, Any]] = {
    "bc": {},
    "bc, checkpointing": {"checkpointing": True},
    "bc, LoRA": {"lora_rank": 16},
    "ilql, tied heads": {"train": "ilql"},
    "ilql, own heads": {"train": "ilql", "q_head": "own"},
    "qsft": {"train": "qsft"},
    "dpo": {"train": "dpo"},
    "ppo": {"train": "ppo", "games": 4},
}
GAMES, PROMPT, WRITTEN = 8, 32, 16
COPIED = 30_000  # rows of the matrix that no cache holds
MAX_MEMORY, MAX_TIME, REPEATS = 10, 25, 5
TINY = {"layers": 2, "width": 48, "heads": 6, "kv_heads": 6, "ffn": 192, "vocab": 600}
SMOKE = {
    "ROWS": {"batch_size": 2, "row_length": 16, "card": "CPU-core", "mfu": 1.0, "mbu": 1.0, **TINY},
    "MODELS": {"cpu": ("GPT-2",), "cuda": ("SmolLM2-360M",)},
    "GAMES": 2,
    "WRITTEN": 2,
    "COPIED": 300,
}


@one_core()
def run(quick: bool = False) -> list[dict[str, Any]]:
    rows = []
    for model in MODELS[device().type]:
        for name, change in CASES.items():
            plan = Plan(**{"model": model, **(ROWS if device().type == "cpu" else LONG), **change})
            rows += _of_step(f"{model}, {name}", plan, 2 if quick else REPEATS)
            gc.collect()
        rows += _of_acting(f"{model}, acting", Plan(**_acting(model)), 2 if quick else REPEATS)
    return rows


# -- a training step ---------------------------------------------------------------------------------------------------


class Training(NamedTuple):
    """A loss with what trains it, as a recipe makes them."""

    loss: nn.Module
    optimizer: torch.optim.Optimizer
    updater: SoftUpdate | None
    batch: TensorDictBase
    reference: Any
    bf16: bool

    def step(self) -> None:
        """As :func:`~torchrl_lang.training.train_steps` does."""
        self.optimizer.zero_grad()
        with torch.autocast(device().type, torch.bfloat16, enabled=self.bf16):
            total = total_loss(self.loss(self.batch))
        total.backward()
        nn.utils.clip_grad_norm_(self.loss.parameters(), 1.0)
        self.optimizer.step()
        if self.updater is not None:
            self.updater.step()

    def bytes(self) -> int:
        """Of all tensors that stay from step to step: weights, copies, the optimizer's state and the batch."""
        kept: list[Any] = [*self.loss.parameters(), *self.loss.buffers(), *self.batch.values(True, True)]
        kept += [] if self.reference is None else [*self.reference.actor.parameters()]
        kept += [value for state in self.optimizer.state.values() for value in state.values()]
        return _bytes(tensor for tensor in kept if isinstance(tensor, Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def new_model(plan: Plan) -> PreTrainedModel:
    """A model of the plan's shape with random weights; what trains, does."""
    shape = plan.shape
    sizes: Any = {"layers": shape.layers, "width": shape.width, "heads": shape.heads, "vocab_size": shape.vocab}
    more: Any = {"num_key_value_heads": shape.kv_heads, "intermediate_size": shape.ffn, "head_dim": shape.head_width}
    more |= {"tie_word_embeddings": shape.tied, "attention_bias": shape.qkv_bias}
    gpt2 = shape.kind == "gpt2"
    with torch.device(device()):
        lm = causal_lm(
            "gpt2" if gpt2 else "llama", **sizes, max_length=shape.positions or 4096, **({} if gpt2 else more)
        )
    if plan.top_layers is None:
        lm.to(getattr(torch, plan.dtype))
    if plan.lora_rank or plan.top_layers:
        chosen: Any = {"lora_rank": plan.lora_rank, "top_layers": plan.top_layers, "dtype": plan.dtype}
        choose_weights(lm, BC(data="d", out="o", pretrained="any", **chosen))  # type: ignore[arg-type]
    return lm


def training(plan: Plan) -> Training:
    """Make the training that a plan describes."""
    lm = new_model(plan)
    actor, h, v = language_actor(lm), plan.shape.width, plan.shape.vocab
    if plan.checkpointing:
        split_actor(actor).trunk.module.gradient_checkpointing()
    batch, name = new_batch(plan), plan.train
    tied = plan.tied_q
    qvalue = TiedQValueHead(h, lm.get_output_embeddings()) if tied else QValueHead(h, v)
    values, q = value_module(ValueHead(h).to(device())), qvalue_module(qvalue.to(device()))
    reference: Any = None
    if plan.method.reference:
        reference = frozen_copy(actor) if plan.lora_rank is None else adapters_off(actor)
    losses: dict[str, Callable[[], Any]] = {
        "bc": lambda: BCLoss(actor, transition_weight=0.0, actor_normalizer="action"),
        "ilql": lambda: ILQLLoss(actor, q, values, actor_normalizer="action"),
        "cql": lambda: CQLLoss(actor, q, actor_normalizer="action"),
        "qsft": lambda: QSFTLoss(actor, reference, value_min=-1000.0, value_max=1000.0),
        "dpo": lambda: DPOLoss(actor, reference),
        "ppo": lambda: PPOLoss(actor, values, detach_value=True),
    }
    loss = losses[name]()
    if name == "ppo":
        batch["token_log_prob"] = torch.where(batch["agent_mask"], -math.log(v), 0.0)
        batch = loss.estimate(batch)
    updater = SoftUpdate(loss, tau=0.01) if name in ("ilql", "cql", "qsft") else None
    return Training(loss, adamw(loss, 1e-5), updater, batch, reference, plan.bf16)


def new_batch(plan: Plan) -> TensorDictBase:
    """Rows of full length in turns of eight tokens, every other turn the agent's; pairs for DPO."""
    shape = (plan.batch_size, plan.row_length)
    agent = (torch.arange(plan.row_length) // 8 % 2 == 1).expand(shape).clone()
    rows = TensorDict(
        tokens=torch.randint(plan.shape.vocab, shape),
        attention_mask=torch.ones(shape, dtype=torch.bool),
        agent_mask=agent,
        token_reward=torch.where(agent, torch.randn(shape), 0.0),
        terminated=torch.ones(plan.batch_size, 1, dtype=torch.bool),
        batch_size=shape[:1],
    )
    return (rows.reshape(-1, 2) if plan.train == "dpo" else rows).to(device())


def _of_step(name: str, plan: Plan, repeats: int) -> list[dict[str, Any]]:
    job = training(plan)
    job.step()
    job.optimizer.zero_grad()
    held = job.bytes() + peak_bytes(job.step, device())
    predicted, measured = _times(job.step, plan, lambda rated: sum(report.step_seconds(rated)), repeats)
    foreseen = memory.learning_peak(plan) - memory.by_part(plan).keys_and_values  # no game is played here
    return [_memory(name, foreseen, held), _time(name, predicted, measured)]


def _memory(name: str, predicted: float, measured: float) -> dict[str, Any]:
    note = f"predicted {predicted / 1e9:.3f} GB, measured {measured / 1e9:.3f} GB"
    return row(f"{name}: error of memory", _percent(predicted / measured), "%", MAX_MEMORY, at_most=True, note=note)


def _time(name: str, predicted: list[float], times: list[float]) -> dict[str, Any]:
    ratio = median(p / t for p, t in zip(predicted, times, strict=True))
    note = f"predicted {median(predicted):.3f} s, measured {median(times):.3f} s: {ratio:.2f}"
    return row(f"{name}: error of time", _percent(ratio), "%", MAX_TIME, at_most=True, note=note)


def _percent(ratio: float) -> float:
    """How far a ratio is from 1."""
    return round(100 * abs(ratio - 1), 2)


def _times(
    job: Callable[[], Any], plan: Plan, predict: Callable[[Plan], float], repeats: int, few_rows: int | None = None
) -> tuple[list[float], list[float]]:
    """Return the prediction with the rates of the device at that moment, and the seconds of the job."""
    times, predicted = [], []
    for _ in range(1 if smoking() else repeats):
        if device().type == "cpu":
            predicted.append(predict(replace(plan, **rates(few_rows))))
            times.append(_process_seconds(job))
        else:
            predicted.append(predict(plan))
            times.append(seconds(job))
    return predicted, times


def rates(few_rows: int | None = None) -> dict[str, float]:
    """TFLOP/s of products of 256 rows, and GB/s from memory, of this core now: the best of three.

    The latter are those of a copy, read and written; with ``few_rows`` those of a product of that many rows with a
    matrix that no cache holds, as in decoding.
    """
    a, b, big = torch.randn(256, 768), torch.randn(3072, 768), torch.randn(COPIED, 768)
    jobs: list[Callable[[], Any]] = [lambda: [fast_linear(a, b) for _ in range(10)]]
    if few_rows is None:
        copied = torch.empty_like(big)
        jobs.append(lambda: copied.copy_(big))
    else:
        jobs.append(lambda: fast_linear(a[:few_rows], big))
    product, moved = (min(_process_seconds(job) for _ in range(3)) for job in jobs)
    moves = (2 if few_rows is None else 1) * big.nbytes
    return {"flops": 10 * 2 * 256 * 768 * 3072 / product / 1e12, "bandwidth": moves / moved / 1e9}


def _process_seconds(job: Callable[[], Any]) -> float:
    began = time.process_time()
    job()
    return time.process_time() - began


# -- acting ------------------------------------------------------------------------------------------------------------


def _acting(model: str) -> dict[str, Any]:
    length = PROMPT + WRITTEN
    played = {"games": GAMES, "turns": 1, "row_length": length, "agent_share": WRITTEN / length}
    return {"model": model, **(ROWS if device().type == "cpu" else LONG), "train": "grpo", **played}


def _of_acting(name: str, plan: Plan, repeats: int) -> list[dict[str, Any]]:
    """One utterance of all games, from prompts that are read at once."""
    lm, v = new_model(plan), plan.shape.vocab
    control = ControlTokens(
        pad=0, end_of_action=1, end_of_state=2, begin_state=3, begin_action=4, end_of_dialogue=5, vocab_size=v
    )
    policy = UtteranceActor(language_actor(lm), control, action_length=WRITTEN, seed=0)
    shape = (GAMES, PROMPT)
    tokens, mask = torch.randint(6, v, shape, device=device()), torch.ones(shape, dtype=torch.bool, device=device())
    rows = TensorDict(tokens=tokens, attention_mask=mask, batch_size=shape[:1])

    @torch.no_grad()
    def job() -> None:
        policy.forget()
        with torch.autocast(device().type, torch.bfloat16, enabled=plan.bf16):
            policy(rows.clone())

    job()
    policy.forget()
    held = _bytes(lm.parameters()) + peak_bytes(job, device())
    parts = memory.by_part(plan)
    predicted = memory.acting_peak(plan) - parts.reference - parts.optimizer - parts.rows
    return [
        _memory(name, predicted, held),
        _time(name, *_times(job, plan, lambda rated: sum(report.acting_seconds(rated)[:2]), repeats, GAMES)),
    ]
