"""Packed blobs: each is a file of zstandard frames with byte planes (docs/formats.md)."""
