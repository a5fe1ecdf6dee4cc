"""How the documentation is built: Sphinx with furo, pages in Markdown, the API reference from the docstrings."""

import importlib
import inspect
import re
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from types import FunctionType, ModuleType

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging
from sphinx.util.inspect import stringify_signature

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.formulas import typeset

project = "torchrl_lang"
author = "The torchrl_lang developers"
copyright = "The torchrl_lang developers"
version = release = installed_version("torchrl-lang")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "torchrl_lang"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "imported-members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False


def setup(app: Sphinx) -> None:
    """Have every public name of every package in the reference, and every class with its arguments."""
    app.connect("source-read", add_constants)
    app.connect("autodoc-process-signature", show_arguments)
    app.connect("autodoc-process-docstring", typeset_formulas, priority=400)  # before napoleon reads sections
    app.connect("env-check-consistency", check_public_names)


def show_arguments(
    app: Sphinx, kind: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """The arguments of ``__init__``, where a metaclass or ``__new__`` of TorchRL hides them; none of a protocol."""
    if kind != "class" or signature != "(*args, **kwargs)":
        return None
    if getattr(obj, "_is_protocol", False):
        return "", None
    own = inspect.signature(obj.__init__)  # type: ignore[misc]
    arguments = list(own.parameters.values())[1:]
    return stringify_signature(own.replace(parameters=arguments, return_annotation=inspect.Signature.empty)), None


def typeset_formulas(app: Sphinx, kind: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Formulas of docstrings in LaTeX."""
    lines[:] = typeset(lines)


def add_constants(app: Sphinx, page: str, source: list[str]) -> None:
    """Document the constants of ``__all__``, too: autodoc finds only those that a module itself documents."""

    def with_constants(directive: re.Match[str]) -> str:
        name = directive[1]
        package = importlib.import_module(name)
        constants = [key for key in public(package) if not isinstance(getattr(package, key), type | FunctionType)]
        once = (
            f"   :exclude-members: {', '.join(constants)}\n" if constants and not hasattr(package, "__path__") else ""
        )
        return directive[0] + once + "".join(constant(name, key, getattr(package, key)) for key in constants)

    source[0] = re.sub(r"^\.\. automodule:: (\S+)\n(?:   :.*\n)*", with_constants, source[0], flags=re.M)


def public(package: ModuleType) -> list[str]:
    """Its ``__all__``; of a module without one, what it defines."""
    named = {
        key: value for key, value in vars(package).items() if key[0].isalpha() and not isinstance(value, ModuleType)
    }
    own = package.__name__
    return getattr(package, "__all__", [key for key in named if getattr(named[key], "__module__", own) == own])


def constant(package: str, name: str, value: object) -> str:
    """The entry of a constant: its value where that is a text, and the docstring where it is defined."""
    entry = [f".. py:data:: {name}", f"   :module: {package}"]
    if isinstance(value, str):
        entry.append(f"   :value: {value!r}")
    for module in sorted(key for key in sys.modules if key.startswith("torchrl_lang")):
        if vars(sys.modules[module]).get(name) is value:
            docs = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name))
            if docs:
                entry += ["", *(f"   {line}" for line in docs)]
                break
    return "\n" + "\n".join(entry) + "\n"


def check_public_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names that the reference lacks; `make docs` takes a warning for an error."""
    documented = {name for name, *_ in env.domains["py"].get_objects()}
    pages = sorted(path.stem for path in Path(app.srcdir, "api").glob("*.md") if path.stem != "index")
    packages = {page: importlib.import_module(f"torchrl_lang.{page}") for page in pages}
    for page, package in packages.items():
        for name in public(package):
            same = [p for p, other in packages.items() if getattr(other, name, None) is getattr(package, name)]
            if not any(f"torchrl_lang.{p}.{name}" in documented for p in same):
                logging.getLogger(__name__).warning("%s of torchrl_lang.%s is not in the reference", name, page)
