"""Reports: the pages of a model and of a plan, in one file each, which asks no server."""
