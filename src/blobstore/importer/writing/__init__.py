"""Writing: the bytes of a plan, and the threads that make them."""
