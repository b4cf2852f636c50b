"""Import: a checkpoint becomes blobs and a manifest.

Read (source/), decide (planning/), do (writing.py).
"""
