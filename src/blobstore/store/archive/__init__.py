"""Archives: models in one file, an OCI image layout in a tar, plain or compressed."""
