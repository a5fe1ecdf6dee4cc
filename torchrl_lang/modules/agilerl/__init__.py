"""Agents of AgileRL: its transformer, its checkpoints as tensors, and the file that writes them beside AgileRL."""
