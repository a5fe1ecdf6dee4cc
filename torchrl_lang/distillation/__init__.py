"""Algorithm distillation (arXiv 2210.14215): learning histories, and models that improve in their context."""
