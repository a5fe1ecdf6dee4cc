"""Numbers become words and the same numbers again; what has no word is refused, or written as the nearest word."""

import math

import numpy as np
import pytest
import torch

from torchrl_lang.algorithm_distillation.language import Quantizer


def test_bins_are_those_of_a_plain_loop():
    bins = Quantizer.bins(-2, 3, 7)
    values = torch.rand(500, generator=torch.Generator().manual_seed(1)) * 5 - 2
    expected = [min(math.floor((value + 2) / 5 * 7), 6) for value in values.double().tolist()]
    assert bins.write(values) == [str(number) for number in expected]
    centres = [-2 + 5 * (number + 0.5) / 7 for number in expected]
    torch.testing.assert_close(bins.quantise(values), torch.tensor(centres))
    assert ((bins.quantise(values) - values).abs() <= 5 / 14 + 1e-6).all()


@pytest.mark.parametrize(
    "quantizer", [Quantizer.bins(-2, 3, 7), Quantizer([-2.0, 0.1, 3.0], outside="nearest"), Quantizer.decimals()]
)
def test_quantising_twice_changes_nothing(quantizer):
    values = torch.rand(200, generator=torch.Generator().manual_seed(1)) * 5 - 2
    once = quantizer.quantise(values)
    assert torch.equal(quantizer.quantise(once), once)
    assert torch.equal(quantizer.read(quantizer.write(values)).float(), once)


@pytest.mark.parametrize("quantizer", [Quantizer.bins(-2, 3, 7), Quantizer([-2.0, 0.1, 3.0])])
def test_quantised_values_stay_on_their_device(quantizer, monkeypatch):
    values = torch.tensor([-2.0, 3.0])
    index = quantizer.index(values)
    monkeypatch.setattr(quantizer, "index", lambda values: index.to(values.device))  # it has no values to compare
    assert quantizer.quantise(values.to("meta")).is_meta


def test_decimals_of_any_float32_and_integer_are_exact():
    decimals, bits = Quantizer.decimals(), np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    values = torch.from_numpy(bits.view(np.float32)[np.isfinite(bits.view(np.float32))])
    assert torch.equal(decimals.read(decimals.write(values)).float(), values)
    values = torch.tensor([2**53 + 1, 3, 0, -(2**63), 2**63 - 1])
    assert decimals.write(values)[:2] == ["9007199254740993", "3"]
    assert torch.equal(decimals.read(decimals.write(values)), values)
    for words in (["3", "0.5"], ["3", str(2**63)], ["-0", "3"]):  # no integers of 64 bits
        assert decimals.read(words).tolist() == [float(word) for word in words]
        assert decimals.read(words).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_compared_as_float32(dtype):
    """Rewards of steps are float32, those of blocks float64, and -0.1 is another number in each."""
    tenths = [number / 10 for number in range(-10, 11)]
    values = torch.tensor(tenths, dtype=dtype)
    assert Quantizer(tenths).write(values) == [str(value) for value in tenths]
    assert Quantizer([-0.1, 1.0]).write(torch.tensor([-0.1], dtype=dtype)) == ["-0.1"]
    assert Quantizer.bins(-1, 1, 20).write(values) == [*map(str, range(20)), "19"]
    assert Quantizer.bins(-0.1, 0.1, 2).write(torch.tensor([-0.1, 0.1], dtype=dtype)) == ["0", "1"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Quantizer([1, 0]), "has increasing values"),
        (lambda: Quantizer([0, 1], ["a", "a"]), "and different words"),
        (lambda: Quantizer([0], ["a b"]), "without spaces"),
        (lambda: Quantizer.decimals().write(torch.tensor([0.0, math.nan])), "writes finite numbers, got nan"),
        (lambda: Quantizer([0], outside="nearest").write(torch.tensor([math.inf])), "writes finite numbers, got inf"),
        (lambda: Quantizer.bins(0, 1, 2, outside="nearest").write(torch.tensor([math.nan])), "got nan"),
        (lambda: Quantizer.bins(0, 1, 2).read(["2"]), "'2'"),
        (lambda: Quantizer([0]).read(["x"]), "'x'"),
        (lambda: Quantizer.decimals().read(["1."]), "'1.'"),
        (lambda: Quantizer([0, 10]).write(torch.tensor([0, 4])), r"no word for 4.0, only for \[0, 10\]"),
        (lambda: Quantizer.bins(0, 1, 2).write(torch.tensor([1.5])), r"no word for 1.5, only for \[0.0, 1.0\]"),
        (lambda: Quantizer.bins(1, 0, 2), r"high - low must lie in \(0, inf\)"),
    ],
)
def test_values_without_a_word_are_refused_or_written_as_the_nearest_if_asked_for(make, message):
    with pytest.raises(ValueError, match=message):
        make()
    near = {"outside": "nearest"}
    assert Quantizer([0, 10], **near).write(torch.tensor([-7, 4, 5, 6, 99])) == ["0", "0", "0", "10", "10"]
    assert Quantizer.bins(0, 1, 2, **near).write(torch.tensor([-9.0, 9.0])) == ["0", "1"]
