"""Tiny checkpoints of many architectures, and what blobstore and mlx-lm make of them: ``python tests/architectures``."""
