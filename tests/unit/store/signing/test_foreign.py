"""Other programs verify our signatures, and we theirs: openssl, and skopeo with docker-registry.

skopeo is built of containers/image, whose policies and keys are cosign's. Its log says why it
refuses an image.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import pytest
from support.ports import free_port

from blobstore.cli import main
from blobstore.formats.documents import Manifest
from blobstore.formats.signatures import (
    DockerReference,
    Payload,
    Signature,
    SignatureManifest,
    tag_of,
)
from blobstore.names import Digest, ModelName
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore
from blobstore.store.signing.key_pairs import PrivateKey, PublicKey
from blobstore.store.signing.signed_models import SignaturePolicy, sign_model
from blobstore.testing.blobs import commit

pytestmark = pytest.mark.lab

KINDS = {
    "p256": ("EC", "ec_paramgen_curve:P-256"),
    "p384": ("EC", "ec_paramgen_curve:P-384"),
    "p521": ("EC", "ec_paramgen_curve:P-521"),
    "rsa": ("RSA", "rsa_keygen_bits:3072"),
}
SKOPEO = "skopeo-sigstore"
"""Debian 12's own skopeo is built without sigstore: `.ci/signers` installs this one, and cosign."""
_OCI = "application/vnd.oci.image.manifest.v1+json"
_PATIENCE_S = 120


def cannot_run(why: str) -> NoReturn:
    if "CI" in os.environ:
        pytest.fail(why)
    pytest.skip(f"NOT SHOWN: {why}")


