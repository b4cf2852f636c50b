"""Small inputs that ask for much: files, folders and stores of at most 1 MiB, for bounds.py.

What makes them large is what costs no disk: hard links, holes in files, names that refer to one
thing many times, short texts that become large objects. Everything follows from a seed.
"""

from __future__ import annotations

import json
import math
import os
import random
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

MOST_ON_DISK = 2**20
SERVER = "BOUNDS_SERVER"
"""The environment variable with the port of a server that sends small replies."""
MOST_TEXT = 900_000
_MOST_VALUES = (
    64 * 2**20
)  # what hashes or quantizes values takes time for each byte, also for those of a hole
_TYPES = ("int4", "int8", "nvfp4", "mxfp4", "mxfp8")
_DIGEST = "sha256:{:064x}"
_TENSOR, _JSON = "application/vnd.ollama.image.tensor", "application/vnd.ollama.image.json"
_FILE, _LICENSE = "application/vnd.blobstore.file", "application/vnd.ollama.image.license"
_DOCUMENTS = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    "model.safetensors.index.json",
    "quantization_config.json", "blobstore.json", "hf_quant_config.json", "chat_template.jinja",
    "vocab.json",
)  # fmt: skip

Choices = random.Random
Line = list[str]


def build(seed: str, folder: Path) -> Line:
    """Make the input of ``seed`` in the empty ``folder``, and return its command's arguments."""
    choices = random.Random(seed)
    return choices.choice(FAMILIES)(choices, folder)


def on_disk(folder: Path) -> int:
    """Return the bytes that a folder takes on the disk, however deep.

    A file with several names counts once.
    """
    done = subprocess.run(
        ["du", "-s", "-B1", str(folder)], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[0])


def log(choices: Choices, low: int, high: int) -> int:
    """Return a number whose size is chosen first: 1 to 10 as often as 10,000 to 100,000."""
    return min(high, round(low * math.pow(high / low, choices.random())))


def times(pattern: Callable[[int], str], count: int, most: int = MOST_TEXT) -> str:
    """Return the texts of 0, 1, 2, … joined by commas: ``count`` of them, or as many as fit."""
    parts, size = [], 0
    for number in range(count):
        part = pattern(number)
        size += len(part) + 1
        if size > most:
            break
        parts.append(part)
    return ",".join(parts)


