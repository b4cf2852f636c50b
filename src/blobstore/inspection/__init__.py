"""Inspection: what is in a file, a folder or a model, and how far it is from another."""
