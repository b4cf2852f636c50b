"""The documents of an OCI image layout."""

import json
from typing import Any

import pytest

from blobstore.errors import BlobStoreError, DocumentError, LimitExceededError
from blobstore.formats import oci
from blobstore.formats.documents import MANIFEST_MEDIA_TYPE
from blobstore.names import Digest, ModelName

OCI = "application/vnd.oci.image.manifest.v1+json"
REF, IMAGE = "org.opencontainers.image.ref.name", "io.containerd.image.name"
DIGEST = Digest.of(b"manifest")


def entry(**changed: Any) -> dict[str, Any]:
    return {"mediaType": OCI, "digest": str(DIGEST), "size": 8} | changed


def index(*entries: Any, **changed: Any) -> bytes:
    return json.dumps({"schemaVersion": 2, "manifests": list(entries)} | changed).encode()


def test_a_written_index_comes_back() -> None:
    """``mediaType`` is OCI's, because skopeo finds no other; names are short and full."""
    names = [ModelName.parse(text) for text in ("m", "ns/m:tag", "host.example:5000/ns/m:tag")]
    raw = oci.encode_index((name, b"manifest") for name in names)
    assert [(one.model, one.digest, one.size) for one in oci.parse_index(raw, "index")] == [
        (name, DIGEST, 8) for name in names
    ]
    annotations = {IMAGE: "registry.ollama.ai/library/m:latest", REF: "m:latest"}
    assert json.loads(raw)["manifests"][0] == entry(annotations=annotations)


def test_names() -> None:
    names: list[tuple[dict[str, str] | None, str | None]] = [
        ({REF: "tag", IMAGE: "docker.io/library/m:tag"}, "docker.io/library/m:tag"),
        ({REF: "m", IMAGE: "not a name"}, "m"),
        ({REF: "../m"}, None),
        (None, None),
    ]
    for said, model in names:
        raw = index(entry(annotations=said, mediaType=MANIFEST_MEDIA_TYPE))
        (found,) = oci.parse_index(raw, "index")
        assert found.model == (model and ModelName.parse(model))


def test_indexes_to_refuse() -> None:
    for raw in (
        b"[]",
        index(1),
        index(entry(mediaType="application/vnd.oci.image.index.v1+json")),
        index(entry(digest="sha512:" + 128 * "a")),
        index(entry(digest="../../etc/passwd")),
        index(entry(annotations={REF: 5})),
        index(entry(annotations={REF: "m"}), entry(annotations={REF: "m:latest"})),
        b'{"schemaVersion":2,"manifests":[],"manifests":[]}',
    ):
        with pytest.raises(DocumentError, match="A2"):
            oci.parse_index(raw, "index")
    large = [entry(size=2**26, digest=f"sha256:{n:064x}") for n in range(5)]
    for entries in ([entry()] * (oci.MAX_ENTRIES + 1), [entry(size=2**26 + 1)], large):
        with pytest.raises(LimitExceededError):
            oci.parse_index(index(*entries), "index")


def test_layouts() -> None:
    oci.check_layout(oci.LAYOUT, "oci-layout")
    for raw in (b'{"imageLayoutVersion":"2.0.0"}', b"{}", b"", b'"1.0.0"'):
        with pytest.raises(BlobStoreError):
            oci.check_layout(raw, "oci-layout")
    assert oci.blob_path(DIGEST) == f"blobs/sha256/{DIGEST.hex}"
