"""How the documentation is built: Sphinx with furo, pages in Markdown, the reference out of the docstrings."""

from importlib.metadata import version as installed_version

project = "torchrl_lang"
author = "The torchrl_lang developers"
copyright = "The torchrl_lang developers"
version = release = installed_version("torchrl-lang")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "torchrl_lang"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
