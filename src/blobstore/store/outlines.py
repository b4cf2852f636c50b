"""Outlines: the tensors of a model in columns, and what they are.

Of 50,000 tensors most have one of a few forms: what they are follows from their dtypes, shapes and
metadata, and not from their names and places. So the rules for stored tensors (stored.py) are
applied to one tensor of each form. An outline of 50,000 tensors takes a tenth of the time of the
tensors themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from blobstore.errors import BlobStoreError
from blobstore.formats.documents import Descriptor
from blobstore.formats.dtypes import DType
from blobstore.formats.quant import Quantization
from blobstore.formats.safetensors.codec import ScannedFiles
from blobstore.formats.safetensors.header import Header
from blobstore.store.stored import StoredTensor
from blobstore.store.stored_model import StoredModel

KnownForms = dict[bytes, "TensorForm | None"]
"""Forms by their keys, of any model; None: their tensors have to be read one by one."""
_MOST_KNOWN = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class TensorForm:
    """What a tensor is, without its name and place: fields are those of `StoredTensor`."""

    shape: tuple[int, ...]
    quantization: Quantization | None
    value_dtype: DType | None
    has_global_scale: bool
    transposed: bool
    parameters: int
    nbytes: int
    type_name: str
    type_text: str

    @classmethod
    def of(cls, stored: StoredTensor) -> Self:
        """Return the form of a tensor."""
        return cls(
            stored.shape,
            stored.quantization,
            stored.value_dtype,
            stored.has_global_scale,
            stored.transposed,
            stored.parameters,
            stored.nbytes,
            stored.type_name,
            stored.type_text,
        )


@dataclass(slots=True, eq=False)
class ModelOutline:
    """The tensors of blobs, in stored order: ``names`` and ``forms``, of one length.

    ``counts``: how many tensors each blob has.
    """

    names: list[str] = field(default_factory=list)
    forms: list[TensorForm] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls, model: StoredModel, layers: Sequence[Descriptor], known: KnownForms | None = None
    ) -> Self:
        """Return the outline of blobs of a model. ``known``: forms of models that were read before.

        Raises: as `StoredModel.opened`.
        """
        outline = cls()
        known = {} if known is None else known
        for some, headers in model.headers_of(layers):
            outline._add_each(model, some, headers, known)
        return outline

    def __len__(self) -> int:
        return len(self.names)

    def each(self) -> Iterator[list[TensorForm]]:
        """Yield the forms of each blob's tensors."""
        start = 0
        for count in self.counts:
            yield self.forms[start : start + count]
            start += count

    def _add_each(
        self,
        model: StoredModel,
        layers: Sequence[Descriptor],
        headers: Sequence[Header | None],
        known: KnownForms,
    ) -> None:
        if not isinstance(headers, ScannedFiles):
            for layer, header in zip(layers, headers, strict=True):
                self._add(model.tensors_in(layer, header))
            return
        names, places, keys, examples, counts = headers.outline()
        of_form = _Forms(model, layers, headers, known).of
        forms = [of_form(*one) for one in zip(keys, examples, strict=True)]
        sound = [form for form in forms if form is not None]
        if len(sound) == len(forms) and min(counts, default=0) >= 0:
            self._extend(names, [sound[place] for place in places], counts)
            return
        start = 0
        for index, (layer, count) in enumerate(zip(layers, counts, strict=True)):
            end = start + max(count, 0)
            own = [form for place in places[start:end] if (form := forms[place]) is not None]
            if len(own) == count:
                self._extend(names[start:end], own, [count])
            else:
                self._add(model.tensors_in(layer, headers[index]))
            start = end

    def _extend(self, names: list[str], forms: list[TensorForm], counts: list[int]) -> None:
        self.names += names
        self.forms += forms
        self.counts += counts

    def _add(self, tensors: list[StoredTensor]) -> None:
        forms = [TensorForm.of(tensor) for tensor in tensors]
        self._extend([tensor.name for tensor in tensors], forms, [len(tensors)])


class _Forms:
    """The forms of some blobs. ``known``: those of other blobs of the model."""

    def __init__(
        self,
        model: StoredModel,
        layers: Sequence[Descriptor],
        headers: Sequence[Header | None],
        known: KnownForms,
    ) -> None:
        self._model = model
        self._layers = layers
        self._headers = headers
        self._known = known
        self._read: tuple[int, dict[str, TensorForm]] = (-1, {})

    def of(self, key: bytes, example: tuple[int, str]) -> TensorForm | None:
        """Return the form of a key. None if it depends on more, or its tensors break a rule."""
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            index, name = example
            if index != self._read[0]:
                self._read = (index, self._read_from(index))
            self._known[key] = self._read[1].get(name)
        return self._known[key]

    def _read_from(self, index: int) -> dict[str, TensorForm]:
        """Return the forms in a blob by names.

        None of them if a rule is broken, or if config.json has to decide, which names tensors.
        """
        is_asked = False

        def settings() -> None:
            nonlocal is_asked
            is_asked = True

        try:
            tensors = self._model.tensors_in(self._layers[index], self._headers[index], settings)
        except BlobStoreError:
            return {}
        return {} if is_asked else {one.name: TensorForm.of(one) for one in tensors}
