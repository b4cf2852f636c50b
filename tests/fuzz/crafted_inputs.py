"""The inputs of crafted.py: what makes each, and the commands that read it."""

# ruff: noqa: E501  # an input a line

import base64
import functools
import hashlib
import io
import json
import os
import struct
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import zstandard

MB = 10**6
BAD = "store/manifests/registry.ollama.ai/library/bad/1"
Bytes = Callable[[], bytes]


def array(item: str, size: int = MB) -> str:
    return f"[{','.join([item] * (size // (len(item) + 1) - 1))}]"


def members(member: str, count: int) -> str:
    return f"{{{','.join(member.replace('N', f'{n:x}') for n in range(count))}}}"


SHAPES: dict[str, Callable[[], str]] = {
    "[] without end": functools.partial(array, "[]"),
    "90,000 keys": functools.partial(members, '"N":0', 90_000),
    "nested 400,000 deep": lambda: "[" * 400_000 + "]" * 400_000,
    "a number of 1,000,000 digits": lambda: "9" * MB,
}
EMPTY = '"N":{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}'
HEADERS: dict[str, Callable[[], str]] = {
    "15,000 empty tensors": functools.partial(members, EMPTY, 15_000),
    "metadata of 90,000 keys": lambda: '{"__metadata__":' + members('"N":""', 90_000) + "}",
    "shapes of 64 axes": lambda: members(EMPTY.replace("[0]", f"[{'1,' * 63}0]", 1), 5_000),
}


def inside(shape: str, start: str = '"x":') -> bytes:
    return f"{{{start}{SHAPES[shape]()}}}".encode()


def header(name: str) -> bytes:
    text = HEADERS[name]().encode()
    return struct.pack("<Q", len(text)) + text


