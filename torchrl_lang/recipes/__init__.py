"""One readable file per experiment; ``python -m torchrl_lang`` is their command line."""
