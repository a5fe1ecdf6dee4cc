"""The report of in-context evaluations: numbers worked out by hand, and bands that cover the mean."""

import itertools
import json

import numpy as np
import pytest
import torch

from torchrl_lang.algorithm_distillation import in_context_report, paired_test
from torchrl_lang.algorithm_distillation.report import TaskResult, bootstrap_band

# Two seeds, two tasks, two streams, four episodes.
RETURNS = torch.tensor(
    [
        [[[0.0, 1, 2, 4], [0, 0, 0, 0]], [[1, 1, 1, 1], [0, 1, 3, 3]]],
        [[[0.0, 1, 4, 4], [0, 1, 2, 2]], [[1, 1, 3, 3], [0, 1, 1, 3]]],
    ]
)
OPTIMAL = torch.tensor([4.0, 3.0])


def test_numbers_and_regret_worked_out_by_hand():
    report = in_context_report("AD", RETURNS, OPTIMAL, tasks=[7, 11], last=2)
    assert report.mean == (0.25, 0.875, 2.0, 2.5)
    assert report.optimal == 3.5
    assert report.gain == pytest.approx(2.25 / 0.25)
    assert report.never_found == 1 / 8
    late = [(3 + 0 + 1 + 3) / 4 / 3.5, (4 + 2 + 3 + 2) / 4 / 3.5]
    assert report.share_of_optimal.values == pytest.approx(late)
    first, second = report.tasks
    assert (first.task, first.first, first.last, first.optimal, first.never_found) == (7, 0, 2.25, 4, 0.25)
    assert (second.task, second.first, second.last, second.optimal, second.never_found) == (11, 0.5, 2.25, 3, 0)
    assert report.worst_task == first
    assert report.worst_task.share == 2.25 / 4
    # Late minus early: 2.25 - 0.375 and 2.25 - 0.75; of four sign vectors one reaches their sum.
    test = report.late_beats_early
    assert (test.pairs, test.difference, test.wins, test.p_value) == (2, 1.6875, 1.0, 0.25)
    # 3.5 a episode less 0.25, 0.875, 2 and 2.5.
    assert report.regret == (3.25, 5.875, 7.375, 8.375)
    # The first seed earns 7 and 0 on a task of 4 an episode, 4 and 7 on one of 3; the second 9, 5, 8 and 5.
    assert report.total_regret.values == ((9 + 16 + 8 + 5) / 4, (7 + 11 + 4 + 7) / 4)
    band = bootstrap_band(torch.tensor([[[12.5], [6.5]], [[9.0], [5.5]]]))
    assert (report.regret_low[-1], report.regret_high[-1]) == tuple(bound.item() for bound in band)


def test_negative_returns_have_no_share_of_the_optimum():
    returns, optimal = RETURNS - 6, torch.tensor([-1.0, -2.0])
    report = in_context_report("AD", returns, optimal, tasks=[7, 11], last=2)
    assert report.mean == (-5.75, -5.125, -4.0, -3.5)
    assert report.share_of_optimal is None
    assert [task.share for task in report.tasks] == [None, None]
    assert report.worst_task.task == 7  # 2.75 below its optimum, the other one 1.75
    assert report.regret == (4.25, 7.875, 10.375, 12.375)
    assert report.late_beats_early.difference == 1.6875
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["share_of_optimal"] is None


@pytest.mark.parametrize(("last", "optimal", "share"), [(1, 2, 0.5), (0, 0, 1), (-1, 0, None), (-3, -2, None)])
def test_the_share_of_a_task(last, optimal, share):
    assert TaskResult(task=0, first=0, last=last, optimal=optimal, never_found=0).share == share


def test_bands_hold_the_mean_and_equal_a_plain_bootstrap():
    values = torch.rand(3, 8, 5, generator=torch.Generator().manual_seed(0))
    low, high = bootstrap_band(values, resamples=5000)
    random = np.random.default_rng(0)
    drawn = []
    for _ in range(1500):
        seeds, tasks = random.integers(3, size=3), random.integers(8, size=8)
        drawn.append(values.numpy()[seeds][:, tasks].mean((0, 1)))
    np.testing.assert_allclose(low, np.quantile(drawn, 0.025, 0), atol=0.03)
    np.testing.assert_allclose(high, np.quantile(drawn, 0.975, 0), atol=0.03)
    mean = values.mean((0, 1))
    assert ((low < mean) & (mean < high)).all()


@pytest.mark.parametrize("wrong", [{"returns": RETURNS[0]}, {"tasks": [1]}, {"last": 3}, {"optimal": OPTIMAL / 0}])
def test_wrong_arguments(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        in_context_report(**{"name": "AD", "returns": RETURNS, "optimal": OPTIMAL, "last": 2, **wrong})


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_all_sign_vectors(n):
    random = np.random.default_rng(n)
    larger, smaller = random.integers(-3, 4, n) / 10, random.integers(-3, 4, n) / 10  # with ties
    difference = larger - smaller
    signs = itertools.product([1, -1], repeat=n)
    count = sum(float(np.dot(vector, difference)) >= difference.sum() - 1e-9 for vector in signs)
    found = paired_test(torch.from_numpy(larger), torch.from_numpy(smaller))
    assert found.p_value == count / 2**n
    assert found.difference == pytest.approx(difference.mean())
    assert found.wins == (difference > 0).mean()


def test_random_sign_vectors_approach_all_of_them():
    random = torch.Generator().manual_seed(0)
    larger, smaller = torch.rand(14, generator=random) + 0.1, torch.rand(14, generator=random)
    exact = paired_test(larger, smaller).p_value
    zeros = torch.zeros(2)  # pairs without a difference change no sum
    drawn = paired_test(torch.cat([larger, zeros]), torch.cat([smaller, zeros]), draws=40_000).p_value
    assert 0.01 < exact < 0.99
    assert drawn == pytest.approx(exact, abs=0.01)
