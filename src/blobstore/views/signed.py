"""Views of signatures: models that were signed, and whose signatures were checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from blobstore.views.view import Text, View

if TYPE_CHECKING:
    from blobstore.store.signing.signed_models import CheckedModel


class SignedView(View):
    """A model that was signed."""

    name: Text
    digest: Text = Field(description="of its manifest, which is what is signed")
    identity: Text = Field(description="for which it is signed")
    key: Text = Field(description="sha256 of the public key, as SubjectPublicKeyInfo in DER")
    is_new: bool = Field(description="false if it had this signature")


class SignatureView(View):
    """A signature that counts."""

    identity: Text
    key: Text = Field(description="the key's file, or its place in the policy")


class SignatureCheckView(View):
    """Whether a model is signed as a key or a policy requires."""

    name: Text
    digest: Text = Field(description="of its manifest, which is what is signed")
    accepted: bool
    found: int = Field(description="signatures that the model has")
    signatures: list[SignatureView] = Field(description="those that count")
    error: str = Field(default="", description="what is missing")

    @classmethod
    def of(cls, checked: CheckedModel) -> SignatureCheckView:
        """Return the view of a model whose signatures were checked."""
        failed = {} if checked.error is None else {"error": checked.error.message}
        return cls(
            name=checked.name,
            digest=checked.digest,
            accepted=checked.error is None,
            found=checked.signatures,
            signatures=[
                SignatureView(identity=one.identity, key=one.key.name) for one in checked.accepted
            ],
            **failed,
        )
