"""Every seeded mistake can be made, and names tests that exist; a sample of them is seen."""

import subprocess
import sys

import pytest
from mutants.mutant import ROOT, FaultError, Mutant, mutants


def fault_of(mutant: Mutant) -> str | None:
    try:
        mutant.edit()
    except FaultError as error:
        return str(error)
    return None


def test_they_can_be_made() -> None:
    faults = {mutant.name: fault_of(mutant) for mutant in mutants()}
    assert {name: fault for name, fault in faults.items() if fault is not None} == {}
    assert len(faults) == len(mutants()) >= 80
    assert sum(mutant.is_native for mutant in mutants()) >= 8


@pytest.mark.lab
def test_a_sample_of_20_is_seen() -> None:
    line = [sys.executable, "tests/mutants", "--sample", "20"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
