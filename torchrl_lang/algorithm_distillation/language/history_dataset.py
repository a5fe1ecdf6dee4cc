"""Learning histories as a dataset of PyTorch: one switch between the formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.utils.data import Dataset

from torchrl_lang._checks import one_of
from torchrl_lang.algorithm_distillation.history import LearningHistory
from torchrl_lang.algorithm_distillation.language.block_rows import completion_rows, pack_blocks
from torchrl_lang.algorithm_distillation.language.block_template import BlockTemplate
from torchrl_lang.algorithm_distillation.language.step_rows import LossOn, StepRows
from torchrl_lang.algorithm_distillation.language.step_template import StepTemplate
from torchrl_lang.algorithm_distillation.language.text_history import TextHistory
from torchrl_lang.algorithm_distillation.windows import HistoryWindows
from torchrl_lang.text import Tokenizer

__all__ = ["HistoryDataset"]


class HistoryDataset(Dataset[TensorDictBase]):
    """Items of a learning history for a ``DataLoader``, in the RL format or in the language format.

    ==========  ==============================================  ======================================================
    history     ``format="rl"``                                 ``format="language"``
    ==========  ==============================================  ======================================================
    RL task     windows of ``length`` steps, the entries of     the text of these windows as rows, see
                :class:`LearningHistory`                        :class:`StepRows`
    text task   one row of ``length`` tokens for each record,   rows of ``length`` tokens of packed blocks, see
                see :func:`completion_rows`                     :func:`pack_blocks`
    ==========  ==============================================  ======================================================

    An item is a tensordict. A list of indices makes one batch, which a ``DataLoader`` does with
    ``collate_fn=HistoryDataset.collate``.

    Args:
        history: a learning history, or the records of a text task.
        format: "rl" or "language".
        length: steps of a window of an RL task, tokens of a row of a text task.
        template: with "language": a :class:`StepTemplate` or :class:`BlockTemplate`.
        tokenizer: with "language" or a text task.
        loss_on: with "language": "actions" (completions), or "all" tokens.
        **windows: of an RL task: options of :class:`~torchrl_lang.algorithm_distillation.HistoryWindows`, such as
            ``tasks`` and ``skip_episodes``.

    Attributes:
        left_out: records of the episodes that :func:`pack_blocks` left out: whole episodes that alone are longer than
            a row, or have lines of the template in a text.

    Raises:
        ValueError: ``format`` is unknown, or there is no window.
        TypeError: the template or the tokenizer is missing or of another task, or there are options of windows for a
            text task.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from torchrl_lang.algorithm_distillation import LearningHistory
        >>> from torchrl_lang.algorithm_distillation.language import HistoryDataset, Levels
        >>> from torchrl_lang.algorithm_distillation.language import StepTemplate, template_tokenizer
        >>> from torchrl_lang.algorithm_distillation.sources import NoisyExpert
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> source = NoisyExpert(DarkRoomEnv(3, task=0, batch_size=[1, 4], episode_length=5), 20)
        >>> history = LearningHistory(source.history(), source.tasks)
        >>> template = StepTemplate.compact([Levels(range(3))] * 2, Levels(range(5), list("sNSWE")), Levels([0, 1]))
        >>> options = {"template": template, "tokenizer": template_tokenizer(template)}
        >>> HistoryDataset(history, "rl", 10)[0]["observation"].shape
        torch.Size([10, 2])
        >>> rows = HistoryDataset(history, "language", 10, at_episode_start=True, **options)
        >>> [len(batch) for batch in DataLoader(rows, batch_size=8, collate_fn=HistoryDataset.collate)]
        [8, 4]
    """

    def __init__(
        self,
        history: LearningHistory | Sequence[TextHistory],
        format: Literal["rl", "language"],
        length: int,
        *,
        template: StepTemplate | BlockTemplate | None = None,
        tokenizer: Tokenizer | None = None,
        loss_on: LossOn = "actions",
        **windows: Any,
    ) -> None:
        one_of("format", format, ("rl", "language"))
        is_rl = isinstance(history, LearningHistory)
        wanted = None if format == "rl" else StepTemplate if is_rl else BlockTemplate
        if (template is None) != (wanted is None) or (wanted is not None and not isinstance(template, wanted)):
            raise TypeError(
                f"format={format!r} of this history needs {'no template' if wanted is None else wanted.__name__}, got "
                f"{type(template).__name__}."
            )
        if (tokenizer is None) != (format == "rl" and is_rl) or (windows and not is_rl):
            raise TypeError("A tokenizer is for text, and options of windows are for learning histories of RL tasks.")
        self.left_out: list[TextHistory] = []
        self._windows: HistoryWindows | None = None
        self._to_rows: StepRows | None = None
        self._rows: TensorDict | None = None
        if isinstance(history, LearningHistory):
            self._windows = HistoryWindows(history, length, **windows)
            if isinstance(template, StepTemplate) and tokenizer is not None:
                self._to_rows = StepRows(template, tokenizer, loss_on=loss_on)
        elif isinstance(template, BlockTemplate) and tokenizer is not None:
            self._rows, self.left_out = pack_blocks(history, template, tokenizer, length, loss_on=loss_on)
        elif tokenizer is not None:
            self._rows = completion_rows(history, tokenizer, length)

    def __len__(self) -> int:
        """Number of items."""
        items = self._rows if self._windows is None else self._windows
        assert items is not None
        return len(items)

    def __getitem__(self, index: int | Sequence[int]) -> TensorDictBase:
        """An item, or the batch of several."""
        wanted = torch.as_tensor(index, dtype=torch.int64)
        if ((wanted < -len(self)) | (wanted >= len(self))).any():
            raise IndexError(f"The dataset has {len(self)} items, got the index {index}.")
        batch = self._read(wanted.reshape(-1) % len(self))
        return batch if wanted.ndim else batch[0]

    def __getitems__(self, indices: list[int]) -> TensorDictBase:
        """What a ``DataLoader`` calls for a batch."""
        return self[indices]

    def _read(self, index: Tensor) -> TensorDictBase:
        """The items of numbers ``[B]``."""
        if self._windows is None:
            assert self._rows is not None
            return self._rows[index]
        steps = self._windows.history.flat[self._windows.steps_of(index)]
        return steps if self._to_rows is None else self._to_rows(steps)

    @staticmethod
    def collate(batch: TensorDictBase | Sequence[TensorDictBase]) -> TensorDictBase:
        """The ``collate_fn`` of a ``DataLoader``: a batch as it is, items stacked."""
        return batch if isinstance(batch, TensorDictBase) else torch.stack(list(batch))
