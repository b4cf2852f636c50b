"""Tiny checkpoints of many architectures, compared with mlx-lm: ``python tests/architectures``."""
