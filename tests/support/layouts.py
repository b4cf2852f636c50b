"""Layouts: folders of checkpoints as they are published, each with other files beside its weights.

The weights are tiny and written by the safetensors library; the files have the names and places of
real ones.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from support.checkpoints import LLAMA_CONFIG, normal

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}\n"
BINARY = bytes(range(256)) * 5 + b"\n\r\n\0"
"""Bytes that no text is."""


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def write(folder: Path, files: Mapping[str, bytes | str | dict[str, Any] | list[Any]]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=2) if isinstance(content, dict | list) else content
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def save(path: Path, *names: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: normal(name, 32, 64, dtype=np.float32) for name in names}
    save_file(weights, path, metadata={"format": "pt"})


def model(folder: Path, config: Mapping[str, Any] | None = None) -> Path:
    names = ("lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight")
    save(folder / "model.safetensors", *names)
    documents = {"config.json": dict(config or LLAMA_CONFIG)}
    return write(folder, documents | {"generation_config.json": {"eos_token_id": [7, 9]}})


def instruct(folder: Path) -> Path:
    tokenizer = {"tokenizer_config.json": {"eos_token": "</s>"}}
    return write(model(folder), {"chat_template.jinja": TEMPLATE, **tokenizer})


def sentencepiece(folder: Path) -> Path:
    """Write a model with a SentencePiece tokenizer, in shards with transformers' index."""
    one, two = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    save(folder / one, "model.embed_tokens.weight")
    save(folder / two, "lm_head.weight", "model.norm.weight")
    places = {"lm_head.weight": two, "model.embed_tokens.weight": one, "model.norm.weight": two}
    metadata = {"total_parameters": 6144, "total_size": 24576}
    index = json.dumps({"metadata": metadata, "weight_map": places}, indent=2) + "\n"
    return write(
        folder,
        {
            "config.json": LLAMA_CONFIG,
            "model.safetensors.index.json": index,
            "tokenizer.model": BINARY,
            "added_tokens.json": {"<pad>": 32000},
        },
    )


def tokenizers(folder: Path) -> Path:
    """Write a model with templates, and files of byte-level BPE, tiktoken and Mistral."""
    return write(
        instruct(folder),
        {
            "chat_templates/tool_use.jinja": TEMPLATE * 2,
            "chat_templates/rag.jinja": "{}",
            "vocab.json": {"a": 0},
            "merges.txt": "#version: 0.2\na b\n",
            "vocab.txt": "[UNK]\r\na\r\n",  # as WordPiece has it
            "qwen.tiktoken": "IQ== 0\nIg== 1\n",
            "tokenization_qwen.py": "raise SystemExit('run')\n",
            "__init__.py": b"",
            "tokenizer.model.v3": BINARY,
            "audio/config.json": {"size": 224},
        },
    )


def sentence_transformer(folder: Path) -> Path:
    """Write an encoder with modules in folders of their own, one of them with weights."""
    save(folder / "2_Dense" / "model.safetensors", "linear.weight", "linear.bias")
    return write(
        model(folder, {"architectures": ["BertModel"], "model_type": "bert"}),
        {
            "modules.json": [{"idx": 0, "path": ""}, {"idx": 1, "path": "2_Dense"}],
            "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
            "vocab.txt": "[PAD]\n",
            "2_Dense/config.json": {"in_features": 64},
            ".gitattributes": "*.safetensors filter=lfs\n",
        },
    )


def with_draft(folder: Path) -> Path:
    """Write a model with a draft model in a folder of it, each with a template and a tokenizer."""
    save(folder / "draft" / "model.safetensors", "fc.weight")
    return write(
        instruct(folder),
        {
            "draft/config.json": {"architectures": ["EagleModel"], "model_type": "eagle"},
            "draft/tokenizer.model": BINARY,
            "draft/chat_templates/a.jinja": TEMPLATE,
        },
    )


def documented(folder: Path) -> Path:
    return write(
        model(folder),
        {
            "README.md": "# ä\n",
            "NOTICE.txt": "",
            "assets/figure.png": BINARY,
            "Modelfile": "FROM .\n",
            "docs/blobstore.json": "{}",
            "docs/model.safetensors.index.json": "no JSON",
        },
    )


LAYOUTS: tuple[Callable[[Path], Path], ...] = (
    *(sentencepiece, tokenizers, sentence_transformer, with_draft, documented),
)
