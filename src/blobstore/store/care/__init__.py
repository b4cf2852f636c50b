"""Care of a store: damage, blobs that no model needs, disk usage. One noun a file."""
