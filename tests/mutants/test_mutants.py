"""Every seeded mistake can still be made, and names tests that exist: ``python tests/mutants``."""

from __future__ import annotations

from collections import Counter

from mutants.mutant import FaultError, Mutant, mutants


def fault_of(mutant: Mutant) -> str | None:
    try:
        mutant.edit()
    except FaultError as error:
        return str(error)
    return None


def test_they_can_be_made() -> None:
    faults = {mutant.name: fault_of(mutant) for mutant in mutants()}
    assert {name: fault for name, fault in faults.items() if fault is not None} == {}


def test_there_are_enough_of_them_in_each_language() -> None:
    assert len(mutants()) >= 80
    assert sum(mutant.is_native for mutant in mutants()) >= 8


def test_no_two_have_one_name() -> None:
    names = Counter(mutant.name for mutant in mutants())
    assert [name for name, count in names.items() if count > 1] == []
