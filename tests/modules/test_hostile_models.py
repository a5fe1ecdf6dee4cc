"""Folders that try to run code, to read other files or to exhaust the memory: refused in one line, nothing runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from tests.modules.toys import TOKENIZER, heads, tiny_lm
from tests.processes import run
from tests.sealed import reseal
from torchrl_lang._files import FileError, write_checksums
from torchrl_lang.modules import ReturnEmbedding, load_causal_lm, load_language_model, save_language_model

CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
class EvilConfig(GPT2Config):
    model_type = "evil"
class EvilModel(GPT2LMHeadModel):
    config_class = EvilConfig
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
def generate(model, *args, **kwargs):
    pass
"""


class Bomb:
    """Unpickled, it writes the marker."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def edit(path, **changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def custom_model(folder, marker):
    (folder / "evil.py").write_text(CODE.format(marker=marker))
    names = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    edit(folder / "config.json", model_type="evil", auto_map=names)


def custom_generate(folder, marker):
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(CODE.format(marker=marker))


def pickled_weights(folder, marker):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))


def pickled_weights_by_name(folder, marker):
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    edit(folder / "config.json", transformers_weights="adapter_model.bin")


def pickled_adapters(folder, marker):
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    edit_to = {"peft_type": "LORA", "base_model_name_or_path": str(folder), "r": 2, "target_modules": ["c_attn"]}
    (folder / "adapter_config.json").write_text(json.dumps(edit_to))


def distributed_checkpoint(folder, marker):
    (folder / "model.safetensors").rename(folder / "shard-00001-model-00001-of-00001.safetensors")
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(marker)))


def shard_elsewhere(folder, marker):
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    index = {"metadata": {}, "weight_map": {"transformer.wte.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def shard_that_is_pickled(folder, marker):
    (folder / "model.safetensors").unlink()
    (folder / "weights.bin").write_bytes(pickle.dumps(Bomb(marker)))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "weights.bin"}}))


def device_for_weights(folder, marker):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")


def tensor_of_terabytes(folder, marker):
    header = {"transformer.wte.weight": {"dtype": "F32", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 42]}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))


def setting(**changes):
    """An attack by the configuration alone."""
    return lambda folder, marker: edit(folder / "config.json", **changes)


HOSTILE = {
    "model": (custom_model, "needs code of its own for the model type 'evil'"),
    "generate": (custom_generate, "holds code for generation"),
    "weights": (pickled_weights, "pickled weights"),
    "weights by name": (pickled_weights_by_name, "names another file of weights"),
    "adapters": (pickled_adapters, "holds PEFT adapters"),
    "distributed": (distributed_checkpoint, "holds a distributed checkpoint"),
    "kernel": (setting(attn_implementation="someone/kernel:evil"), "asks for code from elsewhere"),
    "elsewhere": (shard_elsewhere, "lies outside of it"),
    "shard": (shard_that_is_pickled, "weights.bin"),
    "device": (device_for_weights, "is not a regular file"),
    "terabytes": (tensor_of_terabytes, "is not a complete safetensors file"),
    "layers": (setting(n_layer=10**9), 'has 1000000000 as "n_layer"'),
    "wide": (setting(n_embd=1 << 24), "describes a model of"),
    "beyond 64 bits": (setting(n_embd=1 << 40), "describes no model"),
    "positions": (setting(n_positions=10**12), "describes a model of"),
}

PROBE = """
import json, os, resource, sys
import huggingface_hub.constants
from torchrl_lang.modules import load_causal_lm, load_language_model
from torchrl_lang.text import HFTokenizer
huggingface_hub.constants.HF_HUB_OFFLINE = True  # the variable is read at the import
os.dup2(os.open(sys.argv[2], os.O_RDONLY), 0)
sys.stdin = open(0)
resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30))  # nothing here needs more
found = {}
for name, load, folder in json.loads(sys.argv[1]):
    try:
        found[name] = repr({"lm": load_causal_lm, "saved": load_language_model, "tokenizer": HFTokenizer}[load](folder))
    except (OSError, ValueError) as error:
        found[name] = f"{type(error).__name__}: {error}"
