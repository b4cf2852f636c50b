"""Packed blobs: each is a file of zstandard frames with byte planes (docs/formats.md).

``files.py`` writes and reads them, and the frames of archives; ``before.py`` reads the container of
earlier versions.
"""
