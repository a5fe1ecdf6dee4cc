"""References: models and data that give the log-probability of an action for a KL penalty."""

from torchrl_lang.transforms.references.base import Reference
from torchrl_lang.transforms.references.factory import as_policy, as_reference
from torchrl_lang.transforms.references.from_actor import ActorReference
from torchrl_lang.transforms.references.precomputed import ColumnReference, FunctionReference
from torchrl_lang.transforms.references.utterance import UtteranceReference
from torchrl_lang.transforms.references.whole_rows import RowReference
from torchrl_lang.transforms.references.wrapper import WrapperReference

__all__ = [
    "ActorReference",
    "ColumnReference",
    "FunctionReference",
    "Reference",
    "RowReference",
    "UtteranceReference",
    "WrapperReference",
    "as_policy",
    "as_reference",
]
