"""No dataset, model or checkpoint can run as code: no pickle, no eval, no import by a name from a file."""

import ast
from pathlib import Path

import pytest

from tests.weight import parsed

ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("torchrl_lang", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))

# Modules that build objects from bytes.
UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
RUN_TEXT = {"eval", "exec", "compile", "__import__", "execfile"}
# Files that import modules by a name from a table of their own, or that a user gave, never from a file that was read.
IMPORT_BY_TABLE = {
    "torchrl_lang/__main__.py",
    "torchrl_lang/recipes/tasks/__init__.py",
    "torchrl_lang/recipes/algorithms/__init__.py",
    "torchrl_lang/recipes/tasks/env_task.py",
    "benchmarks/__main__.py",
}


def offences(tree, name=""):
    """What a file does that it must not, as ``line: what``."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names if alias.name.split(".")[0] in UNPICKLERS]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLERS:
            found.append((node, node.module))
        elif isinstance(node, ast.Call):
            found += [(node, what) for what in call_offences(node, name)]
        elif isinstance(node, ast.FunctionDef):
            positional = [*node.args.posonlyargs, *node.args.args][::-1]
            pairs = [*zip(positional, node.args.defaults[::-1], strict=False)]
            pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            trusts = [default for argument, default in pairs if argument.arg == "trust_remote_code" and default]
            found += [(node, "trusts remote code") for default in trusts if not is_false(default)]
    return [f"{node.lineno}: {what}" for node, what in found]


def is_false(value):
    return isinstance(value, ast.Constant) and value.value is False


def call_offences(call, name):
    called = ast.unparse(call.func)
    last = called.rsplit(".", 1)[-1]
    options = {keyword.arg: keyword.value for keyword in call.keywords}
    if called in RUN_TEXT or called in {f"builtins.{word}" for word in RUN_TEXT}:
        yield called
    if last == "import_module" and name not in IMPORT_BY_TABLE and not isinstance(call.args[0], ast.Constant):
        yield f"{called} of a name that is computed"
    if called == "torch.load":
        yield "torch.load: use safetensors"
    if "weights_only" in options:
        yield "weights_only"
    pickles = options.get("allow_pickle", ast.Constant(last == "load_memmap"))
    if getattr(pickles, "value", True) is not False:
        yield f"{called} without allow_pickle=False"
    if last == "from_pretrained" or (last == "from_config" and called.startswith("Auto")):
        trusts = options.get("trust_remote_code")
        # False, or an option of the calling function, which is False unless a user gave it.
        if not is_false(trusts) and getattr(trusts, "id", "") != "trust_remote_code":
            yield f"{called} without trust_remote_code=False"


def test_no_file_runs_what_it_reads():
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        assert offences(parsed(path.read_text()), name) == [], name


@pytest.mark.parametrize(
    "line",
    ["import pickle", "eval(text)", "exec(text)", "__import__(name)", "importlib.import_module(manifest['module'])"]
    + ["torch.load(path)", "transformers.load(path, weights_only=False)", "np.load(path, allow_pickle=True)"]
    + ["AutoModel.from_config(config)", "AutoModel.from_pretrained(path, trust_remote_code=manifest['trust'])"]
    + ["TensorDict.load_memmap(path)", "def load(path, *, trust_remote_code=True): ..."],
)
def test_the_test_sees_what_it_looks_for(line):
    assert offences(ast.parse(line))
