"""Loading models for mlx-lm from a store, and from an exported folder as mlx-lm does.

`python tests/bench/loading.py [--layers N] [--experts N] [--dense GB] [--rounds N]` makes a
Qwen3-like mixture and a dense model with a tokenizer, imports them as int4, and prints a Markdown
table: seconds from the stored bytes to an evaluated network (of the dense model: and its tokenizer)
in a process that has imported mlx-lm already, wall-clock and processor time, and the largest
anonymous memory meanwhile. The import of blobstore is counted, and also shown alone. The page cache
is warm; the best of the rounds counts, which take the programs in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import import_sources
from tables import show, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import PYCODE_MOE
from support.checkpoints import normal, safetensors_bytes

import blobstore
from blobstore.names import ModelName

MB = 1e6
CHILD = """
import os, sys, threading, time
import mlx_lm
import mlx.core as mx
from pathlib import Path
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
whole = sys.argv[5] == "tokenizer"
start, used = time.perf_counter(), time.process_time()
if sys.argv[1] == "ours":
    import blobstore.mlx_lm
    imported = time.perf_counter() - start
    load = blobstore.mlx_lm.load if whole else blobstore.mlx_lm.load_network
    loaded = load(sys.argv[2], store=blobstore.open_store(sys.argv[3]))
else:
    imported = 0
    loaded = mlx_lm.load(sys.argv[2]) if whole else mlx_lm.utils.load_model(Path(sys.argv[2]))
seconds, used = time.perf_counter() - start, time.process_time() - used
done.set(); watcher.join()
print(seconds, used, imported, peak.anonymous - before)
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--dense", type=float, default=1.88, help="GB of BF16")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    table(
        *("model", "read by", "stored, MB", "seconds", "ratio", "processor seconds", "ratio"),
        *("import of blobstore, s", "anonymous memory, MB", "ratio"),
    )
    with tempfile.TemporaryDirectory(prefix="blobstore-loading-") as folder:
        work = Path(folder)
        measure("pycode-moe-5m", PYCODE_MOE, work / "small", arguments.rounds)
        measure(
            "mixture",
            mixture(work / "source", arguments.layers, arguments.experts),
            work / "large",
            arguments.rounds,
        )
        measure("dense", dense(work / "dense", arguments.dense), work / "wide", arguments.rounds)


def dense(folder: Path, size_gb: float) -> Path:
    """Write a dense Qwen3-like checkpoint with a tokenizer, of at least that size."""
    folder.mkdir()
    shapes = import_sources.dense_shapes(size_gb * 1e9)
    import_sources.write_folder(folder, import_sources.DENSE, shapes, import_sources.Weights())
    return folder


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
    has_experts = "num_experts" in json.loads((source / "config.json").read_text())
    whole = "tokenizer" if what == "dense" else "network"
    programs = {}
    for form in ("packed", "stacked") if has_experts else ("packed",):
        blobstore.import_model(
            source, f"m:{form}", store=store, quant="int4", group_size=64, experts=form
        )
        size = store.manifest(ModelName.parse(f"m:{form}")).size
        name = f"blobstore, {form}" if has_experts else "`blobstore.mlx_lm.load`"
        programs[name] = (size, ("ours", f"m:{form}", str(work / "store")))
    blobstore.export_model("m:packed", work / "exported", store=store, format="mlx")
    size = sum(path.stat().st_size for path in (work / "exported").iterdir())
    name = "`mlx_lm.utils.load_model`" if has_experts else "`mlx_lm.load`"
    programs[f"{name} of the exported folder"] = (size, ("theirs", str(work / "exported"), ""))
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, (_, arguments) in programs.items():
            found[name].append(loaded(*arguments, whole))
    best = {name: [min(each) for each in zip(*runs, strict=True)] for name, runs in found.items()}
    theirs = best[name]
    for name, (seconds, used, imported, memory) in best.items():
        ratios = [f"{mine / its:.2f}" for mine, its in zip(best[name], theirs, strict=True) if its]
        show(
            (
                *(what, name, f"{programs[name][0] / MB:.1f}", f"{seconds:.3f}", ratios[0]),
                *(f"{used:.3f}", ratios[1], f"{imported:.3f}", f"{memory / MB:.0f}", ratios[2]),
            )
        )


def loaded(program: str, model: str, store: str, whole: str) -> tuple[float, ...]:
    """Load a model in a process of its own.

    Return its seconds, wall-clock and of the processor, those of the import of blobstore, and the
    bytes of memory.
    """
    line = [sys.executable, "-c", CHILD, program, model, store, str(Path(__file__).parent), whole]
    # As an installed package has them, its modules are compiled once, in the first round.
    environment = {key: os.environ[key] for key in os.environ.keys() - {"PYTHONDONTWRITEBYTECODE"}}
    printed = subprocess.run(
        line, capture_output=True, text=True, check=True, env=environment
    ).stdout
    return tuple(map(float, printed.split()))


if __name__ == "__main__":
    main()
