"""Care of a store: damage, blobs that no model needs, disk usage, and how two models differ. One noun a file."""
