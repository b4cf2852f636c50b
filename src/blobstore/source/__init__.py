"""Source: the files, tensors and weights of a checkpoint, and the weights' values."""
