"""Frozen references: copies that share frozen weights, fingerprints, and disabled adapters."""
