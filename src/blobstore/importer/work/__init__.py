"""Many machines carry out one plan: tasks, receipts, workers, and the commit."""