def _file(path: Path, data: bytes, size: int | None = None) -> Path:
    """Write a file; what it has beyond its data is a hole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if size is not None and size > len(data):
        os.truncate(path, size)
    return path


def _link(path: Path, names: list[Path]) -> None:
    for name in names:
        name.parent.mkdir(parents=True, exist_ok=True)
        if not name.exists():
            name.hardlink_to(path)


# JSON


def document(choices: Choices, most: int = MOST_TEXT) -> bytes:
    """Return a JSON object of one of many shapes, valid mostly."""
    count = log(choices, 1, most)
    depth = log(choices, 1, 20_000)
    text = choices.choice(
        (
            lambda: "[" + times(lambda _: "[]", count, most) + "]",
            lambda: "[" + times(lambda _: "{}", count, most) + "]",
            lambda: "[" + times(str, count, most) + "]",
            lambda: "[" + times(lambda n: f"1e{n % 308}", count, most) + "]",
            lambda: "{" + times(lambda n: f'"{n:x}":{{}}', count, most) + "}",
            lambda: "{" + times(lambda n: f'"{n % 3}":0', count, most) + "}",
            lambda: "[" * depth + "]" * depth,
            lambda: '{"a":' * depth + "0" + "}" * depth,
            lambda: '"' + "x" * count + '"',
            lambda: '"' + "\\u00e9" * (count // 6) + '"',
            lambda: '"' + "\U0001f600" * (count // 4) + 'x"',
            lambda: "9" * count,
            lambda: "-0." + "0" * count + "1",
        )
    )()
    key = choices.choice(
        ("a", "architectures", "quantization_config", "quantization", "text_config", "weight_map",
        "eos_token_id",
         "num_hidden_layers", "vocab_size", "layer_types", "added_tokens", "model", "metadata",
         "sources", "tensors")
    )  # fmt: skip
    others = (
        '"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":64,'
        if choices.random() < 0.5
        else ""
    )
    return f"{{{others}{json.dumps(key)}:{text}}}".encode()[: most + 500]


# Headers


def header(choices: Choices, most: int = MOST_TEXT) -> tuple[bytes, int]:
    """Return a header's text, valid mostly, and how many bytes of data it says there are."""
    count = log(choices, 1, most // 40)
    values = log(choices, 1, _MOST_VALUES)
    name = choices.choice(
        (
            lambda n: f"{n:x}",
            lambda n: f"model.layers.{n}.self_attn.q_proj.weight",
            lambda n: f"model.layers.0.mlp.experts.{n}.up_proj.weight",
            lambda n: "a." * (n % 500) + str(n),
            lambda n: "x" * (most // 20) + str(n),
            lambda n: f"w.{n}.weight_scale_inv",
        )
    )
    empty = '"dtype":"BF16","shape":[0],"data_offsets":[0,0]'
    shape = choices.choice(
        ("[0]", "[" + "1," * 60 + "0]", "[0,18446744073709551615]", "[" + "0," * 5000 + "0]")
    )
    rows = max(1, values // 128)
    text = choices.choice(
        (
            lambda: times(lambda n: f'"{name(n)}":{{{empty}}}', count, most),
            lambda: times(
                lambda n: f'"{name(n)}":{{{empty.replace("[0]", shape, 1)}}}', count, most
            ),
            lambda: (
                f'"{name(0)}":{{"dtype":"BF16","shape":[{rows},64],'
                f'"data_offsets":[0,{rows * 128}]}}'
            ),
            lambda: (
                f'"{name(1)}":{{"dtype":"F4","shape":[{rows * 256}],'
                f'"data_offsets":[0,{rows * 128}]}}'
            ),
            lambda: f'"w":{{{empty},"x":{document(choices, most).decode()}}}',
            lambda: '"__metadata__":{' + times(lambda n: f'"{n:x}":""', count, most) + "}",
            lambda: '"__metadata__":{"format":"' + "x" * most + '"}',
            lambda: '"__metadata__":' + document(choices, most).decode(),
        )
    )()
    return (
        f"{{{text}}}".encode(),
        rows * 128 if '"data_offsets":[0,0]' not in text and "data_offsets" in text else 0,
    )


def _safetensors(choices: Choices, path: Path, most: int = MOST_TEXT) -> Path:
    """Write a .safetensors file: mostly a whole one.

    Its header or its data may have a hole, or be shorter than they say.
    """
    text, size = header(choices, most)
    length = choices.choice((len(text), len(text), len(text), log(choices, 1, 100_000_000), 2**63))
    hole = choices.choice((0, 0, 0, log(choices, 1, 100_000_000)))
    return _file(
        path, struct.pack("<Q", length) + text, 8 + min(max(length, len(text)), 2**27) + size + hole
    )


def _reading(choices: Choices, source: Path, folder: Path) -> Line:
    """Return a command that reads a checkpoint."""
    store = str(folder / "store")
    kind = choices.choice(_TYPES)
    return choices.choice(
        (
            ["inspect", str(source)],
            ["inspect", str(source), "--json", "--tensors"],
            ["inspect", str(source), "--tree"],
            ["plan", str(source), "--quant", kind],
            ["plan", str(source), "--json", "--target-bpw", "5"],
            ["import", str(source), "m", "--quant", kind, "--store", store],
            ["import", str(source), "m", "--store", store, "--experts", "stacked"],
        )
    )


def one_file(choices: Choices, folder: Path) -> Line:
    """A single file."""
    path = _safetensors(choices, folder / "model.safetensors")
    if choices.random() < 0.3:
        verb = choices.choice((["get"], ["set"], ["rm"]))
        keys = {"get": [], "set": ["a", "b" * log(choices, 1, 10_000)], "rm": ["format"]}[verb[0]]
        return ["metadata", *verb, str(path), *keys]
    return _reading(choices, path, folder)


def linked_shards(choices: Choices, folder: Path) -> Line:
    """Many names of one file: shards of an index, shards without one, or files that are none."""
    source = folder / "model"
    count = log(choices, 2, 4000)
    first = _safetensors(choices, source / f"model-00001-of-{count:05}.safetensors", 400_000)
    patterns: tuple[Callable[[int], str], ...] = (
        lambda n: f"model-{n:05}-of-{count:05}.safetensors",
        lambda n: f"other-{n}.safetensors",
        lambda n: f"{n}/model.safetensors",
    )
    names = choices.choice(patterns)
    _link(first, [source / names(number) for number in range(1, count + 1)])
    if choices.random() < 0.5:
        weights = times(
            lambda n: f'"{n:x}":"{names(n % count + 1)}"', log(choices, 1, 20_000), 300_000
        )
        _file(source / "model.safetensors.index.json", f'{{"weight_map":{{{weights}}}}}'.encode())
    if choices.random() < 0.7:
        _file(
            source / "config.json", b'{"architectures":["LlamaForCausalLM"],"model_type":"llama"}'
        )
    return _reading(choices, source, folder)


def documents(choices: Choices, folder: Path) -> Line:
    """A small checkpoint with odd documents: many shapes, many names of one, holes."""
    source = folder / "model"
    text = b'{"model.embed_tokens.weight":{"dtype":"BF16","shape":[64,64],"data_offsets":[0,8192]}}'
    _file(source / "model.safetensors", struct.pack("<Q", len(text)) + text, 8 + len(text) + 8192)
    for name in choices.sample(_DOCUMENTS, choices.randint(1, 3)):
        _file(
            source / name,
            document(choices, MOST_TEXT // 4),
            choices.choice((None, None, log(choices, 1, 2**40))),
        )
    if choices.random() < 0.5:
        one = _file(
            source / "one.json",
            document(choices, 200_000),
            choices.choice((None, 2**20, 255 * 2**20)),
        )
        suffix = choices.choice((".json", ".txt", ".jinja", ".tiktoken"))
        _link(one, [source / f"{number}{suffix}" for number in range(log(choices, 1, 4000))])
    if not (source / "config.json").exists():
        _file(
            source / "config.json", b'{"architectures":["LlamaForCausalLM"],"model_type":"llama"}'
        )
    return _reading(choices, source, folder)


def nested(choices: Choices, folder: Path) -> Line:
    """Folders in folders, of a checkpoint or of a store."""
    depth = log(choices, 1, 900) if choices.random() < 0.8 else 1800
    if choices.random() < 0.3:
        documents(choices, folder)
        _deep(folder / "model", depth)
        return _reading(choices, folder / "model", folder)
    line = store(choices, folder)
    below = choices.choice(
        (
            "manifests",
            "manifests-v2",
            "blobs",
            ".blobstore/tmp",
            ".blobstore/copies",
            ".blobstore/trash",
        )
    )
    _deep(folder / "store" / below, depth)
    return line


def _deep(folder: Path, depth: int) -> None:
    """Make folders so deep that their path is longer than the system allows."""
    folder.mkdir(parents=True, exist_ok=True)
    at = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=at)  # a Path has no dir_fd
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


# Stores


def _descriptor(choices: Choices, number: int, sizes: list[int]) -> str:
    index = number % len(sizes)
    media = choices.choice((_TENSOR, _TENSOR, _TENSOR, _JSON, _FILE, _LICENSE))
    return json.dumps(
        {
            "mediaType": media,
            "digest": _DIGEST.format(index),
            "size": sizes[index],
            "name": f"{number:x}.weight",
        },
        separators=(",", ":"),
    )


def _fill(choices: Choices, root: Path) -> None:
    """Make a store: blobs and manifests, one of each with many names."""
    sizes = []
    first = None
    most = 300_000 // choices.choice((1, 4, 16))
    for index in range(log(choices, 1, 3000)):
        path = root / "blobs" / _DIGEST.format(index).replace(":", "-")
        if first is None or (index < 3 and choices.random() < 0.5):
            maker = choices.choice((_blob_of_tensors, _blob_of_text))
            first = maker(choices, path, most)
        else:
            _link(first, [path])
        sizes.append(path.stat().st_size)
    layers = times(lambda n: _descriptor(choices, n, sizes), log(choices, 1, 4000), 300_000)
    config = _descriptor(choices, 0, sizes)
    text = f'{{"schemaVersion":2,"mediaType":"x","config":{config},"layers":[{layers}]}}'.encode()
    if choices.random() < 0.1:
        text = document(choices, 300_000)
    manifests = root / "manifests/registry.ollama.ai/library"
    one = _file(
        manifests / "m/latest", text, choices.choice((None, None, None, None, 2**26, 2**40))
    )
    _link(one, [manifests / f"m/{number}" for number in range(log(choices, 1, 3000))])
    if choices.random() < 0.2:
        newer = root / "manifests-v2/ollama.com/library"
        if choices.random() < 0.3:
            text = b'{"manifests":[%s]}' % text
        _link(
            _file(newer / "n/latest", text),
            [newer / f"n/{number}" for number in range(log(choices, 1, 3000))],
        )


def _blob_of_tensors(choices: Choices, path: Path, most: int) -> Path:
    text, size = header(choices, most)
    return _file(path, struct.pack("<Q", len(text)) + text, 8 + len(text) + size)


def _blob_of_text(choices: Choices, path: Path, most: int) -> Path:
    return _file(path, document(choices, most))


def store(choices: Choices, folder: Path) -> Line:
    """A store that somebody else made."""
    root = folder / "store"
    _fill(choices, root)
    line = choices.choice(
        (
            ["list"], ["list", "--json"], ["show", "m"], ["show", "m", "--tensors", "--json"],
            ["show", "m", "--coverage"],
            ["inspect", "m"], ["inspect", "m", "--tensors"], ["verify"], ["verify", "--json"],
            ["verify", "--quick"], ["du"], ["du", "m"],
            ["prune", "--dry-run"], ["prune", "--grace", "0s", "--sole-owner"], ["rm", "m"], ["cp",
            "m", "n"],
            ["mv", "m", "n"], ["diff", "m", "m:0"], ["export", "m", str(folder / "out")],
            ["export", "m", str(folder / "out"), "--dequantize", "bfloat16"],
        )
    )  # fmt: skip
    return [*line, "--store", str(root)]


def own_files(choices: Choices, folder: Path) -> Line:
    """A store in which somebody wrote what only we write."""
    line = store(choices, folder)
    private = folder / "store/.blobstore"
    size = choices.choice((None, None, 2**30, 2**40))
    lines = "\n".join(f"{n:064x} {n:064x} {n} 1 1 -" for n in range(log(choices, 1, 4000))).encode()
    for _ in range(choices.randint(1, 3)):
        place = choices.choice(
            (
                "hints/journal", "hints/summaries", "lock", "names",
                f"copies/registry.ollama.ai/library/m/latest/{0:064x}",
                f"trash/{0:016x}/sha256-{0:064x}-5",
                f"tmp/1-{0:016x}/sha256-{0:064x}", f"tmp/1-{0:016x}/manifest",
            )
        )  # fmt: skip
        text = choices.choice(
            (lines, b"\n" * len(lines), b"x" * len(lines), lines.replace(b"\n", b" "))
        )
        if not (private / place).exists():
            made = _file(private / place, text, size)
            _link(made, [made.with_name(f"{n:064x}") for n in range(log(choices, 1, 1000))])
    if choices.random() < 0.4:
        text = (
            b'{"model.embed_tokens.weight":{"dtype":"BF16","shape":[64,64],"data_offsets":[0,'
            b"8192]}}"
        )
        source = _file(
            folder / "model.safetensors", struct.pack("<Q", len(text)) + text, 8 + len(text) + 8192
        )
        return ["import", str(source), "new", "--store", str(folder / "store")]
    return line


# What a user gives beside a checkpoint


def instructions(choices: Choices, folder: Path) -> Line:
    """A Modelfile, a policy, importances or rules, for a small model."""
    count = log(choices, 1, 5000)
    text = times(
        lambda n: (
            f'"model.layers.{n}.up.weight":{{"dtype":"BF16","shape":[0,64],"data_offsets":[0,0]}}'
        ),
        count,
    )
    source = _file(
        folder / "model.safetensors", struct.pack("<Q", len(text) + 2) + f"{{{text}}}".encode()
    )
    many = log(choices, 1, 12_000)
    glob = choices.choice(
        ("*a*a*a*a*b", "*[a-z]*{}*", "model.*.{}.*", "*" * 30 + "{}", "?" * 60 + "*{}")
    )
    if choices.random() < 0.4:
        rules = times(lambda n: json.dumps(glob.replace("{}", str(n)) + "=int8"), many, 300_000)
        policy = _file(folder / "policy.json", f'{{"quant":"int4","rules":[{rules}]}}'.encode())
        return ["plan", str(source), "--policy", str(policy)]
    if choices.random() < 0.3:
        policy = _file(folder / "policy.toml", _toml(choices, many))
        return ["plan", str(source), "--policy", str(policy)]
    if choices.random() < 0.3:
        importance = _safetensors(choices, folder / "importance.safetensors", 300_000)
        return [
            "plan",
            str(source),
            "--quant",
            "int4",
            "--method",
            "search",
            "--importance",
            str(importance),
        ]
    words = choices.choice(
        (
            "PARAMETER stop x{}",
            "MESSAGE user x{}",
            "LICENSE x{}",
            "# {}",
            'SYSTEM """',
            "ADAPTER {}",
            "{}",
        )
    )
    lines = "\n".join(words.replace("{}", str(n)) for n in range(many))[:300_000]
    modelfile = _file(
        folder / "Modelfile",
        f"FROM {source}\n{lines}\n".encode(),
        choices.choice((None, None, 2**40)),
    )
    return ["import", "--modelfile", str(modelfile), "m", "--store", str(folder / "store")]


def _toml(choices: Choices, count: int) -> bytes:
    text = choices.choice(
        (
            lambda: "[" + ".".join("a" for _ in range(count)) + "]",
            lambda: "rules = [" + times(lambda n: f'"{n}*=int4"', count, 300_000) + "]",
            lambda: "rules = " + "[" * count + "]" * count,
            lambda: "\n".join(f"a{n} = 1" for n in range(count)),
            lambda: "x = " + "9" * count,
            lambda: "x = " + "{a=" * count + "1" + "}" * count,
        )
    )()
    return text[:300_000].encode()


def addresses(choices: Choices, _: Path) -> Line:
    """A checkpoint on the server of small_replies.py, whose port is in `SERVER`."""
    folder = f"http://127.0.0.1:{os.environ[SERVER]}/{choices.getrandbits(32)}/"
    name = choices.choice(
        (
            "",
            "",
            "",
            "",
            "model.safetensors",
            "model.safetensors.index.json",
            "model.safetensors?download=true",
        )
    )
    return ["inspect", folder + name, *choices.choice(((), ("--tensors", "--json"), ("--tree",)))]


FAMILIES = (
    one_file,
    one_file,
    linked_shards,
    documents,
    nested,
    store,
    store,
    own_files,
    instructions,
    addresses,
)
