"""Error against size: the front, points that stand for many."""

from __future__ import annotations

import random

from support.plotted import layer_errors, model_bytes

from blobstore.plots.charts import MOST_POINTS, ModelPoint, TensorError, frontier, scatter, shared


def test_a_point_for_each_changed_tensor() -> None:
    spec = scatter(layer_errors(3))
    points = spec["data"][0]["values"]
    assert len(points) == 10
    assert points[0]["y"] == max(point["y"] for point in points)


def test_of_many_tensors_the_worst_are_drawn() -> None:
    values = random.Random(5)
    many = [
        TensorError(
            f"t.{n}",
            values.choice(["int4", "int8", "nvfp4"]),
            (n % 97 + 1, n % 89 + 1),
            values.random(),
        )
        for n in range(20_000)
    ]
    spec = scatter(many)
    points = spec["data"][0]["values"]
    assert len(points) == MOST_POINTS
    assert points[0]["y"] == max(one.relative_rmse or 0 for one in many)
    assert "The 1,500 worst are drawn." in spec["description"]


def test_the_front_has_the_models_that_none_beats() -> None:
    models = [
        ModelPoint("small", "int4", 10, 0.3),
        ModelPoint("beaten", "nvfp4", 12, 0.4),
        ModelPoint("twin", "int4", 10, 0.3),
        ModelPoint("large", "int8", 20, 0.1),
        ModelPoint("beaten too", "mxfp8", 30, 0.1),
    ]
    spec = frontier(reversed(models))
    rows = {row[0]: row[-1] for row in spec["usermeta"]["table"]["rows"]}
    assert rows == {
        "small": "yes",
        "beaten": "no",
        "twin": "no",
        "large": "yes",
        "beaten too": "no",
    }
    assert spec["data"][1]["values"] == [{"x": 10, "y": 0.3}, {"x": 20, "y": 0.1}]


def test_bars_begin_where_the_part_before_ends() -> None:
    spec = shared([model_bytes("b", 3, 4), model_bytes("a", 5, 6)])
    bars = [(bar["model"], bar["begin"], bar["end"]) for bar in spec["data"][0]["values"]]
    assert bars == [("a:latest", 0, 5), ("a:latest", 5, 11), ("b:latest", 0, 3), ("b:latest", 3, 7)]
