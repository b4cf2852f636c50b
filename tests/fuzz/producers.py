"""The invariant of quantized checkpoints, and the program that looks for one which breaks it.

Whatever config.json and the tensors say: every value is what producer_values.py reads from them, or
the import is refused by a typed error that names a tensor or config.json. The store is then as
before, and no variant takes much time or memory.

``python tests/fuzz/producers.py [--variants 5000] [PRODUCER…]`` is the long form; ``--replay
PRODUCER NUMBER`` shows a variant. The short form is test_producer_fuzz.py.
"""

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from producer_kinds import adapted, torch_read, torch_saved
from producer_values import FLOATS, UNUSED, Array, ContradictionError, Values, meaning
from producer_variants import SEEDS, Checkpoint, tensors_of, variant
from support.checkpoints import safetensors_bytes

from blobstore import Store, import_model, open_model
from blobstore.errors import BlobStoreError
from blobstore.source.inventory import read_model
from blobstore.source.weights import Form, SourceReaders, SourceWeight

MOST_SECONDS = 60
"""By the clock, which costs less than processor time; a busy machine may take ten times longer."""
MOST_BYTES = 2**32
IMPORT_EVERY = 8
UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-23}
TINY = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149}
PIECE = 128 * 27
TOO_LARGE = 2.0**126
"""Terms of which a sum in float32 may be infinite."""


class DisagreementError(AssertionError):
    """A variant breaks the sentence at the top of this file."""


def write(one: Checkpoint, folder: Path) -> dict[str, Any]:
    """Write a checkpoint or an adapter; return what an import needs besides the folder."""
    file, given = folder / "model.safetensors", dict[str, Any]()
    if one.base is not None:
        shutil.copytree(one.base, folder, dirs_exist_ok=True)
        given["adapter"] = own = folder / "adapter"
        own.mkdir()
        file = own / f"adapter{'_model' if 'peft_type' in one.config else 's'}.safetensors"
        (own / "adapter_config.json").write_text(json.dumps(one.config))
    else:
        (folder / "config.json").write_text(json.dumps(one.config))
    if not one.torch:
        file.write_bytes(safetensors_bytes(one.tensors))
        return given
    torch_saved(one.tensors, file := folder / "pytorch_model.bin")
    if one.flip is not None:
        raw = bytearray(file.read_bytes())
        raw[int(one.flip * len(raw))] ^= 0x41
        file.write_bytes(raw)
    return given


def wanted_of(one: Checkpoint, folder: Path) -> dict[str, Values] | ContradictionError:
    try:
        if one.torch:
            return meaning(torch_read(folder / "pytorch_model.bin", one), one.config)
        if one.base is not None:
            return adapted(
                meaning(tensors_of(one.base / "model.safetensors"), {}), one.tensors, one.config
            )
        return meaning(one.tensors, one.config)
    except ContradictionError as error:
        return error


def read(weight: SourceWeight, readers: SourceReaders) -> Array:
    """Return a weight's values, in pieces that begin and end within rows."""
    with np.errstate(all="ignore"):
        pieces = [
            readers.values(weight, start, min(PIECE, weight.elements - start)).astype(np.float64)
            for start in range(0, weight.elements, PIECE)
        ]
    return np.concatenate(pieces or [np.empty(0)]).reshape(weight.shape)


def compare(
    name: str, got: Array, wanted: Values, share: float = 1, terms: float = 2.0**-20
) -> None:
    """Raise unless equal but for ``share`` roundings, and for the ``terms`` of a sum."""
    if got.shape != wanted.exact.shape:
        raise DisagreementError(f"{name} is {got.shape}, and not {wanted.exact.shape}")
    kind = wanted.dtype.name
    with np.errstate(all="ignore"):
        rounded = wanted.exact.astype(wanted.dtype).astype(np.float64)
        most = share * UNITS[kind] * np.abs(wanted.exact) + terms * wanted.terms + TINY[kind]
        fits = np.abs(got - wanted.exact) <= most
        rounded = np.where(wanted.terms > TOO_LARGE, np.inf, rounded)
        fits |= ~np.isfinite(rounded) & ~np.isfinite(got)
    if not fits.all():
        at = tuple(int(axis[0]) for axis in np.nonzero(~fits))
        raise DisagreementError(f"{name}{list(at)} is {got[at]}, and not {wanted.exact[at]}")