def lines_of(line: str) -> bytes:
    """Return a Modelfile of about 1 MB."""
    lines = (line.format(n) for n in range(MB // (len(line) + 4)))
    return "\n".join(("FROM model", *lines)).encode()


# Models that somebody else stored


def descriptor(data: bytes, media: str = "tensor", name: str = "w") -> str:
    text = {"mediaType": f"application/vnd.ollama.image.{media}", "name": name, "size": len(data),
            "digest": f"sha256:{hashlib.sha256(data).hexdigest()}"}  # fmt: skip
    return json.dumps(text)


def manifest(*layers: str) -> bytes:
    config = descriptor(b"{}", "config")
    return f'{{"schemaVersion":2,"config":{config},"layers":[{",".join(layers)}]}}'.encode()


def store(folder: Path, data: bytes, media: str, name: str, times: int = 1) -> None:
    for blob in (data, b"{}"):
        (folder / f"store/blobs/sha256-{hashlib.sha256(blob).hexdigest()}").write_bytes(blob)
    layers = (descriptor(data, media, f"{name}{n or ''}") for n in range(times))
    put(folder / BAD, manifest(*layers))


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def hole(folder: Path) -> None:
    """Store a manifest of 64 MB that takes a block."""
    put(folder / BAD, b'{"a":[')
    os.truncate(folder / BAD, 2**26)


def linked(path: Path, names: Iterable[str]) -> None:
    for name in names:
        path.with_name(name).hardlink_to(path)


def shards(folder: Path) -> None:
    """Make a checkpoint of 4,000 names of one file."""
    weights = (folder / "model/model.safetensors").rename(folder / "model/a.safetensors")
    weights.write_bytes(header("metadata of 90,000 keys"))
    linked(weights, (f"b{n}.safetensors" for n in range(4_000)))


def documents(folder: Path) -> None:
    """Put 4,000 names of a document into a checkpoint, which is a hole of 255 MB."""
    put(folder / "model/one.json", b'{"a":[')
    os.truncate(folder / "model/one.json", 255 * 2**20)
    linked(folder / "model/one.json", (f"{n}.json" for n in range(4_000)))


def models(folder: Path) -> None:
    """Store 3,000 models that are names of one manifest."""
    store(folder, inside("90,000 keys")[:300_000], "license", "", 1_000)
    linked(folder / BAD, (str(n) for n in range(2, 3_000)))


# Archives


def tar(*files: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, data in files:
            info = tarfile.TarInfo(path)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def block(kind: bytes, size: int, data: bytes = b"") -> bytes:
    info = tarfile.TarInfo("index.json")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT) + data.ljust(-len(data) % 512 + len(data), b"\0")


def squeezed(data: bytes, times: int = 1) -> bytes:
    """Return ``data`` repeated, as one frame of zstd."""
    out = io.BytesIO()
    with zstandard.ZstdCompressor(9).stream_writer(out, closefd=False) as writer:
        for _ in range(times):
            writer.write(data)
    return out.getvalue()


LAYOUT = ("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')


def index(models: Sequence[bytes]) -> tuple[str, bytes]:
    entries = [
        {"mediaType": "application/vnd.oci.image.manifest.v1+json", "size": len(raw),
         "digest": f"sha256:{hashlib.sha256(raw).hexdigest()}",
         "annotations": {"org.opencontainers.image.ref.name": f"bad:{n}"}}
        for n, raw in enumerate(models)
    ]  # fmt: skip
    return "index.json", json.dumps({"schemaVersion": 2, "manifests": entries}).encode()


def blob(data: bytes) -> tuple[str, bytes]:
    return f"blobs/sha256/{hashlib.sha256(data).hexdigest()}", data


def big(size: int) -> bytes:
    return f'{{"schemaVersion":2,"x":{array("[]", size)}}}'.encode()


def restarted() -> bytes:
    """Return a stream whose models come in the wrong order behind 500 MB."""
    models = [manifest(descriptor(b"%d" % n)) for n in range(100)]
    blobs = [blob(data) for n, model in enumerate(models) for data in (b"%d" % n, model)]
    return squeezed(tar(("zeros", bytes(500 * MB)), *blobs, blob(b"{}"), index(models), LAYOUT))


# The inputs: of each kind, where its file lies, and the commands that read it.

# fmt: off
STORED = """list; list --json; show bad:1; show bad:1 --tensors --json; inspect bad:1; verify --quick;
    verify bad:1; du; du bad:1; prune --dry-run; cp bad:1 other:1; diff good:1 bad:1;
    export bad:1 {at}/out; save bad:1 -o {at}/bad.tar; quality bad:1 --against {at}/model;
    report bad:1 -o {at}/bad.html; repair bad:1;
    sign bad:1 --key {at}/k.key --identity localhost/a/b:c;
    pack bad:1; rm good:1; rm bad:1; prune --grace 0s --sole-owner"""
READ = """inspect {at}/model; inspect {at}/model --tensors --json; plan {at}/model;
    plan {at}/model --target-bpw 5 --json; import {at}/model bad:1 --quant int4;
    quality good:1 --against {at}/model; repair good:1 --from {at}/model"""
TALK = "import {at}/model bad:1; run bad:1 hi --max-tokens 1"
PLACES = {
    "manifest": (BAD, STORED), "blob": (None, STORED), "stored file": (None, STORED),
    "checkpoint": ("model/{name}", READ + "; " + TALK), "config.json": ("model/config.json", READ),
    "header": ("model/model.safetensors", "metadata get {at}/model/model.safetensors; "
               "metadata rm {at}/model/model.safetensors a; " + READ),
    "template": ("model/chat_template.jinja", TALK),
    "tokenizer": ("model/tokenizer.json", TALK),
    "policy": ("bad.toml", "plan {at}/model --policy {at}/bad.toml"),
    "policy of JSON": ("bad.json", "plan {at}/model --policy {at}/bad.json"),
    "plan": ("bad.json", "import --plan {at}/bad.json; work {at}/bad.json; commit {at}/bad.json"),
    "signature policy": ("bad.json", "verify good:1 --policy {at}/bad.json"),
    "batch": ("bad.toml", "work --batch {at}/bad.toml"),
    "Modelfile": ("Modelfile", "import {at}/model bad:1 -f {at}/Modelfile; show bad:1; list"),
    "key": ("bad.key", "verify good:1 --key {at}/bad.key; sign good:1 --key {at}/bad.key"),
    "archive": ("bad.tar", "load {at}/bad.tar --list; load - < {at}/bad.tar; load {at}/bad.tar"),
}
FILES: tuple[tuple[str, str, Bytes], ...] = (
    *((kind, name, functools.partial(inside, name))
      for kind in ("manifest", "config.json", "policy of JSON", "plan", "signature policy")
      for name in SHAPES),
    ("manifest", "5,000 names of a blob", lambda: manifest(*[descriptor(b"{}")] * 5_000)),
    *(("checkpoint", f"{name} of []", functools.partial(inside, "[] without end")) for name in (
        "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json")),
    *(("header", name, functools.partial(header, name)) for name in HEADERS),
    ("template", "'x' * 3000000000", lambda: b"{{ 'x' * 3000000000 }}"),
    ("template", "40,000 nested blocks", lambda: b"{% if a %}" * 40_000 + b"{% endif %}" * 40_000),
    ("tokenizer", "70,000 words", lambda: json.dumps(
        {"model": {"type": "BPE", "vocab": {f"{n:x}": n for n in range(70_000)}, "merges": []}}).encode()),
    ("policy", "a key of 400,000 dots", lambda: b"a." * 400_000 + b"a=1"),
    ("policy", "70,000 rules", lambda: b"rules=" + array('"*a*b*=int8"').encode()),
    ("batch", "40,000 models", lambda: b"[[model]]\nsource=''\n" * 40_000),
    *(("Modelfile", f"{line.lower()}s without end", functools.partial(lines_of, line + " {}"))
      for line in ("PARAMETER stop", "MESSAGE user", "LICENSE")),
    ("key", "scrypt that wants 1 TB", lambda: pem(
        b'{"kdf":{"name":"scrypt","params":{"N":1073741824,"r":8,"p":1},"salt":""},'
        b'"cipher":{"name":"nacl/secretbox","nonce":""},"ciphertext":""}')),
    ("archive", "manifest of 64 MB of []", lambda: squeezed(
        tar(LAYOUT, index([big(64 * MB)]), blob(big(64 * MB))))),
    ("archive", "PAX records without end", lambda: squeezed(block(b"x", 11, b"11 a=bcdef\n") * 8, 100_000)),
    ("archive", "GNU long names without end", lambda: squeezed(block(b"L", 512, b"a" * 511) * 8, 100_000)),
    ("archive", "10 GB of zeros in a zstd frame", lambda: squeezed(bytes(MB), 10_000)),
    ("archive", "a zstd window of 2 GB", lambda: struct.pack("<IBB", 0xFD2FB528, 0, 0xA8) + b"\1\0\0" * (MB // 3)),
    ("archive", "a stream that is started again", restarted),
)
MAKERS: tuple[tuple[str, str, Callable[[Path], None]], ...] = (
    ("manifest", "64 MB of hole", hole),
    *(("blob", name, functools.partial(lambda at, name: store(at, header(name), "tensor", "w"), name=name))
      for name in HEADERS),
    ("blob", "4,000 names of a header", lambda at: store(at, header("15,000 empty tensors"), "tensor",
                                                         "w", 4_000)),
    ("stored file", "config.json of []",
     lambda at: store(at, inside("[] without end"), "json", "config.json")),
    ("checkpoint", "4,000 names of a file", shards),
    ("checkpoint", "4,000 names of a hole of 255 MB", documents),
    ("manifest", "3,000 names", models),
)
# fmt: on


def pem(text: bytes) -> bytes:
    kind = b"ENCRYPTED SIGSTORE PRIVATE KEY-----\n"
    return b"-----BEGIN %s%s-----END %s" % (kind, base64.encodebytes(text), kind)


def file_of(kind: str, name: str, data: Bytes) -> tuple[str, str, Callable[[Path], None]]:
    path = str(PLACES[kind][0]).format(name=name.split(maxsplit=1)[0])
    return kind, name, lambda folder: put(folder / path, data())


INPUTS = [*(file_of(*row) for row in FILES), *MAKERS]
