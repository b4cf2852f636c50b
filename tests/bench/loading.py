"""Loading a mixture of experts for mlx-lm: packed, stacked, and as an exported folder.

`python tests/bench/loading.py [--layers N] [--experts N] [--rounds N]` makes a Qwen3-like mixture,
imports it as int4 in both forms, and prints a Markdown table: seconds from the stored bytes to an
evaluated network in a process that has imported mlx-lm already, and the largest anonymous memory
meanwhile. The page cache is warm; the best of the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from search import show, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import PYCODE_MOE
from support.checkpoints import normal, safetensors_bytes

import blobstore
from blobstore.names import ModelName

MB = 1e6
CHILD = """
import os, sys, threading, time
from mlx_lm import utils
import mlx.core as mx
import blobstore.mlx_lm
sys.path.insert(0, sys.argv[4])
from import_processes import MemoryPeak

peak, done = MemoryPeak(), threading.Event()
def watch():
    while not done.wait(0.002):
        peak(os.getpid())
watcher = threading.Thread(target=watch)
peak(os.getpid())
before = peak.anonymous
watcher.start()
start = time.perf_counter()
if sys.argv[1] == "ours":
    network = blobstore.mlx_lm.load_network(sys.argv[2], store=blobstore.open_store(sys.argv[3]))
else:
    from pathlib import Path
    network, _ = utils.load_model(Path(sys.argv[2]))
    mx.eval(network.parameters())
seconds = time.perf_counter() - start
done.set(); watcher.join()
print(seconds, peak.anonymous - before)
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    table("model", "read by", "stored, MB", "seconds", "anonymous memory, MB", "of what is stored")
    with tempfile.TemporaryDirectory(prefix="blobstore-loading-") as folder:
        work = Path(folder)
        measure("pycode-moe-5m", PYCODE_MOE, work / "small", arguments.rounds)
        measure(
            "mixture",
            mixture(work / "source", arguments.layers, arguments.experts),
            work / "large",
            arguments.rounds,
        )


def mixture(folder: Path, layers: int, experts: int) -> Path:
    """Write a wide checkpoint of the small mixture's architecture, one file for each layer."""
    hidden, inner = 1024, 768
    config = json.loads((PYCODE_MOE / "config.json").read_text())
    config |= {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_experts": experts,
        "moe_intermediate_size": inner,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    heads = {
        key: config["head_dim"] * config[f"num_{name}_heads"]
        for key, name in (("q", "attention"), ("k", "key_value"))
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "lm_head.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    index: dict[str, str] = {}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.{norm}.weight": (hidden,)
            for norm in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {f"{prefix}.self_attn.{part}_norm.weight": (config["head_dim"],) for part in "qk"}
        shapes |= {
            f"{prefix}.self_attn.{part}_proj.weight": (heads["q" if part == "q" else "k"], hidden)
            for part in "qkv"
        }
        shapes |= {
            f"{prefix}.self_attn.o_proj.weight": (hidden, heads["q"]),
            f"{prefix}.mlp.gate.weight": (experts, hidden),
        }
        for expert in range(experts):
            projections = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
            shapes |= {
                f"{prefix}.mlp.experts.{expert}.{name}_proj.weight": shape
                for name, shape in projections.items()
            }
        name = f"model-{layer + 1:05}-of-{layers:05}.safetensors"
        (folder / name).write_bytes(
            safetensors_bytes({one: normal(one, *shape) for one, shape in shapes.items()})
        )
        index |= dict.fromkeys(shapes, name)
        shapes = {}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    return folder


def measure(what: str, source: Path, work: Path, rounds: int) -> None:
    """Print the rows of one checkpoint."""
    store = blobstore.open_store(work / "store")
    for form in ("packed", "stacked"):
        blobstore.import_model(source, f"m:{form}", store=store, quant="int4", experts=form)
    blobstore.export_model("m:packed", work / "exported", store=store, format="mlx")
    for form in ("packed", "stacked"):
        size = store.manifest(ModelName.parse(f"m:{form}")).size
        row((what, f"blobstore, {form}"), size, ("ours", f"m:{form}", str(work / "store")), rounds)
    size = sum(path.stat().st_size for path in (work / "exported").iterdir())
    row(
        (what, "`mlx_lm.utils.load_model` of the exported folder"),
        size,
        ("theirs", str(work / "exported"), ""),
        rounds,
    )


def row(head: tuple[str, str], size: int, arguments: tuple[str, str, str], rounds: int) -> None:
    """Print one row: the best of the rounds."""
    found = []
    for _ in range(rounds):
        line = [sys.executable, "-c", CHILD, *arguments, str(Path(__file__).parent)]
        seconds, memory = subprocess.run(
            line, capture_output=True, text=True, check=True
        ).stdout.split()
        found.append((float(seconds), int(memory)))
    seconds, memory = (min(values) for values in zip(*found, strict=True))
    show(
        (*head, f"{size / MB:.1f}", f"{seconds:.3f}", f"{memory / MB:.0f}", f"{memory / size:.2f}")
    )


if __name__ == "__main__":
    main()
