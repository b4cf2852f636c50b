"""What tests share: where the fixtures are, and small checkpoints made on the spot."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
PYCODE = FIXTURES / "pycode-5m"
PYCODE_MOE = FIXTURES / "pycode-moe-5m"

QUANT_TYPES = ("int4", "int8", "nvfp4", "mxfp4", "mxfp8")
