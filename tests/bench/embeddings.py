"""The cost of quantizing a sentence encoder: `python tests/bench/embeddings.py`.

The encoder (extra `bench`, as in search.py) embeds paragraphs of Python's own documentation with
its 2-D weights, without embeddings, quantized from BF16 and dequantized; shown is the cosine to the
embedding with the weights in BF16.
"""

from __future__ import annotations

import os
import pydoc_data.topics
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from search import CASES, encoder_path
from tables import show, table
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel

from blobstore import kernels

PARAGRAPHS = 256
LENGTH = 128


def paragraphs() -> list[str]:
    """Return prose: paragraphs of the topics in order, of 80 to 400 characters."""
    texts = (
        part
        for _, topic in sorted(pydoc_data.topics.topics.items())
        for part in topic.split("\n\n")
    )
    prose = [
        " ".join(text.split()) for text in texts if 80 <= len(text) <= 400 and text[0].isupper()
    ]
    return prose[:PARAGRAPHS]


def embeddings(model: Any, tokens: dict[str, Any]) -> Any:
    """Return unit vectors: the mean over a paragraph's tokens, as the encoder's own pooling."""
    with torch.inference_mode():
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def tokenized(folder: Path, texts: list[str]) -> dict[str, Any]:
    """Return the model's inputs for texts."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    encoded = tokenizer.encode_batch(texts)
    return {
        "input_ids": torch.tensor([one.ids for one in encoded]),
        "attention_mask": torch.tensor([one.attention_mask for one in encoded]),
    }


def main() -> None:
    """Print the table."""
    from safetensors.numpy import load_file

    path = encoder_path()
    state = {
        name: torch.from_numpy(array)
        for name, array in load_file(path).items()
        if name != "embeddings.position_ids"
    }
    model = BertModel(BertConfig.from_json_file(str(path.parent / "config.json"))).eval()
    tokens = tokenized(path.parent, paragraphs())
    weights = {
        name
        for name, tensor in state.items()
        if tensor.ndim == 2 and "embed" not in name and "pooler" not in name
    }
    rounded = {name: state[name].numpy().astype(ml_dtypes.bfloat16) for name in weights}
    as_stored = {
        name: torch.from_numpy(array.astype(np.float32)) for name, array in rounded.items()
    }
    model.load_state_dict(state | as_stored)
    expected = embeddings(model, tokens)
    table("type", "minmax, mean", "minmax, least", "search, mean", "search, least")
    for quant_type, group_size in CASES:
        cells = []
        for method in ("minmax", "search"):
            quantized = {
                name: kernels.dequantize(
                    kernels.quantize(array, quant_type, group_size=group_size, method=method)
                )
                for name, array in rounded.items()
            }
            model.load_state_dict(
                state | {name: torch.from_numpy(array) for name, array in quantized.items()}
            )
            cosines = (embeddings(model, tokens) * expected).sum(-1)
            cells += [f"{cosines.mean():.5f}", f"{cosines.min():.5f}"]
        show((f"{quant_type}/{group_size}", *cells))


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main()
