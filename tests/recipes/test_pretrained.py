"""Every recipe begins with a pretrained model: a Hugging Face folder, a saved agent, adapters, low precision."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.data.chat_templates import EXACT, tokenizer_of
from tests.recipes.commands import log_of, refused, weights_of
from tests.recipes.walks import ARCHER
from torchrl_lang.__main__ import main
from torchrl_lang.modules import UtteranceActor, ValueHead, causal_lm, language_actor, load_agent, save_agent
from torchrl_lang.recipes import runs
from torchrl_lang.recipes.algorithms import BC, ILQL, PPO, PaperILQL, Rejection
from torchrl_lang.recipes.initial_model import choose_weights
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.online import load_initial_policy
from torchrl_lang.recipes.tasks import find_task
from torchrl_lang.text import ChatTokenizer, RowFormat

NAME = "tests.recipes.games:greeting_env"
OFFLINE = ["--steps", "2", "--batch-size", "4", "--eval-games", "4"]
ONLINE = ["--iterations", "2", "--games", "8", "--turns", "1", "--epochs", "1", *OFFLINE[2:]]
CRITIC = ["--value-warmup", "0"]
ADAPTERS = ["--dtype", "bfloat16", "--lora-rank", "4", "--lora-layers", "1", "--lr", "0.05", "--final-lr", "1"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A Hugging Face folder ``hf``, an agent of its model, and a dataset of the game."""
    folder = tmp_path_factory.mktemp("pretrained")
    source = tokenizer_of(EXACT["chatml"])
    source.save_pretrained(folder / "hf")
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source))
    # Some embeddings more than tokens, as many models have them.
    shape = {"vocab_size": tokenizer.vocab_size + 3, "layers": 2, "width": 16, "heads": 2, "max_length": 64}
    torch.manual_seed(0)
    lm = causal_lm("llama", **shape)
    lm.save_pretrained(folder / "hf")
    value = ValueHead(16, kind="deep")
    save_agent(folder / "agent", UtteranceActor(language_actor(lm), tokenizer.control, 4, value=value), tokenizer)
    of_game = ["--option", f"model={folder / 'hf'}", "--games", "40", "--out", str(folder / "data")]
    assert main(["generate", NAME, *of_game]) == 0
    return folder


def arguments(home, recipe, out, *more):
    online = recipe in ("ppo", "rejection", "archer")
    given = [*ONLINE, "--option", f"model={home / 'hf'}"] if online else ["--data", home / "data", *OFFLINE]
    given += {"ppo": CRITIC, "archer": [*CRITIC, *ARCHER]}.get(recipe, [])
    return [str(word) for word in ("train", recipe, "--task", NAME, "--out", out, *given, *more)]


CASES = [("bc", "--pretrained", "hf"), ("dt", "--start", "agent"), ("ilql", "--start", "hf")]
CASES += [("qsft", "--start", "agent"), ("oreo", "--start", "hf"), ("utterance-ilql", "--pretrained", "hf")]
CASES += [("dpo", "--start", "hf"), ("kto", "--start", "agent")]
CASES += [("ppo", "--start", "agent"), ("rejection", "--start", "hf"), ("archer", "--start", "hf")]


