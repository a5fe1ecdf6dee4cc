"""Cached batched decoding: sampling, greedy, beam, best of N, with value guidance."""
