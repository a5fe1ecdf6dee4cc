"""`plan`: weights, memory and operations by formulas, beside models and steps that are there; what it chooses."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import RESULTS
from benchmarks.memory import peak_bytes
from benchmarks.plan_check import CASES, new_model, training
from tests.recipes.commands import refused
from torchrl_lang import modules
from torchrl_lang.__main__ import main
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.objectives import ArCHerLoss
from torchrl_lang.recipes.algorithms import ALGORITHMS, BC
from torchrl_lang.recipes.initial_model import choose_weights
from torchrl_lang.recipes.planning import memory, report
from torchrl_lang.recipes.planning.architectures import ARCHITECTURES, of_folder
from torchrl_lang.recipes.planning.options import METHODS, Plan
from torchrl_lang.recipes.planning.report import choose

PUBLISHED = {
    "GPT-2": 124_439_808,
    "GPT-2-medium": 354_823_168,
    "GPT-2-large": 774_030_080,
    "GPT-2-XL": 1_557_611_200,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Gemma-3-1B": 999_885_952,
    "Gemma-3-4B": 3_880_263_168,
    "Gemma-3-27B": 27_009_346_304,
}
"""Parameters as model cards and weight files give them; Gemma's without the part that sees."""


def test_the_published_numbers_of_parameters():
    assert {name: shape.parameters for name, shape in ARCHITECTURES.items()} == PUBLISHED


SHAPE: dict[str, Any] = {"vocab_size": 300, "num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 6}
SHAPE |= {"num_key_value_heads": 2, "intermediate_size": 80, "head_dim": 8, "max_position_embeddings": 64}
KINDS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma3_text")


def tiny(kind, **more):
    """A small model of a kind, with the numbers above."""
    fields = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if kind == "gpt2":  # as causal_lm makes it
        fields |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "activation_function": "gelu_pytorch_tanh"}
    config = AutoConfig.for_model(kind, **{**SHAPE, **fields, **more})
    return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_has_as_many_weights_as_its_config_says(kind, tmp_path):
    lm = tiny(kind)
    lm.config.save_pretrained(tmp_path)
    assert of_folder(tmp_path).parameters == sum(weight.numel() for weight in lm.parameters())


HALF, ADAPTED = {"dtype": "bfloat16"}, {"lora_rank": 4}
BLOCKS = [("gpt2", {}), ("gpt2", HALF)]
BLOCKS += [(kind, options) for kind in ("llama", "qwen3") for options in ({}, HALF, ADAPTED, HALF | ADAPTED)]


@pytest.mark.parametrize(("kind", "options"), BLOCKS)
def test_what_a_token_leaves_in_a_block(kind, options, tmp_path):
    """Beside the storages that autograd saves, of two blocks less those of one."""

    def saved(layers):
        lm = tiny(kind, num_hidden_layers=layers)
        lm.config.save_pretrained(tmp_path)
        lm.to(getattr(torch, options.get("dtype", "float32")))
        if "lora_rank" in options:
            choose_weights(lm, BC(data="d", out="o", pretrained="any", lora_rank=4))  # type: ignore[arg-type]
        weights = {weight.untyped_storage()._cdata for weight in lm.parameters()}
        found = {}

        def pack(tensor):
            if tensor.untyped_storage()._cdata not in weights:
                found[tensor.untyped_storage()._cdata] = tensor
            return tensor

        tokens = torch.randint(300, (2, 32))
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            split_actor(modules.language_actor(lm)).trunk.module(tokens, torch.ones(2, 32, dtype=torch.bool))
        return sum(tensor.untyped_storage().nbytes() for tensor in found.values()) / 64

    measured = saved(2) - saved(1)
    predicted = memory.kept_bytes(Plan(model=str(tmp_path), **options))
    assert predicted == pytest.approx(measured, rel=0.01)


