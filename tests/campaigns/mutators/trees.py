"""Files that are added, among them such as would run code; and whole folders that are damaged."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.campaigns.mutators.base import Mutator

TRAP = "TORCHRL_LANG_TRAP"
"""The environment variable that names the file which foreign code leaves where it ran."""

CODE = f"""
import os, pathlib
pathlib.Path(os.environ["{TRAP}"]).touch()
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
class Config(GPT2Config): model_type = "foreign"
class Model(GPT2LMHeadModel): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
def generate(*args, **kwargs): pass
"""


class Trap:
    """Unpickling it runs code."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, (CODE,)


def foreign_code(path: Path, random: Random) -> str:
    """A module beside the file, which ``auto_map`` names; in a model's config also under an unknown model type."""
    (path.parent / "foreign.py").write_text(CODE)
    (path.parent / "custom_generate").mkdir(exist_ok=True)
    (path.parent / "custom_generate" / "generate.py").write_text(CODE)
    content = json.loads(path.read_text())
    content["auto_map"] = {
        "AutoConfig": "foreign.Config",
        "AutoModel": "foreign.Model",
        "AutoModelForCausalLM": "foreign.Model",
        "AutoTokenizer": ["foreign.Tokenizer", "foreign.Tokenizer"],
    }
    if "model_type" in content and random.random() < 0.7:
        content["model_type"] = "foreign"
    path.write_text(json.dumps(content))
    return "code named by auto_map"


def pickled_instead(path: Path, random: Random) -> str:
    """A pickle under the names that older libraries look for; the file itself goes or stays."""
    for name in ("pytorch_model.bin", "model.pt", f"{path.stem}.pkl", "data.pt"):
        (path.parent / name).write_bytes(pickle.dumps(Trap()))
    if random.random() < 0.7:
        path.unlink()
        return "pickles in its place"
    return "pickles beside it"


def pickled_content(path: Path, random: Random) -> str:
    path.write_bytes(pickle.dumps(Trap()))
    return "a pickle"


def stray_file(path: Path, random: Random) -> str:
    name = random.choice(["notes.txt", ".hidden", "extra.memmap", "extra.json", "model.safetensors.index.json"])
    (path.parent / name).write_text("{}")
    return f"{name} added"


def stray_folder(path: Path, random: Random) -> str:
    """A folder that looks like a newer one of its kind."""
    name = random.choice(["step-000000999", "step-x", "model.old", ".writing-x", "rows2", "step-000000002-1"])
    (path.parent / name).mkdir(exist_ok=True)
    (path.parents[1] / name).mkdir(exist_ok=True)
    return f"an empty folder {name} added"


def copied_folder(path: Path, random: Random) -> str:
    """The file's folder a second time under a name that comes later."""
    name = random.choice([f"{path.parent.name}-1", "step-000000999", f"{path.parent.name}9"])
    shutil.copytree(path.parent, path.parent.with_name(name), dirs_exist_ok=True)
    return f"its folder copied to {name}"


def deleted_folder(path: Path, random: Random) -> str:
    shutil.rmtree(path.parent)
    return "its folder deleted"


def emptied_folder(path: Path, random: Random) -> str:
    for other in path.parent.iterdir():
        if other.is_file():
            other.unlink()
    return "all files of its folder deleted"


def folder_is_file(path: Path, random: Random) -> str:
    shutil.rmtree(path.parent)
    path.parent.write_text("no folder")
    return "its folder is a file"


def other_time(path: Path, random: Random) -> str:
    """Only the clock: nothing is damaged."""
    os.utime(path, (0, 0))
    path.write_bytes(path.read_bytes() + b"")
    os.utime(path, (10**9, 10**9))
    return "the same content, written at another time"


ANY: tuple[Callable[[Path, Random], str], ...] = (
    pickled_instead,
    pickled_content,
    stray_file,
    stray_folder,
    copied_folder,
    deleted_folder,
    emptied_folder,
    folder_is_file,
    other_time,
)

TREES = [
    Mutator("tree_foreign_code", lambda path: path.suffix == ".json", foreign_code),
    *(Mutator(f"tree_{change.__name__}", lambda path: True, change) for change in ANY),
]