@pytest.mark.filterwarnings("error:.*lose updates")
@pytest.mark.parametrize(("recipe", "option", "place"), CASES)
def test_adapters_in_low_precision(home, tmp_path, recipe, option, place):
    """Only the last block changes; checkpoints hold adapters and heads; the model is plain and loads."""
    pytest.importorskip("peft")
    run, call = tmp_path / "run", arguments(home, recipe, tmp_path / "run", option, home / place, *ADAPTERS)
    assert main(call) == 0
    shutil.rmtree(run / "model")
    shutil.rmtree(max((run / "checkpoints").glob("step-*")))
    assert main(call) == 0  # from the checkpoint before
    assert len(log_of(run)) == 2
    saved = load_file(max((run / "checkpoints").glob("step-*")) / "tensors.safetensors")
    of_model = [key for key in saved if ".layers." in key or "embed_tokens" in key]
    assert of_model
    learned = [key for key in of_model if key.startswith("loss")]
    assert all("layers.1." in key and "lora_" in key and saved[key].dtype == torch.float32 for key in learned)
    before = load_file(home / "hf" / "model.safetensors")
    after = load_file(run / "model" / ("value_lm" if recipe == "qsft" else "") / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {key for key, weight in after.items() if not torch.equal(weight, before[key][: len(weight)].bfloat16())}
    assert changed
    assert all("layers.1." in key and "norm" not in key for key in changed)
    heads = {key: weight for key, weight in weights_of(run).items() if key.startswith("heads.safetensors")}
    assert {weight.dtype for weight in heads.values()} <= {torch.float32}
    if recipe == "ppo":
        assert any("mid_weight" in key for key in heads)  # the agent's own value head
    finished = load_run(run, find_task(NAME))
    assert finished.model.lm.dtype == torch.bfloat16
    assert isinstance(finished.reply("hi", beta=finished.betas[0] if finished.has_values else 0.0), str)
    if recipe in ("ilql", "ppo"):
        load_agent(finished.save_agent(tmp_path / "made"))  # its card names the model that training began with, if any


@pytest.mark.filterwarnings("error:.*lose updates")
def test_top_layers_train_in_float32_above_blocks_in_low_precision(home, tmp_path):
    """The next run begins with the very weights of the last one."""
    given = ["--dtype", "bfloat16", "--top-layers", "1", "--lr", "0.05"]
    assert main(arguments(home, "bc", tmp_path / "bc", "--pretrained", home / "hf", *given)) == 0
    assert main(arguments(home, "ppo", tmp_path / "ppo", "--start", tmp_path / "bc", *given, "--epochs", "2")) == 0
    model = "model/model.safetensors"
    hf, bc, ppo = (
        load_file(path) for path in (home / "hf/model.safetensors", tmp_path / "bc" / model, tmp_path / "ppo" / model)
    )
    for before, after in ((hf, bc), (bc, ppo)):
        for name, weight in after.items():
            start = before[name][: len(weight)]
            lower = "layers.0." in name
            assert weight.dtype == (torch.bfloat16 if lower else torch.float32)
            kept = torch.equal(weight, start.bfloat16() if lower else start)
            assert kept == (lower or "embed" in name), name
    assert isinstance(load_run(tmp_path / "ppo", find_task(NAME)).reply("hi"), str)


def test_a_run_of_a_pretrained_model_is_one_for_the_next(home, tmp_path, monkeypatch, capsys):
    """All weights train, heads with a rate of their own; the presets follow the run."""
    made, make = [], runs.make_optimizer
    monkeypatch.setattr(runs, "make_optimizer", lambda *args, **more: made.append(make(*args, **more)) or made[-1])
    with pytest.warns(UserWarning, match="lose updates"):
        assert main(arguments(home, "bc", tmp_path / "bc", "--pretrained", home / "hf", "--dtype", "bfloat16")) == 0
    assert f"{home / 'hf'}: 3 embeddings that no token" in capsys.readouterr().out
    assert json.loads((tmp_path / "bc" / "config.json").read_text())["from_pretrained"]
    assert main(arguments(home, "ilql", tmp_path / "ilql", "--start", tmp_path / "bc")) == 0
    record = json.loads((tmp_path / "ilql" / "config.json").read_text())
    assert (record["optimizer"], record["value_lr"], record["transition_weight"]) == ("adamw", 3e-4, 0.0)
    sizes = {5e-5: 0, 3e-4: 0}
    for group in made[-1][0].param_groups:
        sizes[group["initial_lr"]] += sum(parameter.numel() for parameter in group["params"])
    finished = load_run(tmp_path / "ilql", find_task(NAME)).model
    assert finished.lm.dtype == torch.float32
    heads = [finished.heads[name] for name in ("qvalue", "value")]
    assert sizes[3e-4] == sum(parameter.numel() for head in heads for parameter in head.parameters())
    assert sizes[5e-5] == sum(parameter.numel() for parameter in finished.lm.parameters())
    assert all(finished.heads[name].normalize for name in ("qvalue", "target_qvalue", "value"))
    assert all("grad_norm_apart" in row for row in log_of(tmp_path / "ilql"))


def test_explicit_options_count_more_than_presets_and_these_more_than_those_of_a_task(tmp_path):
    class Task:
        presets = {"bc": {"lr": 0.5, "fraction": 0.25, "eval_every": 7}, "ppo": {"games": 5}}

    places = {"data": Path("d"), "out": Path("o")}
    chosen = BC.for_task(Task, **places, pretrained="x", batch_size=3)
    assert (chosen.lr, chosen.fraction, chosen.batch_size, chosen.optimizer) == (5e-5, 0.25, 3, "adamw")
    assert chosen.interval(chosen.steps) == chosen.steps // 8
    assert BC.for_task(Task, **places).lr == 0.5
    assert ILQL.for_task(Task, **places, pretrained="x", lora_rank=4).lr == 1e-3
    heads = ILQL.for_task(Task, **places, pretrained="x", lora_rank=4)
    assert (heads.value_lr, heads.normalize_states, heads.clip_heads) == (3e-4, True, True)
    assert not ILQL.for_task(Task, **places).normalize_states
    assert PPO.for_task(Task, out=Path("o"), pretrained="x").normalize_states
    assert PPO.for_task(Task, out=Path("o"), pretrained="x").games == 64
    assert Rejection.for_task(Task, out=Path("o"), pretrained="x").games == 256
    assert PaperILQL.for_task(Task, **places, pretrained="x") == PaperILQL(**places, pretrained="x")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert BC.for_task(Task, **places, start=tmp_path).lr == 5e-5
    (tmp_path / "config.json").write_text(json.dumps({"lr": 1}))  # a run from scratch
    assert BC.for_task(Task, **places, start=tmp_path).lr == 0.5


def test_tokens_must_be_those_of_the_model(home, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(home / "hf", other)
    tokenizer_of(EXACT["gemma"]).save_pretrained(other)
    for recipe, option in (("bc", "--pretrained"), ("ppo", "--start"), ("rejection", "--pretrained")):
        assert "has other tokens" in refused(capsys, *arguments(home, recipe, tmp_path / "x", option, other))
    plain = arguments(home, "ppo", tmp_path / "x", "--start", home / "agent", "--option", "chat=false")
    assert "has other tokens than the data or games" in refused(capsys, *plain)
    without = ["train", "ppo", "--out", tmp_path / "x", *ONLINE, "--pretrained", home / "hf", "--value-warmup", 0]
    assert "names no task: give --task NAME" in refused(capsys, *without)
    assert "ppo begins with a policy: give --start" in refused(capsys, "train", "ppo", "--out", tmp_path / "x")


def test_new_tokens_beside_adapters_are_a_warning(home, tmp_path):
    """A tokenizer with control tokens of its own."""
    given = {"task": NAME, "option": {"model": str(home / "hf"), "chat": False}, "pretrained": str(home / "hf")}
    with pytest.warns(UserWarning, match="tokens are new to .* and their embeddings stay random"):
        load_initial_policy(Rejection(**given, lora_rank=2, out=tmp_path / "x"))


def test_adapters_sit_on_linear_layers_of_the_last_blocks_of_any_model():
    pytest.importorskip("peft")
    options = BC(data=Path("d"), out=Path("o"), pretrained="x", lora_rank=2, lora_layers=3)
    lm = causal_lm(vocab_size=11, layers=4, width=8, heads=2, max_length=16)
    choose_weights(lm, options)
    trained = {name.partition(".lora_")[0] for name, weight in lm.named_parameters() if weight.requires_grad}
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert trained == {f"transformer.h.{block}.{layer}" for block in (1, 2, 3) for layer in layers}
    with pytest.raises(ValueError, match="more than the model's 2 blocks"):
        choose_weights(causal_lm("llama", vocab_size=11, layers=2, width=8, heads=2, max_length=16), options)


@pytest.mark.parametrize(("fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_where_the_cpu_computes_in_it(monkeypatch, fast, dtype):
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: fast)
    assert BC(data=Path("d"), out=Path("o"), dtype="auto", device="cpu").torch_dtype() == dtype
