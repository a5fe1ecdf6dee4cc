"""The demo: offline RL beside every way of imitating its data, on a graph and in Wordle."""

from torchrl_lang.recipes.demo.main import Demo, main

__all__ = ["Demo", "main"]
