"""Manifests, and what is left of them after a few random changes. All follows from a seed."""

from __future__ import annotations

import json
from random import Random
from typing import Any

HEX = "0123456789abcdef" * 4
NAMES = ("config.json", "model.layers.0.mlp.weight", "ä.weight", "a\nb", "😀", "</x>&", "")
_WORDS = (
    rb'{ } [ ] : , " \ null true NaN -Infinity -0 1e3 1e999 01 1.0 281474976710656 281474976710657'
    rb" 99999999999999999999 {} [] [{}] \u006c \ud83d \ud83d\ude00 \x"
    rb' "layers" "layers":[], "l\u0061yers" "layers":{} "manifests":[], "schemaVersion":2,'
    rb' "schemaVersion":true "mediaType" "size":1, "name":null "name":1 "from":"a", "digest"'
    rb' sha256: "annotations":{"a":"b"}, "config":null, "x":{"a":1,"a":2}, "x":[1,{"layers":[]}],'
)
_BYTES = (b" ", b"\n", b"\t\r", b"\x0b", b"\x00", b"\x1f", b"\xff", b"\xc3\xa4", b"\xef\xbb\xbf")
TOKENS = (*_WORDS.split(), *_BYTES, b'"x":' + b"[" * 70 + b"]" * 70 + b",")


def layer(random: Random) -> dict[str, Any]:
    """Return a sound layer."""
    found: dict[str, Any] = {
        "mediaType": random.choices(["m", "ä" * 255, "é" * 256], [20, 2, 1])[0],
        "digest": "sha256:" + "".join(random.sample(HEX, 64)),
        "size": random.choices([5, 0, 2**48, 2**63], [20, 2, 2, 1])[0],
    }
    for key in ("from", "name"):
        if random.random() < 0.5:
            found[key] = random.choice([*NAMES, None])
    keys = list(found)
    random.shuffle(keys)
    return {key: found[key] for key in keys}


def manifest(random: Random) -> bytes:
    """Return a manifest of up to three layers, which few of the rules refuse."""
    document: dict[str, Any] = {"schemaVersion": 2, "mediaType": "z"}
    if random.random() < 0.7:
        document["config"] = layer(random)
    if random.random() < 0.3:
        document["annotations"] = {"layers": [1, '"layers":['], "a": -0.0}
    document["layers"] = [layer(random) for _ in range(random.randrange(4))]
    keys = list(document)
    random.shuffle(keys)
    separators = random.choice([(",", ":"), (", ", ": "), (" ,\n", " :\t")])
    text = json.dumps(
        {key: document[key] for key in keys},
        separators=separators,
        ensure_ascii=random.random() < 0.5,
    )
    return (random.choice(["", " ", "\n"]) + text + random.choice(["", "\n"])).encode()


def damaged(random: Random) -> bytes:
    """Return a manifest with up to three changes."""
    raw = manifest(random)
    for _ in range(random.randrange(4)):
        start = random.randrange(len(raw) + 1)
        end = start if random.random() < 0.5 else start + random.randrange(1, 12)
        new = random.choice([b"", random.choice(TOKENS), raw[start : start + 40]])
        raw = raw[:start] + new + raw[end:]
    return raw
