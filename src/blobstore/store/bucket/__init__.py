"""A store in a bucket of S3, Google Cloud Storage or Azure.

Keys are the paths of a store in a folder: ``blobs/sha256-<hex>`` and
``manifests/HOST/NAMESPACE/MODEL/TAG``. Our own objects are under ``.blobstore/``. So a copy of the
prefix is a store that Ollama reads.
"""
