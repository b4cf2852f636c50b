"""Settings of buckets and stores from the environment."""

from __future__ import annotations

import os
import re


def bucket_options(address: str) -> dict[str, str]:
    """Return the settings of a bucket that the environment has and obstore does not see.

    obstore reads the other variables itself; an endpoint of http needs to be known before. From
    here on the command ends soon after Ctrl-C, whatever obstore waits for.
    """
    names = {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "gs": ("GOOGLE_BASE_URL",),
        "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    }.get(address.partition("://")[0].lower(), ())
    if names:
        from blobstore.cli.interruption import end_soon_when_interrupted

        end_soon_when_interrupted()
    found = [os.environ[name] for name in names if os.environ.get(name)]
    options = {"base_url" if "GOOGLE_BASE_URL" in names else "endpoint": found[0]} if found else {}
    allowed = [f"{kind}_ALLOW_HTTP" for kind in ("AWS", "GOOGLE", "AZURE")]
    if said := next(filter(None, map(os.environ.get, allowed if names else ())), None):
        options["allow_http"] = said
    if "AZURE_ENDPOINT" in names and os.environ.get("AZURE_STORAGE_USE_EMULATOR"):
        options["use_emulator"] = os.environ["AZURE_STORAGE_USE_EMULATOR"]
    return options


def places_of(text: str) -> list[str]:
    """Return the folders and addresses of a list that colons separate."""
    return re.split(rf"{re.escape(os.pathsep)}(?!//)", text)