def check(one: Checkpoint, folder: Path, *, imports: bool = False) -> str:
    """Return "equal" or "refused". Raises: DisagreementError; any other error is one as well."""
    given = write(one, folder)
    wanted = wanted_of(one, folder)
    readers = SourceReaders()
    try:
        weights = read_model(folder, **given).weights
        found = {weight.name: read(weight, readers) for weight in weights}
        forms = {weight.name: weight for weight in weights}
    except BlobStoreError as error:
        check_refusal(one, error)
        if imports and imported(folder, given) is not None:
            raise DisagreementError("what can't be read is imported") from error
        if one.harmless:
            raise DisagreementError(f"a good checkpoint is refused: {error}") from error
        return "refused"
    finally:
        readers.close()
    if isinstance(wanted, ContradictionError):
        raise DisagreementError(f"accepted, but contradictory: {wanted}")
    plain = {name for name, array in one.tensors.items() if array.dtype not in FLOATS}
    plain |= {name for name in found if name.endswith(UNUSED)}
    if others := (found.keys() ^ wanted.keys()) - plain:
        raise DisagreementError(f"{sorted(others)} are not in both")
    for name, values in wanted.items():
        compare(name, found[name], values)
    if imports:
        check_import(imported(folder, given), wanted, forms)
    return "equal"


def check_refusal(one: Checkpoint, error: BlobStoreError) -> None:
    named = {name.rpartition(".")[0] for name in one.tensors} | {"config.json", "model."}
    if not any(name and name in str(error) for name in named) and one.tensors:
        raise DisagreementError(f"names no tensor: {error}") from error


def imported(folder: Path, given: dict[str, Any]) -> Store | None:
    """Return the store of the imported checkpoint, None if it is refused and nothing is stored."""
    store = Store(folder / "store")
    try:
        import_model(folder, "m", store=store, **given)
    except BlobStoreError:
        if store.manifests.names():
            raise DisagreementError("a refused import is in the store") from None
        return None
    return store


def check_import(
    store: Store | None, wanted: dict[str, Values], forms: dict[str, SourceWeight]
) -> None:
    """Compare what is stored: codes that are kept differ by a bias's rounding."""
    if store is None:
        return
    with open_model("m", store=store) as model:
        for name, values in wanted.items():
            weight = forms[name]
            share = 2 * UNITS[values.dtype.name]
            if weight.form is Form.FP8:  # becomes mxfp8, whose codes have 4 bits
                finite = np.where(np.isfinite(values.exact), np.abs(values.exact), 0)
                rows = finite.max(-1, keepdims=True) + 0 * values.terms
                values, share = values._replace(terms=rows), 2.0**-3  # noqa: PLW2901
            compare(name, model[name].dequantize().astype(np.float64), values, 2, share)


@dataclass
class Report:
    """How many variants were equal or refused; those that break the sentence, by number."""

    counts: Counter[str] = field(default_factory=Counter)
    broken: dict[int, str] = field(default_factory=dict)
    slowest: float = 0


def run(producer: str, numbers: range, work: Path) -> Iterator[tuple[int, Report]]:
    """Check variants; yield a report that grows."""
    report, (make, verify) = Report(), made_by(producer)
    for number in numbers:
        one, folder = make(producer, number), work / "variant"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        began = time.perf_counter()
        try:
            report.counts[verify(one, folder, imports=number % IMPORT_EVERY == 0)] += 1
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # whatever it is, it breaks the sentence
            report.broken[number] = f"{type(error).__name__}: {error}; {one.changes}"
        seconds = time.perf_counter() - began
        report.slowest = max(report.slowest, seconds)
        if seconds > MOST_SECONDS:
            report.broken[number] = f"{seconds:.0f} s; {one.changes}"
        yield number, report


def made_by(producer: str) -> tuple[Callable[[str, int], Any], Callable[..., str]]:
    """Return what makes a producer's variants, and what checks them."""
    if producer != "GGUF":
        return variant, check
    import gguf_variants  # of the extra `gguf`

    return gguf_variants.variant, gguf_variants.check


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    every = [*SEEDS, "GGUF"]
    parser.add_argument("producers", nargs="*", default=every, metavar="PRODUCER")
    parser.add_argument("--variants", type=int, default=5000)
    parser.add_argument("--replay", type=int, metavar="NUMBER")
    given = parser.parse_args()
    numbers = range(given.variants)
    if given.replay is not None:
        numbers = range(given.replay, given.replay + 1)
    faults = 0
    for producer in given.producers:
        limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        report = Report()
        with tempfile.TemporaryDirectory(prefix="producers-") as work:
            for number, report in run(producer, numbers, Path(work)):
                if number in report.broken:
                    print(f"{producer} {number}: {report.broken[number]}", flush=True)
        faults += len(report.broken)
        counts = ", ".join(f"{count} {word}" for word, count in sorted(report.counts.items()))
        end = f"{len(report.broken)} broken, {report.slowest:.2f} s at most"
        print(f"{producer}: {counts}, {end}", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
