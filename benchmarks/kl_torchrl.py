"""TorchRL's own KL transforms beside these on the same rows: what each costs, does, and cannot do."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import NormalParamExtractor, TensorDictModule
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from torchrl.envs.llm.transforms import kl as torchrl_kl
from torchrl.modules import ProbabilisticActor, TanhNormal
from torchrl.modules.llm import TransformersWrapper
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.common import interleaved, ratio, row
from torchrl_lang.modules import causal_lm, language_actor
from torchrl_lang.transforms import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
)

Job = Callable[[TensorDictBase], Any]

# The demo's model and tokens.
PAD, SHAPE = 29, {"vocab_size": 35, "layers": 3, "width": 64, "heads": 4, "max_length": 128, "pad": 29}
GEN, REF, SCORES = ("gen_log_probs", "full"), ("ref_log_probs", "full"), ("log_probs", "full")
COEF = 0.1


def compare(rows: TensorDictBase, repeats: int) -> list[dict[str, Any]]:
    """Figures and findings on one batch of rows, the demo's model as policy and another as reference."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchRL's own, of what PyTorch deprecates
        policy, reference = (causal_lm("qwen2", **SHAPE).eval() for _ in range(2))
        rows = rows.select("tokens", "attention_mask", "agent_mask", "token_reward")
        return [
            *_costs(rows, policy, reference, repeats),
            _agreement(rows, reference),
            *_cases(rows, policy, reference),
        ]


def _costs(
    rows: TensorDictBase, policy: PreTrainedModel, reference: PreTrainedModel, repeats: int
) -> list[dict[str, Any]]:
    """Milliseconds of each job and the forward passes it makes; ratios to TorchRL's job of the same kind."""
    read: list[int] = []  # rows of each call: a pass over a batch may be made in groups of rows
    for model in (policy, reference):  # copies have the hook too
        model.base_model.register_forward_hook(lambda module, args, out: read.append(out[0].shape[0]))
    jobs = _jobs(rows, policy, reference)
    copies = {name: [data.copy() for _ in range(repeats + 2)] for name, (_, data) in jobs.items()}
    counts = {}
    for name, (job, _) in jobs.items():
        read.clear()
        job(copies[name].pop())
        counts[name] = round(sum(read) / rows.shape[0])
    ready = {name: _on_next(job, copies[name]) for name, (job, _) in jobs.items()}
    times = interleaved(ready, repeats)
    out, first = [], {}
    for name in jobs:
        kind = name.split(":")[0]
        out.append(row(f"{name}, forward passes: {counts[name]}", statistics.median(times[name]) * 1000, "ms"))
        if kind in first:
            out.append(row(f"{name} / TorchRL's", ratio(times, name, first[kind]), "x"))
        first.setdefault(kind, name)
    return out


def _jobs(
    rows: TensorDictBase, policy: PreTrainedModel, reference: PreTrainedModel
) -> dict[str, tuple[Job, TensorDictBase]]:
    """Each with its data; of every kind TorchRL's first, which needs its layout, for a penalty as a ragged stack."""
    actor, ref_actor = language_actor(policy), language_actor(reference)
    score = ReferenceModelLogProbTransform(ref_actor)
    dense, ragged = _dense(rows), _ragged(rows)
    acted = rows.copy().set("token_log_prob", ReferenceModelLogProbTransform(actor)(rows.copy())["ref_log_prob"])
    with torch.no_grad():
        both = _retrieve_kl(policy, reference)(ragged.copy()).select(GEN, REF)
    divergence = KLDivergenceTransform(log_prob_key="token_log_prob", mask_key="agent_mask")
    adjustment = RewardAdjustmentTransform(COEF, reward_key="token_reward")
    return {
        "scoring: TorchRL's RetrieveLogProb": (_retrieve(reference), dense),
        "scoring: ReferenceModelLogProbTransform": (score, rows),
        "scoring: the same of a TransformersWrapper": (ReferenceModelLogProbTransform(_scorer(reference)), dense),
        "penalty: TorchRL's RetrieveKL": (_retrieve_kl(policy, reference), ragged),
        "penalty: KLConstrainedTransform": (KLConstrainedTransform(ref_actor, COEF), acted),
        "penalty: KLConstrainedTransform, policy run again": (
            KLConstrainedTransform(ref_actor, COEF, policy=actor),
            rows,
        ),
        "adjusting: TorchRL's KLComputation": (
            torchrl_kl.KLComputation(GEN, REF, coeff=COEF),
            ragged.copy().update(both),
        ),
        "adjusting: KLDivergence-, RewardAdjustmentTransform": (
            lambda data: adjustment(divergence(data)),
            score(acted.copy()),
        ),
    }


def _on_next(job: Job, copies: list[TensorDictBase]) -> Callable[[], Any]:
    """A fresh copy for every run, for a reward is adjusted once."""
    return lambda: job(copies.pop())


def _agreement(rows: TensorDictBase, reference: PreTrainedModel) -> dict[str, Any]:
    ours = ReferenceModelLogProbTransform(language_actor(reference))(rows.copy())["ref_log_prob"]
    theirs = _retrieve(reference)(_dense(rows))[SCORES].detach()
    difference = (ours - theirs * rows["agent_mask"]).abs().max()
    return row("scoring: largest difference from TorchRL's", float(difference), "nats", 1e-3, at_most=True)


