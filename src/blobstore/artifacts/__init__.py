"""Artifacts: a stored model in the forms of other runtimes."""
