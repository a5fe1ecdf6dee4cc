"""Draws that depend on seed and counter alone."""

import torch

from torchrl_lang.functional.random import random_index


def test_the_draw_is_splitmix64_in_any_batch_and_order():
    def reference(seed, counter, n):
        """In Python's own integers, modulo 2**64."""
        bits, golden = 2**64 - 1, 0x9E3779B97F4A7C15

        def mix(x):
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & bits
            x = (x ^ x >> 27) * 0x94D049BB133111EB & bits
            return x ^ x >> 31

        return (mix((mix(seed + golden & bits) + counter * golden) & bits) >> 1) % n

    for seed in (0, 1, 2**62 - 1, 123456789):
        counters = torch.tensor([[10**6, 0, 1], [1, 2, 2**40]])
        for n in (1, 2, 1000, 2**31):
            expected = [[reference(seed, counter, n) for counter in row] for row in counters.tolist()]
            assert random_index(seed, counters, n).tolist() == expected
