"""Payloads, signatures and their manifests: cosign's bytes, and what is refused (rule S1)."""

import json
from typing import Any

import pytest

from blobstore import errors
from blobstore.formats.oci import (
    MAX_ANNOTATIONS,
    MAX_PAYLOAD,
    MAX_SIGNATURE_FILE,
    MAX_SIGNATURES,
    SIGNATURE_KEY,
    DockerReference,
    Payload,
    Signature,
    SignatureManifest,
    tag_of,
)
from blobstore.names import Digest, ModelName

DIGEST = Digest("ab" * 32)
PAYLOAD = Payload(DIGEST, DockerReference("host.example/ns/m"))
ONE = Signature.of(b"one", b"\x01")
TWO = Signature(b"two", {SIGNATURE_KEY: "Ag==", "dev.sigstore.cosign/bundle": "{}"})


def test_identities() -> None:
    for text, repository, tag in (
        ("GCR.io/A/b:Tag", "gcr.io/a/b", "Tag"),
        ("host:5000/m", "host:5000/m", None),
        ("busybox", "docker.io/library/busybox", None),
        (f"gcr.io/a/b/c@{DIGEST}", "gcr.io/a/b/c", None),
    ):
        assert DockerReference.parse(text) == DockerReference(repository, tag)
    for text in ("", "a\n", "x" * 513, ":1", "gcr.io/a/b@sha256:1", "gcr.io/\u00e9"):
        with pytest.raises(errors.InvalidNameError):
            DockerReference.parse(text)
    of_model = DockerReference.of(ModelName.parse("host.example:5000/Ns/M:Q4"))
    assert str(of_model) == "host.example:5000/ns/m:Q4"
    assert DockerReference.parse(str(of_model)) == of_model


def test_the_bytes_of_a_payload_are_those_of_cosign() -> None:
    # sigstore/cosign writes a Go struct: its order, no spaces, and null for no user's keys.
    assert PAYLOAD.encode() == (
        b'{"critical":{"identity":{"docker-reference":"host.example/ns/m"},'
        b'"image":{"docker-manifest-digest":"' + str(DIGEST).encode() + b'"},'
        b'"type":"cosign container image signature"},"optional":null}'
    )
    assert Payload.parse(PAYLOAD.encode()) == PAYLOAD


def changed(**changes: object) -> bytes:
    return json.dumps(json.loads(PAYLOAD.encode()) | changes).encode()


CRITICAL: list[dict[str, object]] = [
    {"type": "atomic container signature"},
    # Go's parser ignores the case of keys; the example in cosign's specification has this one.
    {"image": {"Docker-manifest-digest": str(DIGEST)}},
    {"image": {"docker-manifest-digest": "x"}},
    {"identity": {"docker-reference": "a b"}},
]
PAYLOADS = [
    PAYLOAD.encode() + b"{}",
    PAYLOAD.encode().replace(b'"type"', b'"type":"x","type"'),
    changed(more=1),
    b'{"critical":' + b"[" * 9000 + b"]" * 9000 + b',"optional":null}',
]


def test_payloads_that_are_refused() -> None:
    raw = changed(optional={"creator": "x", "timestamp": 1.5})  # these keys are the user's
    assert Payload.parse(raw) == PAYLOAD
    critical = json.loads(PAYLOAD.encode())["critical"]
    for raw in (*PAYLOADS, *(changed(critical=critical | change) for change in CRITICAL)):
        with pytest.raises(errors.DocumentError) as caught:
            Payload.parse(raw)
        assert caught.value.rule == "S1"
        assert len(caught.value.message) < 400
    with pytest.raises(errors.LimitExceededError):
        Payload.parse(changed(optional={"a": "x" * MAX_PAYLOAD}))


def test_a_signature_in_a_file() -> None:
    for one in (ONE, TWO):
        assert Signature.parse(one.encode(), "a file") == one
    assert (ONE.value, TWO.value) == (b"\x01", b"\x02")
    # Base64 as Go reads it: line breaks are ignored; signatures that openssl encoded have some.
    assert Signature(b"", {SIGNATURE_KEY: "AQID\nBAU=\r\n"}).value == b"\1\2\3\4\5"
    for said in ({}, {SIGNATURE_KEY: "Ag"}, {SIGNATURE_KEY: "-_=="}):
        with pytest.raises(errors.DocumentError):
            _ = Signature(b"", said).value


def test_files_that_are_refused() -> None:
    changes: list[tuple[str, object]] = [
        *(("mediaType", "application/json"), ("digest", str(DIGEST)), ("size", 2), ("data", "!")),
        *(("annotations", {"a": 1}), ("annotations", {"a": "x" * MAX_ANNOTATIONS})),
        ("padding", "x" * MAX_SIGNATURE_FILE),
    ]
    for key, value in changes:
        raw = json.dumps({**json.loads(ONE.encode()), key: value}).encode()
        with pytest.raises(errors.BlobStoreError):
            Signature.parse(raw, "a file")


def test_a_manifest_and_its_config() -> None:
    assert tag_of(DIGEST) == f"sha256-{DIGEST.hex}.sig"
    made = SignatureManifest.of([ONE, TWO])
    value = json.loads(made.raw)
    assert value["layers"] == [ONE.layer, TWO.layer]
    assert value["config"]["digest"] == str(Digest.of(made.config or b""))
    one, two = SignatureManifest.parse(made.raw).layers
    assert [one.signature(b"one"), two.signature(b"two")] == [ONE, TWO]
    with pytest.raises(errors.DigestMismatchError):
        one.signature(b"two")


def test_layers_of_others_and_unknown_keys_are_kept() -> None:
    value = json.loads(SignatureManifest.of([ONE]).raw)
    other = {"mediaType": "application/x", "size": 1, "digest": str(DIGEST), "x": [1]}
    value["layers"].insert(0, other)
    value["annotations"] = {"a": "b"}
    before = SignatureManifest.parse(json.dumps(value).encode())
    assert [layer.digest for layer in before.layers] == [Digest.of(b"one")]
    after = before.with_signatures([TWO])
    found = json.loads(after.raw)
    assert found["layers"] == [other, ONE.layer, TWO.layer]
    assert found["annotations"] == {"a": "b"}
    assert after.with_signatures([TWO, ONE]) is after  # what is there is not added


def test_manifests_that_are_refused() -> None:
    changes: list[dict[str, Any]] = [
        {"layers": [1]},
        {"layers": [{**ONE.layer, "digest": "x"}]},
        {"layers": [{**ONE.layer, "size": MAX_PAYLOAD + 1}]},
        {"layers": [{**ONE.layer, "annotations": {"a": "x" * MAX_ANNOTATIONS}}]},
        {"layers": [ONE.layer] * (MAX_SIGNATURES + 1)},
        {"manifests": []},
    ]
    good = json.loads(SignatureManifest.of([ONE]).raw)
    for change in changes:
        with pytest.raises((errors.DocumentError, errors.LimitExceededError)):
            SignatureManifest.parse(json.dumps({**good, **change}).encode())
    most = json.dumps({**good, "layers": [ONE.layer] * MAX_SIGNATURES}).encode()
    with pytest.raises(errors.LimitExceededError):
        SignatureManifest.parse(most).with_signatures([TWO])
