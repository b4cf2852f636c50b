"""The pages of docs/reference are made from the code, and name all that is public."""

import pytest
import reference

import blobstore


@pytest.mark.parametrize("name", ["cli", "api", "json"])
def test_a_page_is_what_the_code_says(name: str) -> None:
    written = (reference.FOLDER / f"{name}.md").read_text()
    assert written == reference.pages()[name], "python tests/reference.py writes it"


def test_the_page_of_the_api_has_every_public_name() -> None:
    headings = [line for line in reference.api_page().splitlines() if line.startswith("### ")]
    names = {line.strip("# `").partition(".")[0] for line in headings}
    assert set(blobstore.__all__) - names == {"BlobStoreError", "__version__", "errors"}
