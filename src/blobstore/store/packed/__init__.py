"""Packed files: the blobs of models that are rarely used, compressed (docs/formats.md).

``cuts.py`` decides which bytes of a blob are coded how, ``coders.py`` codes and decodes them,
``container.py`` is the index of a file; ``encoding.py`` and ``decoding.py`` do it to files.
"""
