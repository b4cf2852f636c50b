"""What layers and documents of a stored model say about prompts, and damage in them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.layouts import write
from support.stores import blob_path, manifest_path

import blobstore
from blobstore.errors import BlobStoreError, DocumentError, LimitExceededError
from blobstore.formats.documents import MESSAGES_MEDIA_TYPE, PARAMS_MEDIA_TYPE, SYSTEM_MEDIA_TYPE
from blobstore.mlx_lm.prompts import ModelTexts, texts_of
from blobstore.store.local.store import Store

MODELFILE = """FROM .
TEMPLATE [{{ .Prompt }}]
SYSTEM Be short.
PARAMETER temperature 0.5
PARAMETER stop end
MESSAGE user a
MESSAGE assistant b
"""


def stored(folder: Path, store: Store, modelfile: str = MODELFILE, **config: Any) -> None:
    from support.layouts import model

    source = write(model(folder), {"Modelfile": modelfile})
    original = json.loads((source / "config.json").read_text())
    write(source, {"config.json": original | config})
    blobstore.import_model(source, "m", store=store, modelfile=source / "Modelfile")


def texts(store: Store) -> ModelTexts:
    with blobstore.open_model("m", store=store) as model:
        return texts_of(model)


def test_layers_and_documents(tmp_path: Path, store: Store) -> None:
    stored(tmp_path / "m", store, max_position_embeddings=99)
    assert texts(store) == ModelTexts(
        template="[{{ .Prompt }}]",
        system="Be short.",
        messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}),
        parameters={"temperature": 0.5, "stop": ["end"]},
        generation={"eos_token_id": [7, 9]},
        context=99,
    )


def replace_layer(store: Store, media_type: str, data: bytes) -> None:
    path = manifest_path(store, "m")
    manifest = json.loads(path.read_text())
    layer = next(one for one in manifest["layers"] if one["mediaType"] == media_type)
    layer |= {"digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}
    blob_path(store, data).write_bytes(data)
    path.write_text(json.dumps(manifest))


DAMAGED: dict[str, tuple[str, bytes, type[BlobStoreError]]] = {
    "system prompt is not UTF-8 at byte 1": (SYSTEM_MEDIA_TYPE, b"a\xff", DocumentError),
    "parameters is not a JSON object": (PARAMS_MEDIA_TYPE, b"[]", DocumentError),
    "expected a role and a text": (MESSAGES_MEDIA_TYPE, b'[{"role":"user"}]', DocumentError),
    "limit exceeded": (PARAMS_MEDIA_TYPE, b" " * (17 * 2**20), LimitExceededError),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_a_damaged_layer_is_told_with_its_model(message: str, tmp_path: Path, store: Store) -> None:
    media_type, data, kind = DAMAGED[message]
    stored(tmp_path / "m", store)
    replace_layer(store, media_type, data)
    with pytest.raises(kind, match=f"^model m:latest: .*{message}"):
        texts(store)
