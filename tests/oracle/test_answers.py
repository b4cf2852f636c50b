"""Answers of `serve --lm` are those of ``mlx_lm.server``: the same prompts, parameters, seeds."""

import atexit
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import PYCODE
from support.patient import serving
from support.ports import free_port
from support.talking import that_chats

import blobstore
from blobstore.store.local.store import Store

pytestmark = pytest.mark.lab

PROMPT = "def read_file(path):"
TOKENS = 12
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "seed": 7},
    "narrow": {"temperature": 1.1, "top_p": 0.7, "top_k": 9, "min_p": 0.02, "seed": 11},
}


@contextmanager
def served_by_mlx_lm(folder: Path) -> Iterator[str]:
    port = free_port()
    line = [sys.executable, "-m", "mlx_lm", "server", "--model", str(folder), "--port", str(port)]
    environment = {**os.environ, "HF_HUB_CACHE": str(folder), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            assert any("Starting httpd" in logged for logged in process.stderr)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.kill()


@functools.cache
def client(address: str) -> Any:
    import openai  # of the extra `lab`

    made = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=600)
    atexit.register(made.close)
    return made


def said(server: Any, model: str, way: dict[str, Any], how: str) -> str:
    extra = {key: way[key] for key in ("top_k", "min_p") if key in way}
    plain = {key: value for key, value in way.items() if key not in extra}
    options: dict[str, Any] = {"model": model, "max_tokens": TOKENS, "extra_body": extra, **plain}
    if how == "text":
        return str(server.completions.create(prompt=PROMPT, **options).choices[0].text)
    messages = [{"role": "system", "content": "Write."}, {"role": "user", "content": PROMPT}]
    if how == "chat":
        answer = server.chat.completions.create(messages=messages, **options)
        return str(answer.choices[0].message.content)
    pieces = server.chat.completions.create(messages=messages, stream=True, **options)
    return "".join(one.choices[0].delta.content or "" for one in pieces)


def test_serve_gives_what_mlx_lm_server_gives_until_sigterm(store: Store, tmp_path: Path) -> None:
    checkpoint = that_chats(tmp_path / "source", PYCODE)
    blobstore.import_model(checkpoint, "m", store=store, quant="int4")
    blobstore.export_model("m", tmp_path / "out", store=store, format="mlx")
    asked = [("sampled", "text"), ("narrow", "chat"), ("greedy", "streamed")]
    with serving("--lm", "m", "--store", str(store.root)) as server:
        address = f"http://{server.host}/v1"
        ours = [said(client(address), "m:latest", WAYS[way], how) for way, how in asked]
        stream = client(address).completions.create(
            model="m", prompt="import", max_tokens=64, temperature=1.0, stream=True
        )
        next(iter(stream))
        server.process.send_signal(signal.SIGTERM)  # it ends the answer too
        assert server.process.wait(240) == 0
    with served_by_mlx_lm(tmp_path / "out") as address:
        theirs = [said(client(address), "default_model", WAYS[way], how) for way, how in asked]
    assert ours == theirs
    assert min(map(len, ours)) > 5