def run(*words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    path = f"{os.environ.get('PATH', '')}:/opt/signers/bin"
    program = shutil.which(str(words[0]), path=path)
    if program is None:
        cannot_run(f"{words[0]} is not installed")
    line = [program, *map(str, words[1:])]
    environment = {**os.environ, "COSIGN_PASSWORD": "secret"}
    done = subprocess.run(
        line, capture_output=True, text=True, check=False, timeout=120, env=environment
    )
    assert not check or done.returncode == 0, done.stderr
    return done


# openssl


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A private and a public key that openssl made."""
    algorithm, option = KINDS[request.param]
    private, public = tmp_path / "a.key", tmp_path / "a.pub"
    run("openssl", "genpkey", "-algorithm", algorithm, "-pkeyopt", option, "-out", private)
    run("openssl", "pkey", "-in", private, "-pubout", "-out", public)
    return private, public


def test_openssl_verifies_what_we_sign(pair: tuple[Path, Path], tmp_path: Path) -> None:
    key = PrivateKey.parse(pair[0].read_bytes(), "a.key", lambda: "")
    payload = Payload(Digest("a" * 64), DockerReference("host.example/ns/m")).encode()
    (tmp_path / "payload").write_bytes(payload)
    (tmp_path / "signature").write_bytes(key.sign(payload))
    line = ("openssl", "dgst", "-sha256", "-verify", pair[1], "-signature", tmp_path / "signature")
    assert run(*line, tmp_path / "payload").stdout == "Verified OK\n"
    (tmp_path / "payload").write_bytes(payload + b" ")
    assert run(*line, tmp_path / "payload", check=False).returncode == 1


def test_we_verify_what_openssl_signs(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "payload").write_bytes(b"a payload")
    made = tmp_path / "signature"
    run("openssl", "dgst", "-sha256", "-sign", pair[0], "-out", made, tmp_path / "payload")
    key = PublicKey.parse(pair[1].read_bytes(), "a.pub")
    assert key.verifies(b"a payload", made.read_bytes())
    assert not key.verifies(b"another", made.read_bytes())


def test_an_encrypted_key_of_openssl(tmp_path: Path) -> None:
    line = ("openssl", "genpkey", "-algorithm", "ED25519", "-aes256", "-pass", "pass:secret")
    run(*line, "-out", tmp_path / "a.key")
    raw = (tmp_path / "a.key").read_bytes()
    key = PrivateKey.parse(raw, "a.key", lambda: "secret")
    assert key.public.verifies(b"x", key.sign(b"x"))


# skopeo and docker-registry


@dataclass(frozen=True, slots=True)
class Registry:
    host: str
    folder: Path

    def request(
        self, method: str, path: str, body: bytes | None = None, kind: str = ""
    ) -> tuple[int, bytes, str]:
        connection = HTTPConnection(self.host, timeout=_PATIENCE_S)
        headers = {"Content-Type": kind} if kind else {"Accept": _OCI}
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        found = reply.status, reply.read(), reply.getheader("Location") or ""
        connection.close()
        return found

    def put_blob(self, repository: str, data: bytes) -> None:
        status, _, where = self.request("POST", f"/v2/{repository}/blobs/uploads/")
        assert status == 202
        url = urlsplit(where)
        path = f"{url.path}?{url.query}&digest={Digest.of(data)}"
        assert self.request("PUT", path, data, "application/octet-stream")[0] == 201

    def put_manifest(self, repository: str, tag: str, raw: bytes, kind: str) -> None:
        assert self.request("PUT", f"/v2/{repository}/manifests/{tag}", raw, kind)[0] == 201

    def get(self, path: str) -> bytes:
        status, raw, _ = self.request("GET", f"/v2/{path}")
        assert status == 200
        return raw

    def signatures(self, repository: str, digest: Digest) -> list[Signature]:
        """Return the signatures that a repository has under the tag."""
        raw = self.get(f"{repository}/manifests/{tag_of(digest)}")
        return [
            layer.signature(self.get(f"{repository}/blobs/{layer.digest}"))
            for layer in SignatureManifest.parse(raw).layers
        ]

    def put_signatures(self, repository: str, digest: Digest, new: SignatureManifest) -> None:
        """Upload a manifest of signatures, whose payloads are there."""
        assert new.config is not None
        self.put_blob(repository, new.config)
        self.put_manifest(repository, tag_of(digest), new.raw, _OCI)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with started(tmp_path / "registry") as found:
        yield found


@contextmanager
def started(folder: Path) -> Iterator[Registry]:
    if shutil.which("docker-registry") is None:
        cannot_run("docker-registry is not installed")
    host = f"127.0.0.1:{free_port()}"
    folder.mkdir()
    storage = {"filesystem": {"rootdirectory": str(folder / "root")}}
    config = {"version": "0.1", "storage": storage, "http": {"addr": host, "secret": "x"}}
    (folder / "config.yml").write_text(json.dumps(config))
    with (folder / "log").open("wb") as log:
        line = ["docker-registry", "serve", str(folder / "config.yml")]
        process = subprocess.Popen(line, stdout=log, stderr=log)
    try:
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until and process.poll() is None:
            with suppress(OSError, HTTPException):
                if Registry(host, folder).request("GET", "/v2/")[0] == 200:
                    break
            time.sleep(0.02)
        yield Registry(host, folder)
    finally:
        process.terminate()
        process.wait(_PATIENCE_S)


def skopeo(folder: Path, policy: Path | None, *words: str | Path, check: bool = True) -> str:
    """Run skopeo, which reads and writes signatures under tags; return its errors."""
    (folder / "registries.d").mkdir(exist_ok=True)
    text = "default-docker:\n  use-sigstore-attachments: true\n"
    (folder / "registries.d" / "default.yaml").write_text(text)
    line: list[str | Path] = [SKOPEO, "--registries.d", folder / "registries.d"]
    line += ["--insecure-policy"] if policy is None else ["--policy", policy]
    done = run(*line, *words, check=check)
    assert check or done.returncode != 0
    return done.stderr


def policy_of(path: Path, key: Path, identity: str | None) -> Path:
    """Write a policy that requires a signature by a key; return its path."""
    requirement: dict[str, object] = {"type": "sigstoreSigned", "keyPath": str(key)}
    if identity is not None:
        requirement["signedIdentity"] = {"type": identity}
    path.write_text(json.dumps({"default": [requirement]}))
    return path


@dataclass(frozen=True, slots=True)
class Pushed:
    """A model in a registry, and what it is signed with."""

    name: ModelName
    manifest: Manifest
    key: PrivateKey
    home: MemoryStore

    @property
    def repository(self) -> str:
        return f"{self.name.namespace}/{self.name.model}"

    @property
    def address(self) -> str:
        return f"docker://{self.name.host}/{self.repository}:{self.name.tag}"


@pytest.fixture
def pushed(registry: Registry, tmp_path: Path) -> Pushed:
    name = ModelName.parse(f"{registry.host}/ns/m:v1")
    home = MemoryStore()
    config = b'{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}'
    layer = b"a layer, which skopeo copies as it is"
    commit(home, str(name), config, layer)
    blobs = home.manifests.read(name).layers
    document = {
        "schemaVersion": 2,
        "mediaType": _OCI,
        "config": {**blobs[0].document, "mediaType": "application/vnd.oci.image.config.v1+json"},
        "layers": [{**blobs[1].document, "mediaType": "application/vnd.oci.image.layer.v1.tar"}],
    }
    manifest = Manifest.parse(json.dumps(document).encode())
    with home.session() as session:
        session.publish(name, manifest)
    for data in (config, layer):
        registry.put_blob("ns/m", data)
    registry.put_manifest("ns/m", "v1", manifest.raw, _OCI)
    key = PrivateKey.generate()
    (tmp_path / "cosign.pub").write_bytes(key.public.pem)
    return Pushed(name, manifest, key, home)


def push_signatures(registry: Registry, pushed: Pushed) -> None:
    digest = pushed.manifest.digest
    signatures = pushed.home.signatures.read(pushed.name, digest)
    for one in signatures:
        registry.put_blob(pushed.repository, one.payload)
    registry.put_signatures(pushed.repository, digest, SignatureManifest.of(signatures))


@pytest.mark.parametrize(
    ("tag", "identity", "reason"),
    [
        (None, "matchRepository", ""),
        (None, None, "is not accepted"),
        ("v1", None, ""),
        ("v1", "matchExact", ""),
        ("v2", None, "is not accepted"),
        ("v2", "matchRepository", ""),
    ],
)
def test_skopeo_and_we_decide_alike(
    registry: Registry,
    pushed: Pushed,
    tmp_path: Path,
    tag: str | None,
    identity: str | None,
    reason: str,
) -> None:
    wanted = DockerReference(f"{registry.host}/ns/m", tag)
    sign_model(pushed.name, pushed.home, pushed.key, identity=wanted)
    push_signatures(registry, pushed)
    policy = policy_of(tmp_path / "policy.json", tmp_path / "cosign.pub", identity)
    copy = ("copy", "--src-tls-verify=false", pushed.address, f"dir:{tmp_path / 'copy'}")
    refused = skopeo(tmp_path, policy, *copy, check=not reason)
    assert reason in refused
    checked = SignaturePolicy.read(policy)
    digest = pushed.manifest.digest
    signatures = registry.signatures("ns/m", digest)
    if reason:
        with pytest.raises(Exception, match="was made for"):
            checked.check(pushed.name, digest, signatures)
    else:
        assert len(checked.check(pushed.name, digest, signatures)) == 1


def test_skopeo_refuses_without_our_signature(
    registry: Registry, pushed: Pushed, tmp_path: Path
) -> None:
    policy = policy_of(tmp_path / "policy.json", tmp_path / "cosign.pub", "matchRepository")
    copy = ("copy", "--src-tls-verify=false", pushed.address, f"dir:{tmp_path / 'copy'}")
    assert "no signature exists" in skopeo(tmp_path, policy, *copy, check=False)
    sign_model(pushed.name, pushed.home, PrivateKey.generate())
    push_signatures(registry, pushed)
    assert "invalid signature" in skopeo(tmp_path, policy, *copy, check=False)


def test_skopeo_signs_with_our_key_and_keeps_our_signature(
    registry: Registry, pushed: Pushed, tmp_path: Path
) -> None:
    sign_model(pushed.name, pushed.home, pushed.key)
    push_signatures(registry, pushed)
    other = PrivateKey.generate()
    (tmp_path / "other.key").write_bytes(other.encrypted("secret"))
    (tmp_path / "password").write_text("secret")
    # skopeo copies an image onto itself, and adds its signature to ours.
    options = ["--src-tls-verify=false", "--dest-tls-verify=false"]
    options += ["--sign-by-sigstore-private-key", str(tmp_path / "other.key")]
    options += ["--sign-passphrase-file", str(tmp_path / "password")]
    skopeo(tmp_path, None, "copy", *options, pushed.address, pushed.address)
    digest = pushed.manifest.digest
    signatures = registry.signatures("ns/m", digest)
    assert len(signatures) == 2
    for key in (pushed.key, other):
        policy = SignaturePolicy.of_key(key.public)
        assert len(policy.check(pushed.name, digest, signatures)) == 1


def test_we_keep_the_signature_of_skopeo(
    registry: Registry, pushed: Pushed, tmp_path: Path
) -> None:
    (tmp_path / "other.key").write_bytes(PrivateKey.generate().encrypted("secret"))
    (tmp_path / "password").write_text("secret")
    options = ["--src-tls-verify=false", "--dest-tls-verify=false"]
    options += ["--sign-by-sigstore-private-key", str(tmp_path / "other.key")]
    options += ["--sign-passphrase-file", str(tmp_path / "password")]
    skopeo(tmp_path, None, "copy", *options, pushed.address, pushed.address)
    digest = pushed.manifest.digest
    before = SignatureManifest.parse(registry.get(f"ns/m/manifests/{tag_of(digest)}"))
    sign_model(pushed.name, pushed.home, pushed.key)
    ours = pushed.home.signatures.read(pushed.name, digest)
    registry.put_blob("ns/m", ours[0].payload)
    registry.put_signatures("ns/m", digest, before.extended(ours))
    assert len(registry.signatures("ns/m", digest)) == 2
    policy = policy_of(tmp_path / "policy.json", tmp_path / "cosign.pub", "matchRepository")
    copy = ("copy", "--src-tls-verify=false", pushed.address, f"dir:{tmp_path / 'copy'}")
    skopeo(tmp_path, policy, *copy)


# cosign


def verified_by_cosign(
    pushed: Pushed, public: Path, *, check: bool = True
) -> subprocess.CompletedProcess[str]:
    address = pushed.address.removeprefix("docker://")
    options = ("--insecure-ignore-tlog=true", "--allow-http-registry", "--key", public)
    return run("cosign", "verify", *options, address, check=check)


def signed_by_cosign(pushed: Pushed, private: Path) -> None:
    address = f"{pushed.name.host}/{pushed.repository}@{pushed.manifest.digest}"
    options = ("--tlog-upload=false", "--allow-http-registry", "--yes", "--key", private)
    run("cosign", "sign", *options, address)


def test_cosign_verifies_what_we_sign(registry: Registry, pushed: Pushed, tmp_path: Path) -> None:
    sign_model(pushed.name, pushed.home, pushed.key)
    push_signatures(registry, pushed)
    (claim,) = json.loads(verified_by_cosign(pushed, tmp_path / "cosign.pub").stdout)
    assert claim["critical"]["image"]["docker-manifest-digest"] == str(pushed.manifest.digest)
    (tmp_path / "other.pub").write_bytes(PrivateKey.generate().public.pem)
    assert verified_by_cosign(pushed, tmp_path / "other.pub", check=False).returncode != 0


def test_cosign_verifies_every_kind_of_key(
    registry: Registry, pushed: Pushed, pair: tuple[Path, Path]
) -> None:
    key = PrivateKey.parse(pair[0].read_bytes(), "a.key", lambda: "")
    sign_model(pushed.name, pushed.home, key)
    push_signatures(registry, pushed)
    verified_by_cosign(pushed, pair[1])


def test_cosign_verifies_ed25519(registry: Registry, pushed: Pushed, tmp_path: Path) -> None:
    run("openssl", "genpkey", "-algorithm", "ED25519", "-out", tmp_path / "a.key")
    key = PrivateKey.parse((tmp_path / "a.key").read_bytes(), "a.key", lambda: "")
    (tmp_path / "a.pub").write_bytes(key.public.pem)
    sign_model(pushed.name, pushed.home, key)
    push_signatures(registry, pushed)
    verified_by_cosign(pushed, tmp_path / "a.pub")


def test_cosign_signs_with_our_key(registry: Registry, pushed: Pushed, tmp_path: Path) -> None:
    (tmp_path / "cosign.key").write_bytes(pushed.key.encrypted("secret"))
    signed_by_cosign(pushed, tmp_path / "cosign.key")
    digest = pushed.manifest.digest
    signatures = registry.signatures("ns/m", digest)
    policy = SignaturePolicy.of_key(pushed.key.public)
    assert len(policy.check(pushed.name, digest, signatures)) == 1
    # The payload is ours byte for byte.
    payload = Payload(digest, DockerReference(f"{registry.host}/ns/m")).encode()
    assert [one.payload for one in signatures] == [payload]


def test_we_sign_with_a_key_of_cosign_and_keep_its_signature(
    registry: Registry, pushed: Pushed, tmp_path: Path
) -> None:
    prefix = tmp_path / "theirs"
    run("cosign", "generate-key-pair", f"--output-key-prefix={prefix}")
    raw = (tmp_path / "theirs.key").read_bytes()
    key = PrivateKey.parse(raw, "theirs.key", lambda: "secret")
    assert key.public.pem == (tmp_path / "theirs.pub").read_bytes()
    signed_by_cosign(pushed, tmp_path / "theirs.key")
    sign_model(pushed.name, pushed.home, pushed.key)
    digest = pushed.manifest.digest
    before = SignatureManifest.parse(registry.get(f"ns/m/manifests/{tag_of(digest)}"))
    ours = pushed.home.signatures.read(pushed.name, digest)
    registry.put_blob("ns/m", ours[0].payload)
    registry.put_signatures("ns/m", digest, before.extended(ours))
    for public in ("theirs.pub", "cosign.pub"):
        verified_by_cosign(pushed, tmp_path / public)


def test_cosign_keeps_our_signature(registry: Registry, pushed: Pushed, tmp_path: Path) -> None:
    sign_model(pushed.name, pushed.home, pushed.key)
    push_signatures(registry, pushed)
    other = PrivateKey.generate()
    (tmp_path / "other.key").write_bytes(other.encrypted("secret"))
    signed_by_cosign(pushed, tmp_path / "other.key")
    digest = pushed.manifest.digest
    signatures = registry.signatures("ns/m", digest)
    assert len(signatures) == 2
    for key in (pushed.key, other):
        accepted = SignaturePolicy.of_key(key.public).check(pushed.name, digest, signatures)
        assert len(accepted) == 1


# push and pull


def test_cosign_verifies_what_was_pushed_and_we_what_it_signed(
    registry: Registry, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model is signed, pushed, signed again by cosign, and pulled by those who trust either."""
    name = f"{registry.host}/ns/m:v1"
    commit(store, name, b"one", b"two")
    digest = store.manifest(name).digest
    key = PrivateKey.generate()
    pushed = Pushed(ModelName.parse(name), store.manifest(name), key, MemoryStore())
    for prefix, one in (("ours", key), ("theirs", PrivateKey.generate())):
        (tmp_path / f"{prefix}.key").write_bytes(one.encrypted("secret"))
        (tmp_path / f"{prefix}.pub").write_bytes(one.public.pem)
    sign_model(name, store, pushed.key)
    at = ("--store", str(store.root))
    assert main.run(["push", name, *at]) == 0
    verified_by_cosign(pushed, tmp_path / "ours.pub")
    pulled = ("pull", name, "--store", str(tmp_path / "other"))
    capsys.readouterr()
    assert main.run([*pulled, "--key", str(tmp_path / "theirs.pub")]) == 1
    assert "a signature is by another key" in capsys.readouterr().err
    assert not (tmp_path / "other" / "manifests").exists()
    signed_by_cosign(pushed, tmp_path / "theirs.key")
    assert main.run([*pulled, "--key", str(tmp_path / "theirs.pub")]) == 0
    assert "Pulled 2 signatures" in capsys.readouterr().out
    other = Store(tmp_path / "other")
    assert other.manifest(name).digest == digest
    for prefix in ("ours", "theirs"):
        line = ["verify", name, "--key", str(tmp_path / f"{prefix}.pub"), "--store"]
        assert main.run([*line, str(other.root)]) == 0
    policy = policy_of(tmp_path / "policy.json", tmp_path / "ours.pub", None)
    assert main.run(["pull", name, *at, "--policy", str(policy)]) == 1  # no tag is signed
    assert "was made for" in capsys.readouterr().err
    assert main.run(["push", name, *at]) == 0  # cosign's signature is kept
    verified_by_cosign(pushed, tmp_path / "theirs.pub")