MORE_CASES: dict[str, dict[str, Any]] = {
    "bc, 2 top layers": {"top_layers": 2},
    "bc, 2 top layers above bfloat16": {"top_layers": 2, "dtype": "bfloat16"},
    "cql": {"train": "cql"},
}


@pytest.mark.parametrize("change", [*CASES.values(), *MORE_CASES.values()], ids=[*CASES, *MORE_CASES])
def test_the_peak_of_a_step(change):
    """Of the tensors that live, at a size that takes no second."""
    torch.manual_seed(0)
    sizes: Any = {"layers": 4, "width": 96, "heads": 6, "kv_heads": 2, "ffn": 256, "vocab": 2000}
    sizes |= {"model": "SmolLM2-135M"}  # with a tied embedding
    rows: Any = {"batch_size": 8, "row_length": 128, "card": "CPU-core"}
    plan = Plan(**{**sizes, **rows, **change})
    job = training(plan)
    job.step()
    job.optimizer.zero_grad()
    games = memory.by_part(plan).keys_and_values  # none is played here
    assert memory.by_part(plan).resident - games == pytest.approx(job.bytes(), rel=0.01)
    assert memory.learning_peak(plan) - games == pytest.approx(job.bytes() + peak_bytes(job.step), rel=0.1)


@pytest.mark.parametrize(("vocabulary", "rows", "length"), [(50_257, 8, 96), (151_936, 12, 64)])
def test_recorded_peaks_of_a_gpu(vocabulary, rows, length, tmp_path):
    """Those that the benchmark `large_vocabulary` recorded, above what there was before the step."""
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": vocabulary}
    (tmp_path / "config.json").write_text(json.dumps(config))
    record = json.loads((RESULTS / "cuda" / "large_vocabulary.json").read_text())["rows"]
    recorded = {row["name"].partition(": peak ")[2]: row["value"] for row in record if f"{vocabulary:,}" in row["name"]}
    for name, head in (("CQL on", "own"), ("CQL on, tied heads", "tied")):
        plan = Plan(model=str(tmp_path), train="ilql", q_head=head, batch_size=rows, row_length=length)
        peak = (memory.learning_peak(plan) - memory.by_part(plan).resident) / 2**20
        assert peak == pytest.approx(
            recorded["of the plain step"] + recorded[f"beyond the plain step, {name}"], rel=0.1
        )


@pytest.mark.parametrize("more", [{}, {"top_layers": 1}])
def test_what_archer_keeps(more):
    """A critic with a trunk of its own, which shares what does not train, and target copies of trunk and heads."""
    plan = Plan(
        model="SmolLM2-135M", layers=2, width=48, heads=6, kv_heads=2, ffn=64, vocab=300, train="archer", **more
    )
    actor = modules.language_actor(new_model(plan))
    trunk: Any = split_actor(actor).trunk
    frozen = {id(weight): weight for weight in trunk.parameters() if not weight.requires_grad}
    heads = modules.qvalue_module(modules.UtteranceQValueHead(48)), modules.value_module(modules.ValueHead(48))
    critic = ArCHerLoss(actor, *heads, value_trunk=deepcopy(trunk, frozen), target_trunk=True)
    held = {
        w.untyped_storage()._cdata: w.nbytes for w in (*actor.parameters(), *critic.parameters(), *critic.buffers())
    }
    parts = memory.by_part(plan)
    assert parts.weights + parts.value_heads + parts.targets == pytest.approx(sum(held.values()), rel=1e-3)


def test_every_algorithm_is_known():
    assert set(METHODS) == set(ALGORITHMS)


