"""Planning: what an import writes, decided from headers and options."""
