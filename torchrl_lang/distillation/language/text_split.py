"""Split text histories into episodes to train on, to choose a checkpoint on, and to report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchrl_lang.distillation.language.text_history import TextHistory, group_episodes, in_epoch_order
from torchrl_lang.functional.checks import within
from torchrl_lang.storage import shorten

__all__ = ["TextSplit", "split_texts"]


class TextSplit(NamedTuple):
    """Text histories in the order of :func:`in_epoch_order`; no episode is in two of them."""

    train: list[TextHistory]
    validation: list[TextHistory]
    test: list[TextHistory]


def split_texts(
    records: Sequence[TextHistory],
    *,
    validation: float = 0.1,
    test: float = 0.1,
    test_runs: Sequence[str] = (),
    seed: int = 0,
) -> TextSplit:
    """Hold out random episodes of each epoch of each run, so that all parts show the whole course of training.

    Of ``n`` episodes of an epoch ``test * n``, rounded, are for the report, and ``validation * n`` choose the
    checkpoint, each at least one.

    The episodes of an epoch, which were played with the same weights, are shuffled: recorded runs have them in the
    order in which they began, so that the last of an epoch are the short ones.

    Args:
        records: the records, those of an episode in their order.
        validation: share of an epoch's episodes.
        test: share of an epoch's episodes, if there are no ``test_runs``.
        test_runs: names of runs of which all episodes are for the report, and that no other part has.
        seed: seed of the order in an epoch.

    Raises:
        ValueError: a run is unknown, a share is not from 0 to 1, or a part is empty.

    Examples:
        >>> from torchrl_lang.distillation.language import TextHistory, split_texts
        >>> records = [
        ...     TextHistory(query="", response=f"{epoch}{number}", rewards=(0,), epoch=epoch)
        ...     for epoch in range(2) for number in range(5)
        ... ]
        >>> [[record.response for record in part] for part in split_texts(records)]
        [['02', '04', '03', '14', '11', '12'], ['00', '10'], ['01', '13']]
    """
    for name, share in (("validation", validation), ("test", test)):
        within(name, share, 0, 1)
    runs = {record.run for record in records}
    if unknown := [run for run in test_runs if run not in runs]:
        raise ValueError(f"There is no run {shorten(unknown)}: the runs are {shorten(sorted(runs))}.")
    split, random = TextSplit([], [], []), np.random.default_rng(seed)
    for run in in_epoch_order(records):
        for episodes in _epochs(run):
            epoch = [episodes[place] for place in random.permutation(len(episodes))]
            last = len(epoch) - (0 if test_runs else max(1, round(test * len(epoch))))
            first = max(0, last - max(1, round(validation * len(epoch))))
            if run[0].run in test_runs:
                first = last = 0
            for part, chosen in zip(split, (epoch[:first], epoch[first:last], epoch[last:]), strict=True):
                part.extend(record for episode in chosen for record in episode)
    for name, part in split._asdict().items():
        if not part:
            raise ValueError(
                f"No episode is left for {name} with validation={validation}, test={test} and "
                f"test_runs={list(test_runs)}: give other shares, or histories with more episodes in an epoch."
            )
    return split


def _epochs(run: Sequence[TextHistory]) -> list[list[list[TextHistory]]]:
    """The episodes of each epoch of a run in order."""
    epochs: dict[int, list[list[TextHistory]]] = {}
    for episode in group_episodes(run):
        epochs.setdefault(episode[0].epoch, []).append(episode)
    return list(epochs.values())