def test_operations_and_bytes_worked_out_by_hand():
    plan = Plan(model="Qwen2.5-7B", batch_size=1, row_length=100, agent_share=1.0)
    matrices = 2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 18_944 * 3584
    assert report.forward_flops(plan, 10) == 10 * 28 * (2 * matrices + 2 * 3584 * 100)
    assert report.trunk_flops(plan) == 100 * 28 * (3 * 2 * matrices + 3.5 * 2 * 3584 * 100)
    table = 152_064 * 3584
    assert report.head_flops(plan) == 100 * 3 * 2 * table
    assert report.summed_bytes(plan) == 2 * 4 * table  # of the output layer, and zeros of the embedding
    pieces = 3  # of 110 positions at most
    assert report.summed_bytes(replace(plan, train="ppo", row_length=300)) == (2 * pieces - 1 + 1) * 4 * table
    own = replace(plan, train="ilql", q_head="own")
    assert report.summed_bytes(own) == 2 * 4 * table + 2 * 4 * memory.q_weights(own)
    tied = replace(plan, model="GPT-2")
    assert report.summed_bytes(tied) == 3 * 4 * 50_257 * 768
    assert report.summed_bytes(replace(tied, lora_rank=8)) == 0
    weights = 4 * 7_615_616_512
    assert memory.model_bytes(plan) == memory.gradient_bytes(plan) == memory.optimizer_bytes(plan) / 2 == weights
    sharded = replace(plan, gpus=8, shard="model")
    assert memory.by_part(sharded).weights == memory.by_part(sharded).gradients == 4 * 7_615_616_512 / 8
    assert report.communication_bytes(replace(plan, gpus=8)) == 2 * 7 / 8 * 4 * 7_615_616_512
    online = Plan(model="Qwen2.5-7B", dtype="bfloat16", train="grpo", games=4, row_length=100)
    assert memory.by_part(online).keys_and_values == 2 * 2 * 28 * 512 * 100 * 4
    adapted = replace(online, lora_rank=16)
    assert memory.by_part(adapted).reference == 0
    assert memory.by_part(online).reference == 2 * 7_615_616_512


def test_weights_of_value_heads():
    plan = Plan(layers=1, width=8, heads=2, vocab=50, train="ilql", q_head="own")
    own, tied = modules.QValueHead(8, 50), modules.TiedQValueHead(8, torch.nn.Embedding(50, 8))
    numbers = [sum(weight.numel() for weight in head.parameters()) for head in (own, tied, modules.ValueHead(8))]
    assert [memory.q_weights(plan, tied=False), memory.q_weights(plan, tied=True)] == numbers[:2]
    assert memory.head_weights(plan) == numbers[0] + numbers[2]


@pytest.mark.parametrize("algorithm", ["bc", "ilql", "qsft", "ppo"])
@pytest.mark.parametrize("model", ["Qwen2.5-1.5B", "Qwen2.5-7B", "Llama-3.1-70B"])
def test_what_is_chosen_fits_and_leaves_what_fits_alone(algorithm, model):
    plan = Plan(model=model, train=algorithm, bf16=True, gpus=8, row_length=512)
    chosen = choose(plan)
    assert memory.fits(chosen)
    assert choose(chosen) == chosen
    assert (chosen == plan) == memory.fits(plan)


def test_the_command(capsys, tmp_path):
    assert main(["plan", "--model", "Qwen2.5-7B", "--gpus", "8", "--train", "ppo", "--bf16"]) == 0
    said = capsys.readouterr().out
    assert "7.62 B parameters" in said
    assert "It fits with" in said
    assert main(["plan", "--params", "3", "--card", "RTX-4090", "--lora-rank", "8", "--dtype", "bfloat16"]) == 0
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "describes no model whose shape is known" in refused(capsys, "plan", "--model", tmp_path)
    assert "No --model Qwen2.5-8B is known; did you mean Qwen2.5-" in refused(capsys, "plan", "--model", "Qwen2.5-8B")
    assert "Name the model" in refused(capsys, "plan")
    assert "no --card H10; did you mean H100?" in refused(capsys, "plan", "--model", "gpt-2", "--card", "H10")
    assert "no --train ilq; did you mean ilql?" in refused(capsys, "plan", "--model", "gpt-2", "--train", "ilq")
