"""Hostile registries of the corpus get their verdict; credentials stay, and bytes are few.

A transfer is played for the rest of its kind: redirects, realms, tokens, certificates and waits
have their tables in the tests of the HTTP client and of the authorization.
"""

import json
from pathlib import Path

import pytest
from integration.hostile_registry import (
    NAME,
    PULLS,
    PUSHES,
    REPOSITORY,
    TAG,
    Scene,
    is_catalog,
    is_manifest,
    scene,
)
from integration.shared_models import tensor_blob
from support.corpus import Case, accepted, case_id, refusal, rejected
from support.servers import reply
from support.small_registry import digest_of
from support.stores import commit_model

from blobstore import open_store, pull, verify
from blobstore.errors import DigestMismatchError

SOURCE_CHANGES = "registry-upload-source-changes"
"""Here every reply is the registry's own."""
OLDER = "older:latest"


def played(case: Case, made: Scene) -> None:
    commit_model(made.store, OLDER, tensor_blob("layer0", 50))
    (PULLS | PUSHES)[case.id](made)


def check_bounds(case: Case, made: Scene) -> None:
    assert made.changed or case.id == SOURCE_CHANGES
    assert made.excess() == {}
    assert made.credentials_elsewhere() == []


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def models(made: Scene) -> list[str]:
    return [str(name) for name in made.store.manifests.names() if str(name) != OLDER]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case", [case for case in accepted("registry") if case.id in PULLS | PUSHES], ids=case_id
)
def test_accepted(case: Case, tmp_path: Path) -> None:
    with scene(tmp_path, is_push=case.id in PUSHES) as made:
        played(case, made)
        made.run()
        check_bounds(case, made)
        if case.id in PUSHES:
            assert made.registry.manifests[REPOSITORY, TAG] == made.raw
            for data in made.blobs:
                assert made.registry.blobs[REPOSITORY, digest_of(data)] == data
        else:
            assert models(made) == [NAME]
            assert made.store.manifests.text(made.store.find(NAME)) == made.raw
        assert verify(made.store).is_sound
        assert files(tmp_path) == {"store", *(f"store/{name}" for name in files(made.store.root))}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case", [case for case in rejected("registry") if case.id in PULLS | PUSHES], ids=case_id
)
def test_rejected(case: Case, tmp_path: Path) -> None:
    with scene(tmp_path, is_push=case.id in PUSHES) as made:
        played(case, made)
        before = made.store.blobs.digests()
        error = refusal(made.run)
        check_bounds(case, made)
        assert names_the_thing(str(error), made), str(error)
        assert (REPOSITORY, TAG) not in made.registry.manifests or case.id in PULLS
        assert models(made) == ([NAME] if case.id in PUSHES else [])
        assert not (case.id in PUSHES and made.seen_there.asked)  # no blob goes to another origin
        assert made.store.blobs.digests() == before
        if case.id == SOURCE_CHANGES:
            assert isinstance(error, DigestMismatchError)  # not only the registry saw it
        else:
            assert verify(made.store).is_sound
        assert files(tmp_path) <= {"store", *(f"store/{name}" for name in files(made.store.root))}


def names_the_thing(text: str, made: Scene) -> bool:
    things = [made.host, made.name, str(made.store.root), *map(digest_of, made.blobs)]
    return any(thing in text for thing in things)


def test_another_manifest_than_the_pinned_one(tmp_path: Path) -> None:
    """Beside the corpus: a registry that gives other bytes for a digest, and does not say which."""
    with scene(tmp_path, is_push=False) as made:
        document = json.loads(made.raw)
        document["layers"].pop()
        other = json.dumps(document).encode()
        made.change(is_manifest, reply(200, body=other))
        store = open_store(tmp_path / "store")
        error = refusal(lambda: pull(f"{made.name}@{digest_of(made.raw)}", store, name=NAME))
        assert digest_of(made.raw) in str(error)
        assert models(made) == []


def test_pages_of_a_list_stay_at_the_registry(tmp_path: Path) -> None:
    with scene(tmp_path, is_push=False) as made:
        link = f'Link: <{made.there.at("v2/_catalog")}>; rel="next"'
        empty = b'{"repositories":[]}'
        made.answer_there(reply(200, body=empty))
        made.change(is_catalog, reply(200, link, body=empty))
        assert made.there.host in str(refusal(made.names))
        assert made.seen_there.asked == []
