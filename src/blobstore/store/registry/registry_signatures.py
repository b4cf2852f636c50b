"""The signatures in a registry: an OCI manifest under the tag ``sha256-<hex>.sig`` of a repository.

So cosign keeps them, and finds ours (specs/SIGNATURE_SPEC.md in sigstore/cosign@d6d86c22). They are
not removed with a model: another tag, or another machine, may have the same manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blobstore.errors import ConflictError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.formats.signatures import Signature, SignatureLayer, SignatureManifest, tag_of
from blobstore.io.ranges import BytesReader
from blobstore.io.workers import each
from blobstore.names import Digest, ModelName
from blobstore.store.ports import unique
from blobstore.store.registry.api import RegistryApi
from blobstore.store.registry.downloads import BlobReader
from blobstore.store.registry.repositories import repository_of
from blobstore.store.registry.tags import RegistryManifests
from blobstore.store.registry.uploads import Uploads

_TRIES = 5


class RegistrySignatures:
    """The signatures of a registry's models. See `Signatures`. Safe to share between threads."""

    def __init__(self, api: RegistryApi, manifests: RegistryManifests) -> None:
        self._api = api
        self._manifests = manifests

    def read(self, name: ModelName, digest: Digest) -> list[Signature]:
        """See `Signatures`: those of the model's repository. Payloads are checked, not verified."""
        found = self._manifest(name, digest)
        if found is None:
            return []
        payloads = self._payloads(name, found.layers)
        return [layer.signature(payloads[layer.descriptor.digest]) for layer in found.layers]

    def add(self, name: ModelName, digest: Digest, signatures: Sequence[Signature]) -> int:
        """See `Signatures`. Those that are there are kept.

        A registry can't compare and set a tag. So it is read again after it was set, and signatures
        that another machine's have replaced are added once more. Raises: ConflictError if that
        happens again and again.
        """
        added = 0
        for _ in range(_TRIES):
            there = self._manifest(name, digest)
            wanted = SignatureManifest.of([]) if there is None else there
            new = wanted.extended(signatures)
            if new is wanted:
                return added
            added = max(added, len(new.layers) - len(wanted.layers))
            self._put(name, digest, new, signatures)
        message = f"other machines keep replacing the signatures of {name}"
        raise ConflictError(message, model=str(name), hint="Try again.")

    def _manifest(self, name: ModelName, digest: Digest) -> SignatureManifest | None:
        raw = self._manifests.raw(_tagged(name, digest))
        return None if raw is None else SignatureManifest.parse(raw, f"the signatures of {name}")

    def _payloads(self, name: ModelName, layers: Sequence[SignatureLayer]) -> dict[Digest, bytes]:
        """Return the payloads by digest: signatures by several keys have the same one."""
        blobs = unique(layer.descriptor for layer in layers)
        found: dict[Digest, bytes] = {}

        def take(blob: Descriptor) -> None:
            reader = BlobReader(self._api, repository_of(name), blob)
            found[blob.digest] = reader.read(0, blob.size)

        each(blobs, take, max(1, min(self._api.client.connections, len(blobs))), name="signatures")
        return found

    def _put(
        self,
        name: ModelName,
        digest: Digest,
        manifest: SignatureManifest,
        signatures: Sequence[Signature],
    ) -> None:
        """Send the payloads and the config, then set the tag."""
        uploads = Uploads(self._api, repository_of(name))
        for data in (*(one.payload for one in signatures), manifest.config or b""):
            blob = Descriptor(media_type="", digest=Digest.of(data), size=len(data))
            if uploads.size(blob.digest) != blob.size:
                uploads.send(blob, BytesReader(data))
        self._manifests.put(_tagged(name, digest), Manifest.parse(manifest.raw))


def _tagged(name: ModelName, digest: Digest) -> ModelName:
    """Return the name of the manifest of signatures."""
    return replace(name, tag=tag_of(digest))