def _cases(rows: TensorDictBase, policy: PreTrainedModel, reference: PreTrainedModel) -> list[dict[str, Any]]:
    """Which runs at all: 1 where it does, 0 with what was raised where not."""
    dense, ragged, per_row = _dense(rows), _ragged(rows), _ragged(rows, per_row=True)
    gpt2 = causal_lm("gpt2", **SHAPE).eval()
    whole = rows.copy().set("token_log_prob", torch.zeros_like(rows["token_reward"]))
    one_reward = whole.exclude("token_reward").set("token_reward", torch.ones(*rows.batch_size, 1))
    ours = KLConstrainedTransform(language_actor(reference), COEF)
    summed = KLConstrainedTransform(language_actor(reference), COEF, per="sequence")
    actor, steps = _gaussian()
    cases: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "a penalty, dense rows": (
            lambda: _retrieve_kl(policy, reference, pad_output=True)(dense.copy()),
            lambda: ours(whole.copy()),
        ),
        "a penalty, one reward a row": (
            lambda: _retrieve_kl(policy, reference)(per_row.copy()),
            lambda: summed(one_reward.copy()),
        ),
        "a penalty, any actor": (
            lambda: torchrl_kl.KLRewardTransform(actor, coef=COEF)(steps.copy()),
            lambda: KLRewardTransform(actor, COEF)(steps.copy()),
        ),
        "scoring, any actor": (
            lambda: torchrl_kl.RetrieveLogProb(actor, assistant_only=False)(steps.copy()),
            lambda: ReferenceModelLogProbTransform(actor)(steps.copy()),
        ),
        "scoring, GPT-2": (
            lambda: _retrieve(gpt2)(ragged.copy()),
            lambda: ReferenceModelLogProbTransform(language_actor(gpt2))(rows.copy()),
        ),
        "scoring, a TransformersWrapper of GPT-2": (
            lambda: _scorer(gpt2)(dense.copy()),
            lambda: ReferenceModelLogProbTransform(_scorer(gpt2))(dense.copy()),
        ),
        "scoring, no graph through the reference": (
            lambda: _without_graph(_retrieve(reference)(dense.copy())[SCORES]),
            lambda: _without_graph(
                ReferenceModelLogProbTransform(language_actor(reference))(rows.copy())["ref_log_prob"]
            ),
        ),
    }
    return [
        entry
        for name, (theirs, mine) in cases.items()
        for entry in (_runs(f"{name}: TorchRL's runs", theirs), _runs(f"{name}: runs here", mine, target=1))
    ]


def _runs(name: str, job: Callable[[], Any], target: float | None = None) -> dict[str, Any]:
    try:
        job()
    except Exception as error:  # whatever is raised is the finding
        return row(name, 0, "1 = yes", target, note=said(error))
    return row(name, 1, "1 = yes", target)


def said(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"


def _without_graph(log_prob: Tensor) -> None:
    if log_prob.requires_grad:
        raise RuntimeError("the log-probability requires grad: every sample would keep the reference's activations")


def _gaussian() -> tuple[ProbabilisticActor, TensorDictBase]:
    """A continuous actor and a batch of its steps."""
    net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    module = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
    options = {"distribution_class": TanhNormal, "return_log_prob": True}
    actor = ProbabilisticActor(module, in_keys=["loc", "scale"], **options)
    with torch.no_grad():
        steps = actor(TensorDict(observation=torch.randn(4, 3), batch_size=[4]))
    return actor, steps.set("next", TensorDict(reward=torch.zeros(4, 1), batch_size=[4]))


def _scorer(model: PreTrainedModel, log_probs_key: str = "log_probs", pad_output: bool = True) -> TransformersWrapper:
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(SHAPE["vocab_size"])}, unk_token=f"t{PAD}"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=f"t{PAD}")
    options = {"log_probs_key": log_probs_key, "pad_output": pad_output}
    return TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False, **options)


def _retrieve(model: PreTrainedModel) -> torchrl_kl.RetrieveLogProb:
    return torchrl_kl.RetrieveLogProb(_scorer(model), assistant_only=False)


def _retrieve_kl(
    policy: PreTrainedModel, reference: PreTrainedModel, pad_output: bool = False
) -> torchrl_kl.RetrieveKL:
    scorers = (_scorer(model, key[0], pad_output) for model, key in ((policy, GEN), (reference, REF)))
    return torchrl_kl.RetrieveKL(*scorers, assistant_only=False, gen_log_probs_full_key=GEN, coeff=COEF)


def _dense(rows: TensorDictBase) -> TensorDict:
    """The rows in TorchRL's layout, padded."""
    masks = {"all_attention_mask": rows["attention_mask"], "all_assistant_mask": rows["agent_mask"]}
    entries = {"tokens": {"full": rows["tokens"]}, "masks": masks}
    return TensorDict(entries | {"reward": rows["token_reward"][..., None]}, batch_size=rows.batch_size)


def _ragged(rows: TensorDictBase, per_row: bool = False) -> TensorDictBase:
    """The rows in TorchRL's layout as a lazy stack without padding; one reward a token, or one a row."""
    stack = []
    for row_ in _dense(rows):
        real = row_["masks", "all_attention_mask"]
        tokens, reward = {"full": row_["tokens", "full"][real]}, row_["reward"][real]
        entries = {"tokens": tokens, "masks": {"all_attention_mask": real[real]}}
        stack.append(TensorDict(entries | {"reward": reward.sum(0) if per_row else reward}))
    return lazy_stack(stack)
