"""Frozen references: copies that share what does not train, fingerprints, adapters switched off."""
