"""Import: a checkpoint becomes blobs and a manifest.

Read (source/), decide (policies/, planning/), make and write (making.py, writing.py).
"""
