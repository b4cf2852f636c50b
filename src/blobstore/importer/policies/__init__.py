"""Policies: which tensor gets which type."""
