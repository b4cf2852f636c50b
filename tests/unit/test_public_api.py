"""The public API: its names resolve when they are used; docs/reference is made from the code."""

from importlib.resources import files
from pathlib import Path

import pytest
import reference
from support.checkpoints import write_checkpoint

import blobstore
from blobstore.errors import UsageError

NAMES = set(blobstore.__all__)


def test_public_names_are_sorted_and_resolve() -> None:
    assert files("blobstore").joinpath("py.typed").is_file()
    assert dir(blobstore) == list(blobstore.__all__) == sorted(NAMES)
    assert [name for name in NAMES if getattr(blobstore, name) is None] == []
    with pytest.raises(AttributeError, match="'nonsense'"):
        blobstore.nonsense  # noqa: B018


def test_a_path_or_none_stands_for_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(tmp_path / "s")
    result = blobstore.import_model(write_checkpoint(tmp_path / "m"), store=root)
    monkeypatch.setenv("OLLAMA_MODELS", root)
    with blobstore.open_model("m") as model:
        tensors = len(model)
        assert repr(model) == f"Model('m:latest', {tensors} tensors)"
        tensor = model["lm_head.weight"]
    assert repr(tensor) == f"Tensor('lm_head.weight', {tensor.dtype}, {list(tensor.shape)})"
    (listed,) = blobstore.list_models(Path(root))
    assert repr(listed.name) == repr(result.name) == "ModelName('m:latest')"
    assert repr(blobstore.open_store()) == f"Store({root!r})"
    assert blobstore.verify(None).checked == result.blobs
    assert len(repr(result)) < 1500
    with pytest.raises(UsageError, match="an address"):
        blobstore.open_store("s3://bucket/models")


def test_a_page_is_what_the_code_says() -> None:
    for name, text in reference.pages().items():
        written = (reference.FOLDER / f"{name}.md").read_text()
        assert written == text, "python tests/reference.py writes it"


def test_the_page_of_the_api_has_every_public_name() -> None:
    headings = [line for line in reference.api_page().splitlines() if line.startswith("### ")]
    names = {line.strip("# `").partition(".")[0] for line in headings}
    assert set(blobstore.__all__) - names == {"BlobStoreError", "__version__", "errors"}
