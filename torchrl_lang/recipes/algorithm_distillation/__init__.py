"""Algorithm distillation on small tasks: train models on learning histories, and see them improve in their context."""

from torchrl_lang.recipes.algorithm_distillation.main import Distill, main

__all__ = ["Distill", "main"]
