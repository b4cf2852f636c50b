"""Every seeded mistake can still be made, and names tests that are there.

``python tests/mutants`` makes them.
"""

from __future__ import annotations

from collections import Counter

from mutants.mutant import mutants


def test_they_can_be_made() -> None:
    assert [(mutant.name, fault) for mutant in mutants() if (fault := mutant.fault())] == []


def test_there_are_enough_of_them_in_each_language() -> None:
    assert len(mutants()) >= 120
    assert sum(mutant.is_native for mutant in mutants()) >= 12


def test_no_two_have_one_name() -> None:
    assert [
        name for name, count in Counter(mutant.name for mutant in mutants()).items() if count > 1
    ] == []
