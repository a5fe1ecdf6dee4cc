"""Adapters of other libraries' games."""
