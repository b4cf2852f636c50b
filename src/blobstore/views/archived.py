"""Views of archives: what was saved, what was loaded, and what an archive has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from blobstore.names import Digest
from blobstore.store.ports import How, replaced_id
from blobstore.views.stores import WayView
from blobstore.views.view import Bytes, Text, View

if TYPE_CHECKING:
    from blobstore.formats.documents import Manifest
    from blobstore.names import ModelName
    from blobstore.store.transfer import Transferred


class ArchivedModelView(View):
    """A model of an archive."""

    name: Text
    id: Text = Field(description="the manifest's digest")
    size: Bytes = Field(description="bytes of its blobs")
    blobs: int

    @classmethod
    def of(cls, name: ModelName, manifest: Manifest) -> ArchivedModelView:
        """Return the view of a model."""
        blobs = len({blob.digest for blob in manifest.descriptors})
        return cls(name=name, id=manifest.digest, size=manifest.size, blobs=blobs)


class SaveView(View):
    """An archive that was written."""

    file: Text
    bytes: Bytes = Field(description="bytes of the file")
    models: list[Text]
    blobs: int = Field(description="blobs in it, each counted once")
    blob_bytes: Bytes

    @classmethod
    def of(cls, file: str, nbytes: int, done: list[Transferred]) -> SaveView:
        """Return the view of an archive of so many bytes."""
        return cls(
            file=file,
            bytes=nbytes,
            models=[one.name for one in done],
            blobs=sum(one.blobs.get(How.COPIED, 0) for one in done),
            blob_bytes=sum(one.nbytes.get(How.COPIED, 0) for one in done),
        )


class LoadedModelView(View):
    """A model that was loaded."""

    source: Text = Field(description="its name in the archive")
    name: Text
    there: WayView = Field(description="blobs that the store had")
    copied: WayView = Field(description="blobs that were copied")
    replaced: Text | None = Field(description="the ID of the model that had the name before")

    @classmethod
    def of(cls, done: Transferred, before: Digest | None) -> LoadedModelView:
        """Return the view of a model that was loaded; ``before``: the ID that its name had."""
        replaced = replaced_id(before, done.digest)
        there, copied = (
            WayView(blobs=done.blobs.get(how, 0), bytes=done.nbytes.get(how, 0))
            for how in (How.THERE, How.COPIED)
        )
        return cls(
            source=done.source,
            name=done.name,
            there=there,
            copied=copied,
            replaced=None if replaced is None else str(replaced),
        )