print("FOUND" + json.dumps(found))
"""


def probe(tasks, cwd):
    """What loading gives or raises, in another process whose every question is answered by yes."""
    (cwd / "answers").write_text("y\n" * 100)
    done = run("-c", PROBE, json.dumps(tasks), cwd / "answers", cwd=cwd)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.split("FOUND")[-1]), done.stdout + done.stderr


def fast_tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=Backend(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")))


def folders_with_built_in_classes(home, marker):
    """Folders whose code has a class of transformers beside it, and a tokenizer that has none."""
    tiny_lm().save_pretrained(home / "known")
    names = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    edit(home / "known" / "config.json", auto_map=names)
    for name, changes in (("tokenizer", {}), ("strange", {"tokenizer_class": "EvilTokenizer"})):
        fast_tokenizer().save_pretrained(home / name)
        auto_map = {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}
        edit(home / name / "tokenizer_config.json", auto_map=auto_map, **changes)
    for name, load in (("known", "lm"), ("tokenizer", "tokenizer"), ("strange", "tokenizer")):
        (home / name / "evil.py").write_text(CODE.format(marker=marker))
        yield [name, load, str(home / name)]


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """What loading all these folders gave, and all that the process printed."""
    home = tmp_path_factory.mktemp("hostile")
    marker, plain = home / "marker", home / "plain"
    tiny_lm().save_pretrained(plain)
    tasks = [["plain", "lm", str(plain)], *folders_with_built_in_classes(home, marker)]
    for name, (attack, _) in HOSTILE.items():
        folder = shutil.copytree(plain, home / name / "model")
        attack(folder, str(marker))
        tasks += [[f"{name} {load}", load, str(folder)] for load in ("lm", "saved")]
    found, output = probe(tasks, home)
    assert not marker.exists()
    assert "wish to run" not in output
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_folders_are_refused(probed, name):
    for load in ("lm", "saved"):
        message = probed[f"{name} {load}"]
        assert message.startswith("FileError: ")
        assert HOSTILE[name][1] in message
        assert f"/{name}/model" in message
        assert "\n" not in message


def test_built_in_classes_are_taken_in_place_of_code(probed):
    assert probed["plain"].startswith("GPT2LMHeadModel")
    assert probed["known"].startswith("GPT2LMHeadModel")
    assert "HFTokenizer" in probed["tokenizer"]
    assert probed["strange"].startswith("OSError: There is no readable tokenizer in")
    assert "\n" not in probed["strange"]


def test_the_option_lets_code_run(tmp_path):
    """The one way in, so that the tests above attack what would work."""
    marker, folder = tmp_path / "marker", tmp_path / "model"
    tiny_lm().save_pretrained(folder)
    custom_model(folder, str(marker))
    with pytest.raises(FileError, match="trust_remote_code=True"):
        load_causal_lm(folder)
    assert not marker.exists()
    lm = load_causal_lm(folder, trust_remote_code=True)
    assert type(lm).__name__ == "EvilModel"
    assert marker.exists()
    marker.unlink()
    saved = save_language_model(tmp_path / "again", lm)
    with pytest.raises(FileError, match="trust_remote_code=True"):
        load_language_model(saved)
    assert type(load_language_model(saved, trust_remote_code=True).lm).__name__ == "EvilModel"


HEADS = [
    ("value", {"command": "rm"}, 'has the unknown field "heads.value.command"'),
    ("value", {"options": {"width": 10**9}}, "does not hold the heads' tensors"),
    ("value", {"options": {"width": 1 << 40}}, 'describes no head as "heads.value"'),
    ("value", {"options": {"width": "8"}}, 'describes no head as "heads.value"'),
    ("value", {"options": {"width": 8, "command": "rm"}}, 'describes no head as "heads.value"'),
    ("value", {"kind": "os.system"}, 'describes no head as "heads.value"'),
    ("returns", {"options": {"width": 16, "low": 9.0, "high": 2.0}}, 'describes no head as "heads.returns"'),
]


@pytest.mark.parametrize(("head", "changes", "found"), HEADS)
def test_heads_are_built_from_a_table_and_within_their_files(tmp_path, head, changes, found):
    saved = {"value": heads()[1], "returns": ReturnEmbedding(16, 0.0, 1.0)}
    save_language_model(tmp_path / "model", tiny_lm(), saved, tokenizer=TOKENIZER.config())
    reseal(tmp_path / "model" / "torchrl_lang.json", lambda content: content["heads"][head].update(changes))
    with pytest.raises(FileError, match=found) as caught:
        load_language_model(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_the_cache_of_hugging_face_consists_of_links_and_loads(tmp_path):
    """A model by its name, from a cache as a download leaves it."""
    repository, lm = tmp_path / "cache" / "models--someone--tiny", tiny_lm("llama")
    snapshot = repository / "snapshots" / ("a" * 40)
    for part in (snapshot, repository / "blobs", repository / "refs"):
        part.mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    lm.save_pretrained(tmp_path / "plain", max_shard_size="20KB")
    for number, path in enumerate(sorted((tmp_path / "plain").iterdir())):
        path.rename(repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert len(list(snapshot.glob("*.safetensors"))) > 1
    tokens = torch.randint(12, (2, 5))
    loaded = load_causal_lm("someone/tiny", cache_dir=tmp_path / "cache", local_files_only=True)
    torch.testing.assert_close(loaded(tokens).logits, lm(tokens).logits)
    assert loaded.name_or_path == "someone/tiny"
    torch.testing.assert_close(load_language_model(snapshot).lm(tokens).logits, lm(tokens).logits)


def test_tensors_of_a_head_are_exactly_its_own(tmp_path):
    value = heads()[1]
    save_language_model(tmp_path / "model", tiny_lm(), {"value": value})
    path = tmp_path / "model" / "heads.safetensors"
    own = {f"value.{name}": tensor.detach().clone() for name, tensor in value.state_dict().items()}
    for changed, found in (
        ({key: own[key] for key in list(own)[1:]}, "is missing, expected"),
        (own | {"other.weight": torch.ones(2)}, r"other.weight \(2,\), expected none"),
        (own | {"value.out_bias": torch.ones(7)}, r"value.out_bias \(7,\), expected \(1, 1\)"),
        (own | {"value.out_bias": torch.full((1, 1), torch.nan)}, "not finite floating-point numbers: value.out_bias"),
        (own | {"value.out_bias": torch.ones(1, 1, dtype=torch.int64)}, "not finite floating-point numbers"),
    ):
        save_file(changed, path)
        write_checksums(tmp_path / "model")
        with pytest.raises(FileError, match=found):
            load_language_model(tmp_path / "model")
