"""The public API: its names, its parameters, and that importing it costs nothing."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

import blobstore
from blobstore.importer.arguments import ImportArguments

NAMES = [
    "Archive",
    "Artifact",
    "BlobStoreError",
    "BucketStore",
    "ExportResult",
    "Folder",
    "ImportPlan",
    "ImportResult",
    "Inspection",
    "LayeredStore",
    "MemoryStore",
    "MetadataEdit",
    "Model",
    "ModelQuality",
    "PrivateKey",
    "PublicKey",
    "QuantizedArray",
    "RegistryAccess",
    "RegistryStore",
    "SignaturePolicy",
    "Store",
    "Tensor",
    "Verdict",
    "__version__",
    "check_signatures",
    "commit_plan",
    "dequantize",
    "diff_models",
    "distributed",
    "edit_metadata",
    "errors",
    "export_model",
    "import_model",
    "inspect",
    "list_models",
    "make_blob",
    "measure_quality",
    "measure_usage",
    "mlx_lm",
    "open_archive",
    "open_artifact",
    "open_bucket_store",
    "open_folder",
    "open_model",
    "open_store",
    "pack",
    "plan_import",
    "prune",
    "pull",
    "push",
    "quantize",
    "read_header",
    "read_metadata",
    "read_plan",
    "repair_model",
    "run_plan",
    "save_models",
    "sign_model",
    "transfer",
    "undo_prune",
    "unpack",
    "verify",
    "work_on_batch",
    "work_on_plan",
    "write_plan",
]
PLAN_OPTIONS = [
    *(
        "quant",
        "group_size",
        "method",
        "dtype",
        "profile",
        "experts",
        "alignment",
        "importance",
        "global_scale",
    ),
    *(
        "rules",
        "policy",
        "requantize",
        "draft",
        "draft_quant",
        "modelfile",
        "template",
        "system",
        "licenses",
        "parameters",
    ),
]
PARAMETERS = {
    "open_store": (["root"], []),
    "plan_import": (["source"], PLAN_OPTIONS),
    "import_model": (["source", "name"], ["store", *PLAN_OPTIONS, "jobs", "progress"]),
    "open_model": (["name"], ["store", "verify"]),
    "quantize": (
        ["array", "quant_type"],
        ["group_size", "method", "importance", "global_scale", "jobs"],
    ),
    "dequantize": (["quantized", "dtype"], []),
    "measure_quality": (["name", "source"], ["store", "jobs", "progress"]),
    "read_header": (["path"], ["token"]),
    "inspect": (["target"], ["store", "token", "endpoint"]),
    "read_metadata": (["path"], []),
    "edit_metadata": (["path", "changes"], ["replace", "in_place", "progress"]),
    "export_model": (
        ["name", "folder"],
        ["store", "format", "dequantize", "max_shard_size", "jobs", "verify", "progress"],
    ),
}


def modules_after(code: str) -> set[str]:
    """Return the modules that a fresh process has loaded after ``code``, by their first name."""
    script = f"{code}\nimport json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in json.loads(done.stdout)}


@pytest.mark.parametrize(
    "code", ["import blobstore", "from blobstore import errors", "import blobstore; dir(blobstore)"]
)
def test_importing_the_package_loads_nothing_heavy(code: str) -> None:
    heavy = {
        "mlx",
        "torch",
        "numpy",
        "ml_dtypes",
        "mlx_lm",
        "transformers",
        "pydantic",
        "typer",
        "rich",
    }
    assert modules_after(code) & heavy == set()


def test_opening_a_store_loads_no_array_library() -> None:
    assert (
        modules_after("import blobstore; blobstore.open_store('x')") & {"mlx", "torch", "numpy"}
        == set()
    )


def test_importing_a_model_loads_no_framework() -> None:
    assert (
        modules_after("import blobstore; blobstore.import_model, blobstore.open_model")
        & {"mlx", "torch", "mlx_lm"}
        == set()
    )


def test_the_public_names() -> None:
    assert blobstore.__all__ == NAMES
    assert dir(blobstore) == NAMES
    for name in NAMES:
        assert getattr(blobstore, name) is not None


def test_a_star_import_gives_them_all() -> None:
    code = (
        "from blobstore import *; assert import_model and quantize and errors.BlobStoreError is "
        "BlobStoreError"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'nonsense'"):
        blobstore.nonsense  # noqa: B018


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    """The first list may be given by position, the second by name only."""
    function = getattr(blobstore, name)
    parameters = inspect.signature(function).parameters.values()
    by_position = [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    by_name = [
        parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
    ]
    if "options" in inspect.get_annotations(
        function
    ):  # the options of an import are listed once, for both functions
        by_name += ImportArguments.__annotations__
    wanted_position, wanted_name = PARAMETERS[name]
    assert by_position == wanted_position
    assert set(wanted_name) <= set(by_name)
    assert all(parameter.annotation is not parameter.empty for parameter in parameters)


def test_mlx_lm_loads_a_model_and_its_tokenizer() -> None:
    parameters = inspect.signature(blobstore.mlx_lm.load).parameters
    assert list(parameters) == ["name", "store"]
    assert parameters["store"].kind is inspect.Parameter.KEYWORD_ONLY


def test_tensors_and_models_have_the_documented_methods() -> None:
    for name in (
        "shape",
        "dtype",
        "quant_type",
        "group_size",
        "numpy",
        "torch",
        "mlx",
        "dequantize",
        "__getitem__",
    ):
        assert hasattr(blobstore.Tensor, name)
    for name in ("arrays", "close", "keys", "items", "get", "__enter__", "__exit__"):
        assert hasattr(blobstore.Model, name)
    for name in ("weight", "scale", "bias", "global_scale"):
        assert name in blobstore.QuantizedArray.__dataclass_fields__


def test_the_package_is_typed() -> None:
    from importlib.resources import files

    assert files("blobstore").joinpath("py.typed").is_file()
