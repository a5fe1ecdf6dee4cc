"""Split text histories into episodes to train on, to choose a checkpoint on, and to report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchrl_lang._checks import within
from torchrl_lang._files import shorten
from torchrl_lang.algorithm_distillation.language.text_history import TextHistory, group_episodes, in_epoch_order

__all__ = ["TextSplit", "split_texts"]


class TextSplit(NamedTuple):
    """Text histories in the order of :func:`in_epoch_order`; no episode is in two of them.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.language import TextHistory, split_texts
        >>> records = [TextHistory(query="q", response="r", rewards=(0,), epoch=epoch) for epoch in range(10)]
        >>> split = split_texts(records)
        >>> len(split.train), len(split.validation), len(split.test)
        (8, 1, 1)
    """

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
    """Hold out random episodes along each run, so that all parts show the whole course of training.

    Of ``n`` episodes of an epoch ``test * n``, rounded, are for the report, and ``validation * n`` choose the
    checkpoint. Where that is less than one, the shares are added up from epoch to epoch: 10 % of epochs of two episodes
    are one of every fifth epoch. An epoch of several episodes leaves at least one to train on, and a run of three
    episodes or more has at least one in each part.

    The episodes of an epoch, which were played with the same weights, are shuffled: recorded runs have them in the
    order in which they began, so that the last of an epoch are the short ones.

    Args:
        records: the records, those of an episode in their order.
        validation: share of the episodes.
        test: share of the episodes, if there are no ``test_runs``.
        test_runs: names of runs of which all episodes are for the report, and that no other part has.
        seed: seed of the order in an epoch.

    Raises:
        ValueError: a run is unknown, a share is not from 0 to 1, the shares are together 1 or more, or a part is empty.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.language import TextHistory, split_texts
        >>> records = [
        ...     TextHistory(query="", response=f"{epoch}{number}", rewards=(0,), epoch=epoch)
        ...     for epoch in range(2) for number in range(4)
        ... ]
        >>> [[record.response for record in part] for part in split_texts(records)]
        [['02', '00', '13', '12', '11', '10'], ['01'], ['03']]
    """
    for name, share in (("validation", validation), ("test", test)):
        within(name, share, 0, 1)
    runs = {record.run for record in records}
    if unknown := [run for run in test_runs if run not in runs]:
        raise ValueError(f"There is no run {shorten(unknown)}: the runs are {shorten(sorted(runs))}.")
    split, random = TextSplit([], [], []), np.random.default_rng(seed)
    for run in in_epoch_order(records):
        epochs = _epochs(run)
        if run[0].run in test_runs:
            parts = [(0, len(epoch)) for epoch in epochs]
        else:
            parts = _held_out([len(epoch) for epoch in epochs], validation, None if test_runs else test)
        for episodes, (chosen, reported) in zip(epochs, parts, strict=True):
            epoch = [episodes[place] for place in random.permutation(len(episodes))]
            last = len(epoch) - reported
            first = last - chosen
            for part, kept in zip(split, (epoch[:first], epoch[first:last], epoch[last:]), strict=True):
                part.extend(record for episode in kept for record in episode)
    is_whole = validation + (0 if test_runs else test) >= 1
    for name, part in split._asdict().items():
        if not part or (is_whole and name == "train"):
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


def _held_out(sizes: Sequence[int], validation: float, test: float | None) -> list[tuple[int, int]]:
    """How many episodes of each epoch of a run are for validation and for the test; None: no test.

    A share of less than one episode is carried to the next epoch, as is what an epoch has no room for.
    """
    total, found = sum(sizes), list[tuple[int, int]]()
    due = [0.5, 0.5]  # so that the sum is rounded, not cut
    for size in sizes:
        room = max(1, size - 1)
        taken = [0, 0]
        for part, share in ((1, test), (0, validation)):
            if share is None:
                continue
            wanted = max(share, 1 / total) * size
            due[part] += round(wanted) if wanted >= 1 else wanted
            taken[part] = min(int(due[part] + 1e-9), room)  # ten times 0.1 is less than 1
            due[part] -= taken[part]
            room -= taken[part]
        found.append((taken[0], taken[1]))
    return found
