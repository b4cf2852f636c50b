"""Other programs verify our signatures, and we theirs: openssl, skopeo and cosign.

skopeo is built of containers/image, whose policies and keys are cosign's. Its log says why it
refuses an image.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.registries import cannot_run, registry

from blobstore.errors import SignatureError
from blobstore.formats.documents import Manifest
from blobstore.formats.oci import DockerReference, Payload
from blobstore.io.http.client import HttpClient
from blobstore.names import Digest, ModelName
from blobstore.store.memory import MemoryStore
from blobstore.store.registry.store import RegistryStore
from blobstore.store.signing.key_pairs import PrivateKey, PublicKey
from blobstore.store.signing.signed_models import SignaturePolicy, sign_model
from blobstore.store.transfer import transfer
from blobstore.testing.blobs import commit

pytestmark = pytest.mark.lab

SKOPEO = "skopeo-sigstore"
"""Debian 12's own skopeo is built without sigstore: `.ci/signers` installs this one, and cosign."""
KEY, OTHER = PrivateKey.generate(), PrivateKey.generate()


def run(*words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    path = f"{os.environ.get('PATH', '')}:/opt/signers/bin"
    if shutil.which(str(words[0]), path=path) is None:
        cannot_run(f"{words[0]} is not installed")
    environment = {**os.environ, "PATH": path, "COSIGN_PASSWORD": "secret"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    ("algorithm", "option"), [("EC", "ec_paramgen_curve:P-521"), ("RSA", "rsa_keygen_bits:3072")]
)
def test_openssl_and_we_verify_each_other(algorithm: str, option: str, tmp_path: Path) -> None:
    private, public, made = (tmp_path / name for name in ("a.key", "a.pub", "signature"))
    lock = ("-aes256", "-pass", "pass:secret")
    run("openssl", "genpkey", "-algorithm", algorithm, "-pkeyopt", option, *lock, "-out", private)
    run("openssl", "pkey", "-in", private, "-passin", "pass:secret", "-pubout", "-out", public)
    key = PrivateKey.parse(private.read_bytes(), "a.key", lambda: "secret")
    payload = Payload(Digest("a" * 64), DockerReference("host.example/ns/m")).encode()
    (tmp_path / "payload").write_bytes(payload)
    made.write_bytes(key.sign(payload))
    verify = ("openssl", "dgst", "-sha256", "-verify", public, "-signature", made)
    assert run(*verify, tmp_path / "payload").stdout == "Verified OK\n"
    sign = ("openssl", "dgst", "-sha256", "-sign", private, "-passin", "pass:secret", "-out", made)
    run(*sign, tmp_path / "payload")
    theirs = PublicKey.parse(public.read_bytes(), "a.pub")
    assert theirs.verifies(payload, made.read_bytes())
    assert not theirs.verifies(b"another", made.read_bytes())


@pytest.fixture
def home(tmp_path: Path) -> Iterator[RegistryStore]:
    with registry(tmp_path / "registry") as running, HttpClient() as client:
        yield RegistryStore(running.host, client, address=running.url)


@pytest.fixture
def name(home: RegistryStore) -> ModelName:
    """The name of an image in the registry, which skopeo copies, and which is not signed yet."""
    name = ModelName.parse(f"{home.address.removeprefix('http://')}/ns/m:v1")
    made = MemoryStore()
    config = b'{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}'
    commit(made, str(name), config, b"a layer, which skopeo copies as it is")
    blobs = made.manifests.read(name).layers
    oci = "application/vnd.oci.image"
    document = {
        "schemaVersion": 2,
        "mediaType": f"{oci}.manifest.v1+json",
        "config": {**blobs[0].document, "mediaType": f"{oci}.config.v1+json"},
        "layers": [{**blobs[1].document, "mediaType": f"{oci}.layer.v1.tar"}],
    }
    with made.session() as session:
        session.publish(name, Manifest.parse(json.dumps(document).encode()))
    transfer(str(name), made, home)
    return name


def accepted(home: RegistryStore, name: ModelName, policy: SignaturePolicy) -> int:
    """Return how many signatures in the registry a policy accepts. Raises: SignatureError."""
    digest = home.manifests.read(name).digest
    return len(policy.check(name, digest, home.signatures.read(name, digest)))


def key_files(folder: Path, key: PrivateKey) -> tuple[Path, Path]:
    private, public = folder / "cosign.key", folder / "cosign.pub"
    private.write_bytes(key.encrypted("secret"))
    public.write_bytes(key.public.pem)
    return private, public


def refusal_of_skopeo(folder: Path, name: ModelName, policy: Path) -> str:
    """Copy the image by skopeo, which asks a policy; return why it refuses, "" if it does not."""
    (folder / "registries.d").mkdir(exist_ok=True)
    text = "default-docker:\n  use-sigstore-attachments: true\n"
    (folder / "registries.d" / "default.yaml").write_text(text)
    line = (SKOPEO, "--registries.d", folder / "registries.d", "--policy", policy, "copy")
    words = ("--src-tls-verify=false", f"docker://{name}", f"dir:{folder / 'copy'}")
    done = run(*line, *words, check=False)
    return done.stderr if done.returncode else ""


def test_skopeo_and_we_decide_alike(home: RegistryStore, name: ModelName, tmp_path: Path) -> None:
    _, public = key_files(tmp_path, KEY)
    identity = {"type": "matchRepoDigestOrExact"}
    rule = {"type": "sigstoreSigned", "keyPath": str(public), "signedIdentity": identity}
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({"default": [rule]}))
    assert "no signature exists" in refusal_of_skopeo(tmp_path, name, policy)
    sign_model(name, home, OTHER)
    assert "invalid signature" in refusal_of_skopeo(tmp_path, name, policy)
    repository = f"{name.host}/{name.namespace}/{name.model}"
    sign_model(name, home, KEY, identity=DockerReference(repository, "v2"))
    assert "is not accepted" in refusal_of_skopeo(tmp_path, name, policy)
    with pytest.raises(SignatureError):
        accepted(home, name, SignaturePolicy.read(policy))
    sign_model(name, home, KEY, identity=DockerReference(repository, name.tag))
    assert refusal_of_skopeo(tmp_path, name, policy) == ""
    assert accepted(home, name, SignaturePolicy.read(policy)) == 1


