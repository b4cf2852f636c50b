"""Tiny checkpoints of many architectures, imported and compared with mlx-lm.

Run it with ``python tests/architectures``.
"""
