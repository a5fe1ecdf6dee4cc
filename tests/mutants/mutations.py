"""Small changes of a source file, each of which a test should notice."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAIRS = [(ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)]
PAIRS += [(ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.And, ast.Or)]
OPERATORS = {ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult} | dict(PAIRS) | {b: a for a, b in PAIRS}
NAMES = [("all", "any"), ("amax", "amin"), ("clamp_max", "clamp_min"), ("log_softmax", "softmax"), ("max", "min")]
NAMES += [("maximum", "minimum"), ("mean", "sum")]
METHODS = {"argmax": "argmin", "detach": "clone", "logsumexp": "sum"} | dict(NAMES) | {b: a for a, b in NAMES}
SKIPPED = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)


@dataclass(frozen=True)
class Mutant:
    """One changed line of a file."""

    path: Path
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"


@dataclass(frozen=True)
class Change:
    """A node of a file's tree and what takes its place; written out only where it is drawn, because that is slow."""

    path: Path
    tree: ast.AST
    parent: ast.AST
    field: str
    place: int | None
    statement: ast.stmt
    changed: ast.AST

    def mutant(self) -> Mutant:
        node = _read(self.parent, self.field, self.place)
        before, after = ast.unparse(self.statement).splitlines(), self._unparse(self.statement).splitlines()
        old, new = next(((a, b) for a, b in zip(before, after, strict=False) if a != b), (before[0], after[0]))
        return Mutant(self.path, getattr(node, "lineno", self.statement.lineno), old.strip(), new.strip())

    def source(self) -> str:
        """The whole file with the change (comments are lost, lines are kept in the mutant's text only)."""
        return self._unparse(self.tree)

    def _unparse(self, tree: ast.AST) -> str:
        node = _read(self.parent, self.field, self.place)
        _write(self.parent, self.field, self.place, self.changed)
        text = ast.unparse(tree)
        _write(self.parent, self.field, self.place, node)
        return text


def changes(path: Path, source: str) -> Iterator[Change]:
    """Every change of a file, in the order of its tree."""
    tree = ast.parse(source)
    for parent, field, place, statement in _places(tree):
        for changed in _changes(_read(parent, field, place)):
            yield Change(path, tree, parent, field, place, statement, changed)


def _places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.stmt]]:
    """Where a node may be replaced: its parent, the field, the place in a list, and the statement around it."""
    todo: list[tuple[ast.AST, ast.stmt | None]] = [(tree, None)]
    while todo:
        parent, statement = todo.pop()
        if isinstance(parent, SKIPPED):
            continue
        if isinstance(parent, ast.stmt):
            statement = parent
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for place, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if not isinstance(child, ast.AST) or isinstance(child, ast.expr_context):
                    continue
                if statement is not None and not isinstance(child, ast.stmt):
                    yield parent, field, place, statement
                todo.append((child, statement))


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    if type(node) in OPERATORS:
        yield OPERATORS[type(node)]()
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
        if isinstance(node.op, ast.USub) and node.operand.__class__ is ast.Constant:
            yield ast.Constant(0)  # the first dimension in place of the last
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, int | float):
            yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        changed = copy.deepcopy(node)
        changed.func.attr = METHODS[node.func.attr]
        if node.func.attr == "detach":
            changed.args, changed.keywords = [], []
        yield changed
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)


def _read(parent: ast.AST, field: str, place: int | None) -> ast.AST:
    return getattr(parent, field) if place is None else getattr(parent, field)[place]


def _write(parent: ast.AST, field: str, place: int | None, node: ast.AST) -> None:
    if place is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[place] = node
