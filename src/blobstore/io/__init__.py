"""Io: bytes in and out. Ranges, durable files, copies, budgets, workers, HTTP."""
