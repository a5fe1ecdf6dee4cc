"""Attacks on files and processes that anyone can repeat: ``python -m tests.campaigns NAME --count N --seed S``."""
