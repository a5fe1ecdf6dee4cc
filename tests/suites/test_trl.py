"""TRL's GRPOTrainer plays this library's games, and losses of preferences are those of its trainers."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests.data.chat_templates import EXACT, tokenizer_of
from torchrl_lang.modules import causal_lm, language_actor
from torchrl_lang.objectives import DPOLoss, IPOLoss, KTOLoss
from torchrl_lang.transforms import frozen_copy

trl = pytest.importorskip("trl", reason="TRL is not installed: make test-suites runs these tests")
datasets = pytest.importorskip("datasets")

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_wordle.py"


def test_a_step_of_training_plays_wordle(tmp_path):
    done = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    calls = re.search(r"reward (\S+), calls of the tool per game (\S+)", done.stdout)
    assert float(calls[2]) > 0
    assert float(calls[1]) < 0
    assert float(re.search(r"weights changed by (\S+)", done.stdout)[1]) > 0


def test_the_benchmark_beside_its_trainers():
    command = [sys.executable, "-m", "benchmarks", "--smoke", "chat_model"]
    done = subprocess.run(command, cwd=EXAMPLE.parents[1], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "PPO iteration / TRL's GRPO iteration" in done.stdout


TOLD = [
    {"prompt": "is it red", "chosen": " no", "rejected": " yes"},
    {"prompt": "is it blue", "chosen": " yes it is", "rejected": " no"},
    {"prompt": "big", "chosen": " small", "rejected": " big big big"},
    {"prompt": "is it hot", "chosen": " it is not", "rejected": " yes yes"},
]


@pytest.fixture
def model(tmp_path):
    """A small language model with its tokenizer."""
    tokenizer = tokenizer_of(EXACT["chatml"])
    torch.manual_seed(0)
    lm = causal_lm("llama", vocab_size=len(tokenizer), layers=1, width=16, heads=2, max_length=128)
    with torch.no_grad():
        for weight in lm.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return lm, tokenizer


def trained_on(trainer, config, model, records, folder, **options):
    """A trainer of TRL's whose policy has moved away from its reference, and a batch of all records."""
    lm, tokenizer = model
    settings = {"per_device_train_batch_size": len(records), "report_to": "none", "use_cpu": True, "bf16": False}
    args = config(output_dir=str(folder), gradient_checkpointing=False, **settings, **options)
    dataset = datasets.Dataset.from_list(records)
    data = {"train_dataset": dataset, "processing_class": tokenizer}
    theirs = trainer(model=copy.deepcopy(lm), ref_model=lm, args=args, **data)
    batch = next(iter(theirs.get_train_dataloader()))
    with torch.no_grad():
        for weight in theirs.model.parameters():
            weight.mul_(0.8)  # a flatter distribution, so that most texts become likelier
    return theirs, batch


def rows_of(batch):
    """The tokens that TRL made as rows."""
    masks = {"attention_mask": batch["attention_mask"].bool(), "agent_mask": batch["completion_mask"].bool()}
    return TensorDict(tokens=batch["input_ids"], **masks, batch_size=[len(batch["input_ids"])])


def same_numbers(theirs, batch, loss, rows):
    """Losses and gradients of both."""
    expected = theirs.compute_loss(theirs.model, batch)
    expected.backward()
    slopes = [weight.grad.clone() for weight in theirs.model.parameters()]
    theirs.model.zero_grad()
    found = loss(rows)["loss_actor"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    found.backward()
    for weight, slope in zip(theirs.model.parameters(), slopes, strict=True):
        torch.testing.assert_close(weight.grad, slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({"loss_type": "sigmoid"}, lambda *parts: DPOLoss(*parts, beta=0.3)),
        ({"loss_type": "ipo"}, lambda *parts: IPOLoss(*parts, beta=0.3, per_token=True)),
    ],
    ids=["dpo", "ipo"],
)
def test_losses_of_pairs_are_those_of_its_trainer(model, tmp_path, options, make):
    theirs, batch = trained_on(trl.DPOTrainer, trl.DPOConfig, model, TOLD, tmp_path, beta=0.3, **options)
    rows = rows_of(batch)
    pairs = torch.stack([rows[: len(TOLD)], rows[len(TOLD) :]], 1)
    loss = make(language_actor(theirs.model), frozen_copy(language_actor(theirs.ref_model)))
    same_numbers(theirs, batch, loss, pairs)


def test_kto_is_that_of_its_trainer(model, tmp_path):
    """Whose mismatched completions are those of the row before; ours are those of the next one."""
    records = [
        {"prompt": told["prompt"], "completion": told[kind], "label": kind == "chosen"}
        for told, kind in zip(TOLD, ("chosen", "rejected", "chosen", "chosen"), strict=True)
    ]
    options = {"beta": 0.3, "undesirable_weight": 1.5}
    theirs, batch = trained_on(trl.KTOTrainer, trl.KTOConfig, model, records, tmp_path, **options)
    rows = rows_of(batch).set("desirable", torch.as_tensor(batch["label"]).bool()[:, None]).flip(0)
    loss = KTOLoss(language_actor(theirs.model), frozen_copy(language_actor(theirs.ref_model)), **options)
    assert loss(rows)["baseline"] > 0
    same_numbers(theirs, batch, loss, rows)
