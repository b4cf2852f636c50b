"""Streaming: an import whose source is fetched in segments, which never lie on the disk."""
