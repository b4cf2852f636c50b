"""Formats: what others have defined, pure. Dtypes, types of quantization, documents, headers."""
