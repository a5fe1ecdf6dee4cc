"""Learning histories as a dataset of PyTorch: one switch between the formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch.utils.data import Dataset

from torchrl_lang._checks import checked
from torchrl_lang.algorithm_distillation.history import LearningHistory
from torchrl_lang.algorithm_distillation.language.block_rows import pack_blocks
from torchrl_lang.algorithm_distillation.language.records import TextRecord
from torchrl_lang.algorithm_distillation.language.step_rows import LossOn, StepRows
from torchrl_lang.algorithm_distillation.windows import HistoryWindows
from torchrl_lang.text import Tokenizer


class HistoryDataset(Dataset[TensorDictBase]):
    """Items of a learning history for a ``DataLoader``, in the RL format or in the language format.

    ==========  ============================================  ========================================================
    history     ``format="rl"``                               ``format="language"``
    ==========  ============================================  ========================================================
    RL task     windows of ``length`` steps, the entries of   the text of these windows as rows, see
                :class:`LearningHistory`                      :class:`StepRows`
    text task   -                                             rows of ``length`` tokens, see :func:`pack_blocks`
    ==========  ============================================  ========================================================

    An item is a tensordict. A list of indices makes one batch, which a ``DataLoader`` does with
    ``collate_fn=HistoryDataset.collate``.

    Args:
        history: a learning history, or the records of a text task.
        format: "rl" or "language".
        length: steps of a window of an RL task, tokens of a row of a text task.
        template: with "language": a :class:`StepTemplate` or :class:`BlockTemplate`.
        tokenizer: with "language".
        loss_on: with "language": "actions" (completions), or "all" tokens.
        **windows: of an RL task: options of :class:`~torchrl_lang.algorithm_distillation.HistoryWindows`, such as
            ``tasks`` and ``skip_episodes``.

    Attributes:
        left_out: records of the episodes that :func:`pack_blocks` left out: whole episodes that alone are longer than
            a row, or have lines of the template in a text.

    Raises:
        ValueError: ``format`` is unknown, or there is no window.
        TypeError: the template or the tokenizer is missing, or not needed; or a text task has no RL format.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from torchrl_lang.algorithm_distillation import LearningHistory
        >>> from torchrl_lang.algorithm_distillation.language import HistoryDataset, Quantizer
        >>> from torchrl_lang.algorithm_distillation.language import StepTemplate, template_tokenizer
        >>> from torchrl_lang.algorithm_distillation.sources import NoisyExpert
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> source = NoisyExpert(DarkRoomEnv(3, task=0, batch_size=[1, 4], episode_length=5), 20)
        >>> history = LearningHistory(source.history(), source.tasks)
        >>> numbers = [Quantizer(range(3))] * 2, Quantizer(range(5), list("sNSWE")), Quantizer([0, 1])
        >>> template = StepTemplate("compact", *numbers)
        >>> options = {"template": template, "tokenizer": template_tokenizer(template)}
        >>> HistoryDataset(history, "rl", 10)[0]["observation"].shape
        torch.Size([10, 2])
        >>> rows = HistoryDataset(history, "language", 10, at_episode_start=True, **options)
        >>> [len(batch) for batch in DataLoader(rows, batch_size=8, collate_fn=HistoryDataset.collate)]
        [8, 4]
    """

    @checked
    def __init__(
        self,
        history: LearningHistory | Sequence[TextRecord],
        format: Literal["rl", "language"],
        length: int,
        *,
        template: Any = None,
        tokenizer: Tokenizer | None = None,
        loss_on: LossOn = "actions",
        **windows: Any,
    ) -> None:
        is_rl = isinstance(history, LearningHistory)
        if {template is None, tokenizer is None} != {format == "rl"} or (format == "rl" and not is_rl):
            raise TypeError("A template and a tokenizer are for the language format, the only one of text tasks.")
        self.left_out: list[TextRecord] = []
        self._items: HistoryWindows | TensorDictBase
        self._to_rows: StepRows | None = None
        if isinstance(history, LearningHistory):
            self._items = HistoryWindows(history, length, **windows)
            self._to_rows = None if tokenizer is None else StepRows(template, tokenizer, loss_on=loss_on)
        elif tokenizer is not None:
            self._items, self.left_out = pack_blocks(history, template, tokenizer, length, loss_on=loss_on, **windows)

    def __len__(self) -> int:
        """Number of items."""
        return len(self._items)

    def __getitem__(self, index: int | Sequence[int]) -> TensorDictBase:
        """An item, or the batch of several."""
        number = torch.arange(len(self))[index]  # IndexError for those that are out of range
        chosen, items = number.reshape(-1), self._items
        batch = items.history.flat[items.steps_of(chosen)] if isinstance(items, HistoryWindows) else items[chosen]
        batch = batch if self._to_rows is None else self._to_rows(batch)
        return batch if number.ndim else batch[0]

    def __getitems__(self, indices: list[int]) -> TensorDictBase:
        """The batch of a ``DataLoader``."""
        return self[indices]

    @staticmethod
    def collate(batch: TensorDictBase | Sequence[TensorDictBase]) -> TensorDictBase:
        """The ``collate_fn`` of a ``DataLoader``: a batch as it is, items stacked."""
        return batch if isinstance(batch, TensorDictBase) else torch.stack(list(batch))
