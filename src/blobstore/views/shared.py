"""Views of sharing: models that were pushed or pulled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from blobstore.store.ports import How
from blobstore.views.stores import WayView
from blobstore.views.view import DigestText, Text, View

if TYPE_CHECKING:
    from blobstore.store.transfer import Transferred


class SharedView(View):
    """A model that was pushed or pulled."""

    source: Text = Field(description="its name in the source")
    name: Text = Field(description="its name in the target")
    digest: DigestText = Field(description="of its manifest")
    there: WayView = Field(description="were there already")
    moved: WayView = Field(description="were sent or fetched")
    signatures: int = Field(description="new ones that came with it")
    replaced: DigestText | None = Field(
        description="for pull: the ID of the model that had the name before"
    )

    @classmethod
    def of(cls, done: Transferred) -> SharedView:
        """Return the view of a model that was transferred."""
        there, every = done.blobs.get(How.THERE, 0), sum(done.blobs.values())
        there_bytes, bytes_ = done.nbytes.get(How.THERE, 0), sum(done.nbytes.values())
        return cls(
            source=done.source,
            name=done.name,
            digest=str(done.digest),
            signatures=done.signatures,
            replaced=None if done.replaced is None else str(done.replaced),
            there=WayView(blobs=there, bytes=there_bytes),
            moved=WayView(blobs=every - there, bytes=bytes_ - there_bytes),
        )
