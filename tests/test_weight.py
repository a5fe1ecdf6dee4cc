"""The library stays light: few guards, no import circles, few files with one importer, few files to add a loss."""

import ast
import re

from tests.weight import PACKAGE, circles, code_lines, guard_lines, imports, one_importer, parsed, sources


def test_at_most_seven_percent_of_the_code_guards():
    texts = [path.read_text() for path in sources(PACKAGE)]
    guards, code = (sum(len(lines(text)) for text in texts) for lines in (guard_lines, code_lines))
    assert round(100 * guards / code, 1) <= 7


def test_no_file_imports_itself_through_others():
    assert circles(imports()) == []


def test_few_files_serve_a_single_other_one():
    """But those of the layout of a task (CONTRIBUTING.md)."""
    of_tasks = re.compile(r"torchrl_lang\.(envs\.\w+\.task|recipes\.tasks\.\w+)")
    assert sum(not of_tasks.fullmatch(name) for name in one_importer(imports())) <= 9


def test_a_loss_is_named_in_three_files():
    """Itself, its options, its training function; beside them, packages hand it on (CONTRIBUTING.md)."""
    names = [_names(path) for path in sources(PACKAGE) if path.name != "__init__.py"]
    for loss in ("BCQ", "CQL", "DPO", "IPO", "KTO", "OREO", "Psi", "QSFT"):
        assert sum(bool(named & {loss, f"{loss}Loss"}) for named in names) <= 3, loss


def _names(path):
    found = set()
    for node in ast.walk(parsed(path.read_text())):
        found |= {getattr(node, "id", None), getattr(node, "name", None)}
        found |= {alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)}
    return found
