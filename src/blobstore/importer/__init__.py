"""Import: a checkpoint becomes blobs and a manifest.

Read (source/), decide (policy.py, plan.py), make and write (making.py, writing.py).
"""
