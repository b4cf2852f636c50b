"""The short form of headers.py: 4,000 files, and hypothesis for short counterexamples."""

from pathlib import Path

from header_inputs import ENTRY, POOLS
from headers import BATCH, DIFFERENCES, check, run_batch
from hypothesis import given, strategies as st
from support.checkpoints import raw_safetensors
from support.corpus import load

RULES = {f"refused by F{number}" for number in range(1, 18)}
VERDICTS = RULES | {f"differs: {name}" for name in DIFFERENCES}
VERDICTS |= {"accepted by the scanner", "accepted by the parser"}
SMALL = [case for case in load("header") if not case.by_recipe]


def test_the_invariant_holds_for_generated_files() -> None:
    report = run_batch("ci.1")
    assert report.broken == []
    assert report.counts.total() == BATCH
    # Every rule and every class is met, so that none of them holds for want of files.
    assert report.counts.keys() == VERDICTS


def test_the_invariant_holds_for_the_corpus(tmp_path: Path) -> None:
    for case in SMALL:
        said = check(case.data, tmp_path / "model.safetensors")
        refused = "differs" if case.reference_accepts else "refused"
        assert said.startswith("accepted" if case.accepted else refused), case.id


@given(
    st.lists(st.sampled_from([token for pool in POOLS for token in pool]), max_size=12),
    st.integers(0, len(ENTRY)),
)
def test_the_invariant_holds_around_an_entry(tokens: list[bytes], place: int) -> None:
    text = b'{"w":' + b"".join((*ENTRY[:place], *tokens, *ENTRY[place:])) + b"}"
    assert check(raw_safetensors(text, b"x"))


@given(st.binary(max_size=64))
def test_the_invariant_holds_for_noise(raw: bytes) -> None:
    assert check(raw).startswith("refused")
