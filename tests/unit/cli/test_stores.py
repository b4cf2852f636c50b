"""Which store a command uses, what it says of one that is missing, and stores in buckets."""

from pathlib import Path
from uuid import uuid4

import pytest
from support import PYCODE
from support.commands import Cli
from support.stores import commit_model

from blobstore.cli.stores import bucket_options
from blobstore.io.objects import open_bucket
from blobstore.names import Digest
from blobstore.store.bucket.objects import blob_key
from blobstore.store.local.store import open_store


def test_the_store_is_that_of_the_option_the_environment_or_the_home(
    cli: Cli, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    cli.text("import", source, "a")
    cli.text("import", source, "b", "--store", tmp_path / "option")
    monkeypatch.setenv("OLLAMA_MODELS", "")
    empty = f"No models in {home}/.ollama/models yet. Import one: blobstore import FOLDER\n"
    assert [cli.text(command) for command in ("list", "du", "verify")] == [empty] * 3
    assert cli.json("list") == []
    assert not home.exists()
    cli.text("import", source, "c")
    for root, name in ((cli.store.root, "a"), (tmp_path / "option", "b")):
        assert [str(found) for found in open_store(root).manifests.names()] == [f"{name}:latest"]
    assert (home / ".ollama/models/blobs").is_dir()
    assert "--store is empty" in cli.refused("list", "--store", "")


def test_a_named_store_that_does_not_exist_is_an_error(cli: Cli, tmp_path: Path) -> None:
    for line in ("list", "rm m", "cp m n", "verify", "export m out", "run m x", "serve"):
        error = cli.refused(*line.split(), "--store", tmp_path / "typo", code=1)
        assert error.startswith(f"Error: there is no store at {tmp_path}/typo\nHint: ")
        assert not (tmp_path / "typo").exists()
    missing = f"Error: there is no store at {cli.store.root}\n"
    assert cli.refused("verify", code=1).startswith(missing)  # its disk may not be mounted


def test_a_path_is_not_a_stored_model(
    cli: Cli, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.text("import", source, "m")
    monkeypatch.chdir(source.parent.parent)
    for path in (source, source.relative_to(Path.cwd()), f"./{source.relative_to(Path.cwd())}"):
        assert f"{path} is a path, not a stored model" in cli.refused("show", path)


def test_the_store_may_stand_before_the_command(cli: Cli, source: Path, tmp_path: Path) -> None:
    cli.text("--store", tmp_path / "a", "import", source, "m")
    assert [one["name"] for one in cli.json("--store", tmp_path / "a", "list")] == ["m:latest"]
    assert cli.json("--store", tmp_path / "b", "list", "--store", tmp_path / "a") != []


def test_a_folder_of_something_else_is_not_a_store(cli: Cli, tmp_path: Path) -> None:
    for inside in ("documents", "models"):
        (tmp_path / inside / "manifests").mkdir(parents=True)
        error = cli.refused("verify", "--store", tmp_path, code=1)
        assert "the folder contains neither blobs nor manifests\n" in error
        assert (f"Hint: Did you mean {tmp_path}/models?" in error) == (inside == "models")


def test_invalid_names(cli: Cli, source: Path) -> None:
    for name in ("../x", "", "x" * 81):
        for words in (["import", "--", source], ["show", "--"], ["cp", "--", "x"], ["rm", "--"]):
            assert "not a model name" in cli.refused(*words, name)
    assert not cli.store.root.exists()


@pytest.fixture
def models(cli: Cli) -> Cli:
    for name in ("qwen3:int8", "qwen3:latest", "gemma:int8", "team/qwen3:v1"):
        commit_model(cli.store, name, b"blob")
    return cli


def test_every_command_names_other_tags_of_a_missing_model(models: Cli, source: Path) -> None:
    lines = ["show", "rm", "export out", "cp x", "run prompt", "verify", f"repair --from {source}"]
    for line in lines:
        command, *rest = line.split()
        assert models.refused(command, "qwen3:int4", *rest, code=1) == (
            "Error: model 'qwen3:int4' not found\nHint: The store has qwen3:int8, qwen3:latest.\n"
        )
    error = models.refused("inspect", "qwen3:int4", code=1)
    assert "The store has qwen3:int8, qwen3:latest." in error


def test_similar_names_are_offered(models: Cli) -> None:
    for name, hint in {
        "qwen": "Did you mean qwen3:int8, qwen3:latest?",
        "GEMMA": "The store has gemma:int8.",
        "team/qwen": "Did you mean team/qwen3:v1?",
        "nobody/qwen3": "blobstore list shows the models of the store, blobstore pull NAME f",
    }.items():
        assert models.refused("show", name, code=1).splitlines()[1].startswith(f"Hint: {hint}")


@pytest.fixture
def address() -> str:
    return f"memory://{uuid4().hex}/team"


@pytest.fixture
def bucket(cli: Cli, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("BLOBSTORE_STORE", address)
    monkeypatch.setenv("BLOBSTORE_CACHE", str(tmp_path / "cache"))
    return cli


def test_commands_on_a_bucket(bucket: Cli, address: str, source: Path, tmp_path: Path) -> None:
    assert bucket.text("list").startswith(f"No models in {address} yet.")
    assert "9 blobs: 9 new" in bucket.text("import", source, "m", "--quant", "int4")
    assert [row["name"] for row in bucket.json("list")] == ["m:latest"]
    assert "LlamaForCausalLM" in bucket.text("show", "m")
    assert "all sound" in bucket.text("verify")
    assert "Copied m:latest to n:latest" in bucket.text("cp", "m", "n")
    assert "Moved n:latest to o:latest" in bucket.text("mv", "n", "o")
    assert "0 B not needed by any model" in bucket.text("du")
    folder = tmp_path / "folder"
    assert "9 copied" in bucket.text("cp", "m", "--to", folder)
    assert "9 there" in bucket.text("cp", "m", "p", "--store", folder, "--to", address)
    removed = bucket.text("rm", "o", "p", "m")
    assert "Kept 9 blobs (37.9 KB): prune removes them" in removed
    everything = ("prune", "--grace", "0", "--sole-owner")
    error = bucket.refused(*everything, code=1)
    assert f"{address}: no model has a manifest, and 9 blobs would be removed" in error
    pruned = bucket.text(*everything, "--forget").splitlines()
    assert pruned[-1] == "Removed 9 blobs (37.9 KB)"
    assert bucket.json("du")["blobs"] == 0
    open_bucket(address).put(blob_key(Digest.of(b"x")), b"y")
    assert "its bytes do not match its digest" in bucket.text("verify", code=3)


def test_weights_of_a_bucket_come_through_a_cache(
    bucket: Cli, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.text("import", PYCODE, "tiny", "--quant", "int4")
    bucket.text("export", "tiny", tmp_path / "out")
    assert len(list((tmp_path / "cache" / "blobs").iterdir())) == 55
    words = ("export", "tiny", tmp_path / "other")
    small = ("--cache", tmp_path / "small", "--cache-size", "1MB")
    assert "Hint: Allow more: --cache-size." in bucket.refused(*words, *small, code=1)
    lower = ("--store", tmp_path / "upper", "--lower", address)
    assert "7 files" in bucket.text("export", "tiny", tmp_path / "third", *lower)
    monkeypatch.delenv("BLOBSTORE_STORE")
    bucket.store.blobs.path.mkdir(parents=True)
    error = bucket.refused("run", "tiny", "a", "--cache-size", "1MB")
    assert "a cache is for a store in a bucket" in error


def test_refusals_of_a_bucket(bucket: Cli, address: str) -> None:
    for words in ("pack m", "repair m", "prune --undo"):
        error = bucket.refused(*words.split())
        assert f"is for a store in a folder, and {address} is a bucket" in error
    error = bucket.refused("prune", "--grace", "5m")
    assert "Hint: If no worker's blobs wait for a commit, confirm it: --sole-owner." in error
    assert "not a bucket" in bucket.refused("list", "--store", "https://example.com/models")


def test_settings_of_buckets_that_obstore_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://a")
    monkeypatch.setenv("GOOGLE_BASE_URL", "http://g")
    for name in ("AWS_ALLOW_HTTP", "AZURE_STORAGE_USE_EMULATOR"):
        monkeypatch.setenv(name, "true")
    http = {"allow_http": "true"}
    assert bucket_options("s3://b") == {"endpoint": "http://a"} | http
    assert bucket_options("gs://b") == {"base_url": "http://g"} | http
    assert bucket_options("az://b") == {"use_emulator": "true"} | http
    assert bucket_options("memory://b") == {}


def test_models_at_other_places(
    cli: Cli, source: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOBSTORE_CACHE", str(tmp_path / "cache"))
    archive = tmp_path / "m.tar"
    for name in ("m", "n"):
        cli.text("import", source, name, "--quant", "int8")
        cli.text("cp", name, "--to", address)
    cli.text("save", "m", "-o", archive)
    monkeypatch.setenv("BLOBSTORE_STORE", str(tmp_path / "none"))
    for place, names in ((archive, "m"), (address, "mn"), (cli.store.root, "mn")):
        found = [row["name"] for row in cli.json("list", place, "--sort", "name")]
        assert found == [f"{name}:latest" for name in names]
        assert cli.json("show", place, "m")["quant_type"] == "int8"
        assert cli.json("inspect", place, "m")["kind"] == "model"
    assert cli.json("show", archive)["name"] == cli.json("inspect", archive)["name"] == "m:latest"
    error = cli.refused("show", address)
    assert "has 2 models\nHint: Name one after it: m:latest, n:latest." in error


def test_places_without_models(cli: Cli, source: Path, address: str, tmp_path: Path) -> None:
    assert f"no models at {address}" in cli.refused("list", address, code=1)
    assert f"{address} has 0 models" in cli.refused("show", address)
    assert "contains neither blobs nor manifests" in cli.refused("list", source.parent, code=1)
    assert "not a valid archive" in cli.refused("list", source / "config.json", code=1)
    for text in ("qwen3", f"{tmp_path}/none.tar", "a/b/c"):
        assert "is not a place that has models\nHint: Write HOST, " in cli.refused("list", text)
    assert "is not a place that has models" in cli.refused("show", "m:int4", "n")
    assert f"blobstore inspect {source} shows a checkpoint" in cli.refused("show", source)
