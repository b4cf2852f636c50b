"""Imports from nginx, the Hub's stand-in, moto's S3 and azurite equal local ones. Marked `lab`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from integration.cloud_services import CloudBucket
from integration.far_rigs import Blobs, blobs_of, far_rig
from support import PYCODE_MOE
from support.hub_stand_in import REPOSITORY, Rules
from support.many import expert_shards
from support.nginx import nginx

from blobstore import import_model, open_store, verify
from blobstore.errors import RemoteError
from blobstore.source.addresses import Source, open_folder
from blobstore.source.folders import Folder

pytestmark = pytest.mark.lab
Opener = Callable[[str], Folder]
"""Opens a checkpoint on a server by its name."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return expert_shards(tmp_path_factory.mktemp("far") / "m", 3, 12_000_000)


@contextmanager
def serving(place: str | CloudBucket, work: Path, sources: dict[str, Path]) -> Iterator[Opener]:
    """Run a server of checkpoints, which writes below ``work``, or upload them."""
    if isinstance(place, CloudBucket):
        for name, folder in sources.items():
            place.upload(folder, name)
        options = place.options
        yield lambda name: open_folder(f"{place.address}/{name}", bucket_options=options)
    elif place == "nginx":  # a plain web server, which lists nothing
        (work / "root").mkdir(parents=True)
        for name, folder in sources.items():
            (work / "root" / name).symlink_to(folder)
        with nginx(work / "nginx", work / "root") as url:
            yield lambda name: open_folder(f"{url}/{name}")
    else:
        with ExitStack() as stack:
            rigs = {
                name: stack.enter_context(far_rig("hub", path)) for name, path in sources.items()
            }
            yield lambda name: rigs[name].open()


def imported(source: Source, root: Path, quant: str = "int4") -> Blobs:
    store = open_store(root)
    made = import_model(source, "m", store=store, quant=quant, profile="ollama")
    assert verify(store).is_sound
    return blobs_of(made.manifest)


@pytest.mark.parametrize("place", ["nginx", "hub", "s3", "azure"])
def test_digests_are_those_of_the_local_import(
    place: str, shards: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    sources = {"moe": PYCODE_MOE, "shards": shards}
    server = request.getfixturevalue(place) if place in ("s3", "azure") else place
    with serving(server, tmp_path / "server", sources) as opener:
        for (name, source), quant in zip(sources.items(), ("nvfp4", "int4"), strict=True):
            with opener(name) as folder:
                far = imported(folder, tmp_path / f"far-{name}", quant)
            assert far == imported(source, tmp_path / f"near-{name}", quant), name


@pytest.mark.parametrize("gated", [False, True])
def test_a_private_repository_needs_the_token(shards: Path, tmp_path: Path, gated: bool) -> None:
    """It is sent to the Hub, and not to the server of its large files."""
    rules = Rules(token="hf_right", gated=gated)  # noqa: S106
    with far_rig("hub", shards, rules) as rig:
        for token in (None, "hf_other"):
            with rig.open(token) as folder, pytest.raises(RemoteError, match=REPOSITORY):
                imported(folder, tmp_path / "far")
        assert not (tmp_path / "far").exists()
        rig.play()
        with rig.open("hf_right") as folder:
            imported(folder, tmp_path / "far")
        api, objects = (script.asked for script in rig.scripts)
        assert {one.fields.get("authorization") for one in api} == {"Bearer hf_right"}
        assert {one.fields.get("authorization") for one in objects} == {None}
