"""ModelPack: the documents of a CNCF model artifact. Pure.

Each file of a model is one layer: its raw bytes, and its path as an annotation. So a file that is
a blob of the store is the same blob in the artifact.

Sources: modelpack/model-spec@d78bf323 docs/spec.md, docs/config.md, docs/annotations.md,
schema/config-schema.json, specs-go/v1/mediatype.go. What its readers need beyond that:
docker/model-runner@642c7211 pkg/distribution/internal/bundle/unpack.go ``UnpackFromLayers`` (the
artifact type, a path in each layer) and modelpack/types.go ``GetFormat``; modelpack/modctl@c8e484d6
pkg/codec/raw.go ``Decode``, pkg/modelfile/constants.go (which files are what).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from blobstore.formats import strictjson
from blobstore.formats.dtypes import DType
from blobstore.names import Digest

MODELPACK_ARTIFACT_TYPE: Final = "application/vnd.cncf.model.manifest.v1+json"
MODELPACK_CONFIG_MEDIA_TYPE: Final = "application/vnd.cncf.model.config.v1+json"
PATH_ANNOTATIONS: Final = ("org.cncf.model.filepath", "org.opencontainers.image.title")
"""Where a layer's path is: ModelPack's key, and the one that oras reads (opencontainers/image-spec
annotations.md)."""

_WEIGHT = "application/vnd.cncf.model.weight.v1.raw"
_WEIGHT_CONFIG = "application/vnd.cncf.model.weight.config.v1.raw"
_DOC = "application/vnd.cncf.model.doc.v1.raw"
_CODE = "application/vnd.cncf.model.code.v1.raw"
_BY_SUFFIX = {
    ".safetensors": _WEIGHT,
    ".bin": _WEIGHT,
    ".pt": _WEIGHT,
    ".pth": _WEIGHT,
    ".gguf": _WEIGHT,
    ".md": _DOC,
    ".pdf": _DOC,
    ".rst": _DOC,
    ".py": _CODE,
    ".sh": _CODE,
    ".ipynb": _CODE,
}
_TEXTS = ("license", "licence", "copying", "notice", "readme")
_PRECISIONS = {
    DType.F32: "float32",
    DType.F64: "float64",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.F8_E4M3: "float8_e4m3",
    DType.F8_E5M2: "float8_e5m2",
}
_SCALES = (("Q", 10**15), ("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3))


def layer_media_type(path: str) -> str:
    """Return the media type of a file's layer: weights, documentation, code, else configuration."""
    name = PurePosixPath(path.lower())
    known = _BY_SUFFIX.get(name.suffix)
    if known is None and name.stem.startswith(_TEXTS):
        return _DOC
    return known or _WEIGHT_CONFIG


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPackConfig:
    """What a config says of a model.

    ``dtypes``: of its values, the most frequent first. ``quantization``: the types of its codes, in
    the same order. ``architecture`` and ``family``: those of its config.json, None if unknown.
    """

    name: str
    architecture: str | None
    family: str | None
    parameters: int
    dtypes: Sequence[DType] = ()
    quantization: Sequence[str] = ()

    def encode(self, layers: Iterable[Digest]) -> bytes:
        """Return the config of the artifact that has these layers: compact JSON, without a time."""
        precisions = [_PRECISIONS[dtype] for dtype in self.dtypes if dtype in _PRECISIONS]
        config = {
            "architecture": self.architecture,
            "format": "safetensors",
            "paramSize": param_size(self.parameters),
            "precision": ",".join(precisions) or None,
            "quantization": ",".join(self.quantization) or None,
        }
        return strictjson.encode(
            {
                "descriptor": _said({"family": self.family, "name": self.name}),
                "modelfs": {"type": "layers", "diffIds": [str(digest) for digest in layers]},
                "config": _said(config),
            }
        )


def param_size(parameters: int) -> str | None:
    """Return a number of parameters as ModelPack writes it, such as ``6.7B``; None below 1,000."""
    for letter, scale in _SCALES:
        if parameters >= scale:
            tenths = (10 * parameters + scale // 2) // scale
            whole, tenth = divmod(tenths, 10)
            return f"{whole}.{tenth}{letter}" if tenth else f"{whole}{letter}"
    return None


def _said(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if value is not None}
