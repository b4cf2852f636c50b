"""``python -m blobstore``."""

from blobstore.cli import main

main()
