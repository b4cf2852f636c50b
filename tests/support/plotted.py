"""Specifications of every plot, with everyday, empty and hostile values."""

import random

from blobstore.inspection.quality import Histogram, ValueDistribution
from blobstore.names import ModelName
from blobstore.plots import charts
from blobstore.plots.specification import Specification
from blobstore.plots.treemap import treemap
from blobstore.store.care.usage import ModelUsage

HOSTILE = "<img src=x onerror=alert(1)>'\"`</script><!--\n\u202e\\{{}}"


def layer_errors(layers: int, name: str = "model.layers") -> list[charts.TensorError]:
    """Return errors of three projections in each layer, of a head, and a norm that was kept."""
    values = random.Random(3)
    found = [
        charts.TensorError(
            f"{name}.{layer}.{part}.weight", kind, (64, 2**power), values.random() / 10
        )
        for layer in range(layers)
        for part, kind, power in (("q_proj", "int4", 6), ("up", "nvfp4", 8), ("down", "int8", 9))
    ]
    found.append(charts.TensorError("lm_head.weight", "int8", (64, 4096), 0.01))
    return [*found, charts.TensorError("model.norm.weight", "BF16", (64,), 0.0, kept=True)]


_USAGES = [
    ModelUsage(ModelName.parse("tiny:int4"), 1000, 100, 900),
    ModelUsage(ModelName.parse("b"), 900, 0, 900),
]


def found_distribution(name: str = "a.weight") -> ValueDistribution:
    codes, numbers = tuple(range(1, 17)), tuple(map(float, range(16)))
    values = Histogram(-1, 1, (1, 5, 9, 5, 1), 0, 0, 0.5)
    return ValueDistribution(name, "int4/64", (4, 64), 272, 136, values, values, codes, numbers)


_TENSORS = [
    (f"model.layers.{n}.{part}.weight", kind, size)
    for n in range(4)
    for part, kind, size in (("up", "int4/64", 2048), ("norm", "BF16", 128))
]
_MODELS = [
    charts.ModelPoint(f"tiny:{kind}", kind, nbytes, error)
    for kind, nbytes, error in (("int4", 300, 0.1), ("mxfp4", 290, 0.2), ("int8", 500, 0.01))
]
_EMPTY = ValueDistribution("a", "BF16", (0,), 0, 0, Histogram(0, 0, (), 0, 0, 0.0))

SPECIFICATIONS: dict[str, Specification] = {
    "treemap": treemap(_TENSORS),
    "errors": charts.errors(layer_errors(5)),
    "scatter": charts.scatter(layer_errors(5)),
    "frontier": charts.frontier(_MODELS),
    "shared": charts.unique_and_shared(_USAGES),
    "distribution": charts.distribution(found_distribution()),
    "distribution of equal values": charts.distribution(
        ValueDistribution("a", "BF16", (4,), 4, 4, Histogram(0.5, 0.5, (4,), 0, 0, 0.5))
    ),
    "empty treemap": treemap([]),
    "empty errors": charts.errors([charts.TensorError("a", "BF16", (2,), 0.0, kept=True)]),
    "empty scatter": charts.scatter([]),
    "empty frontier": charts.frontier([]),
    "empty shared": charts.unique_and_shared([]),
    "empty distribution": charts.distribution(_EMPTY),
    "hostile treemap": treemap([(HOSTILE, HOSTILE, 4)]),
    "hostile errors": charts.errors(layer_errors(2, HOSTILE)),
    "hostile scatter": charts.scatter(layer_errors(2, HOSTILE)),
    "hostile frontier": charts.frontier([charts.ModelPoint(HOSTILE, HOSTILE, 3, 0.1)]),
    "hostile distribution": charts.distribution(found_distribution(HOSTILE)),
}
