"""Network: a stored model as mlx-lm's network.

``sanitize`` of mlx-lm is traced, not fed with codes: what it does to the tensors of a published checkpoint is known as
expressions (tracing.py), and the same moves are made with codes and scales wherever every group stays together
(planning.py).
"""

from __future__ import annotations

from blobstore.network.arrays import OpenTensors, PlannedArray, check_arrays, computed_arrays, planned_arrays
from blobstore.network.building import build_network, quantize_modules
from blobstore.network.expressions import runs
from blobstore.network.layouts import LogicalTensor, float_dtype
from blobstore.network.planning import NetworkPlan, Parameter, import_mlx_lm, mlx_lm_errors, plan_network

__all__ = [
    "LogicalTensor",
    "NetworkPlan",
    "OpenTensors",
    "Parameter",
    "PlannedArray",
    "build_network",
    "check_arrays",
    "computed_arrays",
    "float_dtype",
    "import_mlx_lm",
    "mlx_lm_errors",
    "plan_network",
    "planned_arrays",
    "quantize_modules",
    "runs",
]
