"""Archives for tests: any files in any order, as other programs would write them."""

import io
import json
import tarfile
from collections.abc import Iterable
from typing import Any

from blobstore.formats.documents import Manifest
from blobstore.formats.oci import LAYOUT, blob_path, encode_index
from blobstore.names import Digest, ModelName
from blobstore.store.memory import MemoryStore

Files = list[tuple[str, bytes]]


def files_of(store: MemoryStore, *names: str) -> Files:
    models = {name: store.manifests.text(name) for name in map(ModelName.parse, names)}
    files = [("oci-layout", LAYOUT), ("index.json", encode_index(models.items()))]
    for raw in models.values():
        files.append((blob_path(Digest.of(raw)), raw))
    for raw in models.values():
        files += [
            (blob_path(blob.digest), store.blobs.open(blob).read(0, blob.size))
            for blob in Manifest.parse(raw).descriptors
        ]
    return list(dict(files).items())


def tar_of(files: Iterable[tuple[str, bytes]], form: int = tarfile.GNU_FORMAT) -> bytes:
    """Return a tar of files, as Python's tarfile writes it; folders end with a slash."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for path, data in files:
            info = tarfile.TarInfo(path)
            info.type = tarfile.DIRTYPE if path.endswith("/") else tarfile.REGTYPE
            info.size = len(data)
            info.mtime = 1_700_000_000.5  # PAX keeps the half in an extension
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def index_of(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
