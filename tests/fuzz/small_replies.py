"""Small replies that ask for much: what a server sends for bounds.py, at most 10 MB an input.

What makes them large is what costs a server little: compressed or tiny pieces, redirects, one reply
under many names, silence. Everything follows from the number that an address contains.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import random
import struct
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain, repeat
from multiprocessing.connection import Connection

from small_inputs import Choices, document, header, log, times
from support.servers import WAIT, Answer, Asked, Server, files, head, part, redirect, reply

MOST_SENT = 10 * 10**6
_INDEX = "model.safetensors.index.json"
_PARENTS: list[Connection] = []
"""What the servers wait for the end of."""


def start() -> int:
    """Start a server in a process of its own, which ends with this one; return its port."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    spawn.Process(target=_serve, args=(theirs,), daemon=True).start()
    _PARENTS.append(ours)
    return int(ours.recv())


def _serve(parent: Connection) -> None:
    server = Server()
    server.play(lambda asked: _answer(int(asked.target.split("/")[1]))(asked))
    parent.send(server.port)
    parent.poll(None)  # until the parent is gone


@lru_cache(maxsize=4)
def _answer(number: int) -> Answer:
    choices = random.Random(number)
    table = _checkpoint(choices)
    plain = files({f"{number}/{name}": data for name, data in table.items()})
    manner = choices.choices(_MANNERS, [10, *[1] * (len(_MANNERS) - 2), 0.2])[0]
    spoiled = choices.choice([*table, _INDEX])

    def answer(asked: Asked) -> Iterable[bytes]:
        name = asked.target.split("/", 2)[2].partition("?")[0]
        return plain(asked) if name != spoiled else manner(asked, table.get(name, b""))

    return answer


def _checkpoint(choices: Choices) -> dict[str, bytes]:
    """Return the files of a checkpoint, by name."""
    most = log(choices, 1000, MOST_SENT // 2)
    files_of = choices.choice((_one_file, _whole_shards, _one_shard_of_many_names))
    return {"config.json": document(choices, log(choices, 1000, most)), **files_of(choices, most)}


def _one_file(choices: Choices, most: int) -> dict[str, bytes]:
    return {"model.safetensors": _shard(choices, most)}


def _whole_shards(choices: Choices, most: int) -> dict[str, bytes]:
    """Return shards that fit their index, of as many tensors as there is room for."""
    names = _shard_names(choices)
    each = max(1, most // 150 // len(names))
    entry = '"{}":{{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}}'
    texts = [
        f"{{{','.join(entry.format(f'{n}.{k}') for k in range(each))}}}".encode()
        for n in range(len(names))
    ]
    weights = {f"{n}.{k}": name for n, name in enumerate(names) for k in range(each)}
    shards = {
        name: struct.pack("<Q", len(text)) + text for name, text in zip(names, texts, strict=True)
    }
    return {_INDEX: json.dumps({"weight_map": weights}).encode(), **shards}


def _one_shard_of_many_names(choices: Choices, most: int) -> dict[str, bytes]:
    names = _shard_names(choices)
    keys = times(
        lambda n: f'"{n:x}.weight":{json.dumps(names[n % len(names)])}',
        log(choices, len(names), 100_000),
        most,
    )
    index = (
        f'{{"weight_map":{{{keys}}}}}'.encode()
        if choices.random() < 0.8
        else document(choices, most)
    )
    return {_INDEX: index, **dict.fromkeys(names, _shard(choices, max(1000, most // len(names))))}


def _shard_names(choices: Choices) -> list[str]:
    count = log(choices, 1, 10_000)
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _shard(choices: Choices, most: int) -> bytes:
    text, _ = header(choices, most)
    length = choices.choice((len(text), len(text), log(choices, 1, 100_000_000), 2**63))
    return struct.pack("<Q", length) + text


# The manners of a server


def _right(asked: Asked, data: bytes) -> Iterable[bytes]:
    return part(asked, data)


def _whole(_: Asked, data: bytes) -> Iterable[bytes]:
    return reply(200, body=data)


def _tiny_chunks(_: Asked, data: bytes) -> Iterable[bytes]:
    framed = b"".join(b"1\r\n%c\r\n" % byte for byte in data[: MOST_SENT // 6])
    return [head(200, "Transfer-Encoding: chunked") + framed + b"0\r\n\r\n"]


def _compressed(_: Asked, data: bytes) -> Iterable[bytes]:
    return reply(200, "Content-Encoding: gzip", body=gzip.compress(data + bytes(200 * 10**6), 1))


def _redirects(asked: Asked, _: bytes) -> Iterable[bytes]:
    return redirect(f"{asked.target.partition('?')[0]}?{asked.number}")


def _long_head(_: Asked, data: bytes) -> Iterable[bytes]:
    return reply(200, *(f"X-{number}: {number}" for number in range(200_000)), body=data[:1000])


def _many_heads(_: Asked, data: bytes) -> Iterable[bytes]:
    return chain(repeat(head(100), 100_000), reply(200, body=data[:1000]))


def _another_part(asked: Asked, data: bytes) -> Iterable[bytes]:
    return [
        head(
            206,
            f"Content-Range: bytes {asked.number}-{len(data)}/{2**62}",
            f"Content-Length: {len(data)}",
        )
        + data
    ]


def _too_little(_: Asked, data: bytes) -> Iterable[bytes]:
    return [head(200, f"Content-Length: {2**40}") + data]


def _errors(_: Asked, data: bytes) -> Iterable[bytes]:
    return reply(503, "Retry-After: 1000000", body=data)


def _slow(_: Asked, data: bytes) -> Iterable[bytes]:
    pieces = (data[at : at + 1] for at in range(len(data)))
    return chain(
        [head(200, f"Content-Length: {2**30}")],
        chain.from_iterable([piece, WAIT] for piece in pieces),
    )


_MANNERS = (
    *(
        _right,
        _whole,
        _tiny_chunks,
        _compressed,
        _redirects,
        _long_head,
        _many_heads,
        _another_part,
        _too_little,
        _errors,
    ),
    _slow,
)
