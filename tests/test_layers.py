"""Who may import whom: lower layers know nothing of higher ones, and importing a module has no effect."""

import ast
import subprocess
import sys
from collections import defaultdict

import pytest

from tests.processes import run
from tests.weight import PACKAGE, imports, parsed, sources

LAYERS = [["_files"], ["_checks", "_random_stream", "_ranks"], ["_http", "schema", "functional"], ["text"], ["data"]]
LAYERS += [["envs", "modules"], ["transforms", "objectives"], ["evaluation"], ["algorithm_distillation", "training"]]
LAYERS += [["recipes"], ["__main__"]]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def layer_of(module):
    """Files of a task's folder rank with ``recipes``, which imports them lazily."""
    parts = module.split(".")
    return "recipes" if parts[1] == "envs" and parts[-1] in ("folder", "prepare", "task") else parts[1]


def test_nothing_imports_from_above_or_from_a_neighbour():
    wrong = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if {module, other}.isdisjoint({"torchrl_lang"})
        for mine, its in [(layer_of(module), other.split(".")[1])]
        if mine != its and RANK[its] >= RANK[mine] and {mine, its} != {"schema", "functional"}
    ]
    assert not wrong


def test_optional_packages_are_imported_in_one_file_each():
    """Each names its extra where it is missing."""
    found = defaultdict(set)
    for path in sources(PACKAGE):
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                for name in [alias.name for alias in node.names if isinstance(node, ast.Import)] or [str(node.module)]:
                    found[name.split(".")[0]].add(path.name)
    expected = {
        "gguf": "gguf_files",
        "h5py": "files",
        "matplotlib": "plots",
        "peft": "initial_model",
        "profanity_check": "rewards",
        "ray": "ray_collector",
    }
    expected |= {"sklearn": "upvotes", "starlette": "server", "textarena": "textarena", "textworld": "engine_process"}
    expected |= {"uvicorn": "server", "vaderSentiment": "rewards", "vllm": "engines"}
    assert {name: found[name] for name in expected} == {name: {f"{file}.py"} for name, file in expected.items()}
    assert not found["wandb"]


@pytest.mark.slow
def test_importing_everything_leaves_the_random_stream_and_needs_no_extras():
    """In a program that is forked from a process that only imports; torch has drawn the seed of that from 64 bits."""
    code = (
        "import sys, torch, torchrl_lang.envs, torchrl_lang.modules, torchrl_lang.objectives, torchrl_lang.evaluation, "
        "torchrl_lang.training, torchrl_lang.data; assert 'matplotlib' not in sys.modules;"
        "seed = torch.initial_seed(); assert seed > 2**32, seed;"
        "assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state())"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


CART_POLE = """
import sys
sys.modules["transformers"] = sys.modules["huggingface_hub"] = None  # an import fails
import torch
import torchrl_lang.algorithm_distillation, torchrl_lang.data, torchrl_lang.envs, torchrl_lang.evaluation
import torchrl_lang.objectives, torchrl_lang.training
from tensordict.nn import TensorDictModule
from torchrl.envs import GymEnv, TransformedEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor
from torchrl_lang.modules import UtteranceActor, language_actor
from torchrl_lang.transforms import KLRewardTransform
net = TensorDictModule(torch.nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
actor = ProbabilisticActor(net, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True)
env = TransformedEnv(GymEnv("CartPole-v1"), KLRewardTransform(actor, 0.1))
assert env.rollout(5, actor)["next", "kl"].shape == (5,)
"""


@pytest.mark.slow
def test_transformers_is_imported_where_a_language_model_is_built():
    """Not for a penalty on CartPole: it takes seconds and a hundred megabytes."""
    done = subprocess.run([sys.executable, "-c", CART_POLE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
