"""A home in a registry: models on a server of the OCI distribution protocol.

Sources: the specification (opencontainers/distribution-spec, spec.md), and what Debian's
docker-registry 2.8 answers.
"""
