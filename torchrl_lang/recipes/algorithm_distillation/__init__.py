"""Algorithm distillation on small tasks: train models on learning histories, and see them improve in their context."""
