"""Store: blobs by digest and manifests by name."""
