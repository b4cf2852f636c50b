"""The command line: ``blobstore COMMAND``.

One file a group of commands; only this package reads the environment.
"""
