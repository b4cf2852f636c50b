"""Export: a stored model as a folder of files for other programs."""
