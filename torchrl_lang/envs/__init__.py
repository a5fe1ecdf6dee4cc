"""Language tasks as TorchRL environments."""
