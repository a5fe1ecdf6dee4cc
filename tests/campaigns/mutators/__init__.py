"""Damage of every kind: each mutator changes one file, or the files around it."""

from tests.campaigns.mutators.base import Mutator, digest_of
from tests.campaigns.mutators.files import FILES
from tests.campaigns.mutators.json_fields import JSON
from tests.campaigns.mutators.rows import ROWS
from tests.campaigns.mutators.tables import TABLES
from tests.campaigns.mutators.tensors import TENSORS
from tests.campaigns.mutators.trees import TREES

MUTATORS: dict[str, Mutator] = {mutator.name: mutator for mutator in (*JSON, *FILES, *ROWS, *TABLES, *TENSORS, *TREES)}

__all__ = ["MUTATORS", "Mutator", "digest_of"]
