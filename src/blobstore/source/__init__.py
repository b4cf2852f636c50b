"""Source: what a checkpoint consists of, and the values of its weights."""
