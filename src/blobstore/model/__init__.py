"""A stored model, opened: its tensors by name, and where it runs."""
