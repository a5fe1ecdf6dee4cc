"""The weight of the library: lines, guards, circles and exported names (``python -m tests.weight``)."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchrl_lang"
CHECKS = ("check", "require", "refuse", "assert")
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def sources(folder: Path) -> list[Path]:
    """All Python files of a folder, by name."""
    return sorted(folder.rglob("*.py"))


@cache
def parsed(text: str) -> ast.Module:
    """The tree of a file's text."""
    try:
        return ast.parse(text)
    except SystemError:  # before 3.11.8, where another thread parses while this one collects garbage (gh-106905)
        return ast.parse(text)


@cache
def code_lines(text: str) -> set[int]:
    """The numbers of the lines that hold code: no docstring, comment or blank line."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {n for token in tokens if token.type not in SILENT for n in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def guard_lines(text: str) -> set[int]:
    """The numbers of the lines of code that refuse: raises with conditions, error handlers, checks and their calls."""
    lines: set[int] = set()
    for node in ast.walk(parsed(text)):
        if (
            (isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise))
            or (isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith(CHECKS))
            or isinstance(node, ast.Raise | ast.Assert | ast.ExceptHandler)
        ):
            lines |= _lines(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name.lstrip("_").startswith(CHECKS) and name != "requires_grad_":
                lines |= _lines(node)
    return lines & code_lines(text)


def _lines(node: ast.stmt | ast.ExceptHandler) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def module_name(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(package: Path = PACKAGE) -> dict[str, set[str]]:
    """The modules of the package that each of its modules imports, inside functions too."""
    known = {module_name(path) for path in sources(package)}
    return {module_name(path): set(_imported(path, known)) - {module_name(path)} for path in sources(package)}


def _imported(path: Path, known: set[str]) -> Iterator[str]:
    here = module_name(path).split(".")
    for node in _statements(parsed(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            up = node.level - (path.name == "__init__.py")
            base = here[: len(here) - up] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                if inner in known:
                    yield inner
                elif module in known:
                    yield module


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All but what is there for types only."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from _statements(child)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of files that import each other; what a package's ``__init__`` hands on is no import of the package."""
    reached = {name: _reached(graph, name) for name in graph}
    groups = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in graph}
    return [list(group) for group in sorted(groups) if len(group) > 1]


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found, ahead = {start}, [start]
    while ahead:
        more = graph[ahead.pop()] - found
        found |= more
        ahead += more
    return found


def one_importer(graph: dict[str, set[str]]) -> list[str]:
    """Files that one other module imports and no package hands on."""
    packages = {module_name(path) for path in PACKAGE.rglob("__init__.py")}
    importers = defaultdict(set)
    for name, others in graph.items():
        for other in others:
            importers[other].add(name)
    return sorted(
        name for name in set(graph) - packages if len(importers[name]) == 1 and not importers[name] & packages
    )


def exported() -> set[str]:
    """The names in the ``__all__`` of the public packages; one that two of them hand on counts once."""
    texts = [path.read_text() for path in PACKAGE.rglob("__init__.py") if not path.parent.name.startswith("_")]
    assigned = [node for text in texts for node in parsed(text).body if isinstance(node, ast.Assign)]
    lists = [ast.literal_eval(node.value) for node in assigned if ast.unparse(node.targets[0]) == "__all__"]
    return set(chain(*lists))


def main() -> None:
    figures = defaultdict(Counter[str])
    for path in sources(PACKAGE):
        text, place = path.read_text(), path.relative_to(PACKAGE).with_suffix("").parts[0]
        counted = {
            "files": 1,
            "lines": text.count("\n"),
            "code": len(code_lines(text)),
            "guards": len(guard_lines(text)),
        }
        figures[place].update(counted)
        figures["~ all"].update(counted)
    print(f"{'package':<16}{'files':>6}{'lines':>8}{'code':>8}{'guards':>8}")
    for place, found in sorted(figures.items()):
        print(f"{place.strip('~ '):<16}{found['files']:>6}{found['lines']:>8,}{found['code']:>8,}", end="")
        print(f"{found['guards'] / found['code']:>8.1%}")
    graph = imports()
    print(f"tests: {sum(path.read_text().count(chr(10)) for path in sources(ROOT / 'tests')):,} lines")
    print(f"exported names: {len(exported())}; files with one importer: {len(one_importer(graph))}")
    for circle in circles(graph):
        print("circle:", ", ".join(circle))


if __name__ == "__main__":
    main()
