"""Network: a stored model as mlx-lm's network.

``sanitize`` of mlx-lm is traced, not fed with codes: what it does to the tensors of a published
checkpoint is known as expressions (tracing.py), and the same moves are made with codes and scales
wherever every group stays together (planning.py).
"""