def test_cosign_and_we_sign_alike(home: RegistryStore, name: ModelName, tmp_path: Path) -> None:
    private, public = key_files(tmp_path, KEY)
    sign_model(name, home, OTHER)
    address = f"{str(name).rpartition(':')[0]}@{home.manifests.read(name).digest}"
    options = ("--tlog-upload=false", "--allow-http-registry", "--yes", "--key", private)
    run("cosign", "sign", *options, address)
    run("cosign", "generate-key-pair", f"--output-key-prefix={tmp_path / 'theirs'}")
    raw = (tmp_path / "theirs.key").read_bytes()
    theirs = PrivateKey.parse(raw, "theirs.key", lambda: "secret")
    assert theirs.public.pem == (tmp_path / "theirs.pub").read_bytes()
    sign_model(name, home, theirs)
    for key in (KEY, OTHER, theirs):
        assert accepted(home, name, SignaturePolicy.of_key(key.public)) == 1
    for file in (public, tmp_path / "theirs.pub"):
        verified_by_cosign(name, file)
    _, unknown = key_files(tmp_path, PrivateKey.generate())
    with pytest.raises(AssertionError, match="no matching signatures"):
        verified_by_cosign(name, unknown)


def verified_by_cosign(name: ModelName, public: Path) -> None:
    options = ("--insecure-ignore-tlog=true", "--allow-http-registry", "--key", public)
    run("cosign", "verify", *options, str(name))
