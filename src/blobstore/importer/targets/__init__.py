"""Targets: types for a size, chosen by what each would lose."""
