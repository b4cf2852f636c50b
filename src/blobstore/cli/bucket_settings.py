"""What the environment says of buckets, as far as obstore does not read it itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

_SETTINGS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "s3": {"endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")},
    "az": {
        "endpoint": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
        "use_emulator": ("AZURE_STORAGE_USE_EMULATOR", "AZURE_USE_EMULATOR"),
    },
    "gs": {"base_url": ("GOOGLE_BASE_URL",)},
}
_ALLOW_HTTP = {"s3": "AWS_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP"}


def bucket_options(address: str) -> dict[str, str]:
    """Return what the environment says of a bucket's service, as far as it decides about http.

    obstore reads everything else (credentials, the region) itself.
    """
    scheme = address.partition("://")[0].lower()
    found = {}
    for option, variables in _SETTINGS.get(scheme, {}).items():
        said = next(filter(None, map(os.environ.get, variables)), None)
        if said is not None:
            found[option] = said
    if allowed := os.environ.get(_ALLOW_HTTP.get(scheme, ""), ""):
        found["allow_http"] = allowed
    return found
