"""``python -m blobstore``."""

from blobstore.cli.main import main

main()
