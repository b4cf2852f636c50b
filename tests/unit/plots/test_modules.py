"""Names as places: of many names at once, or of each alone."""

from __future__ import annotations

from hypothesis import example, given, strategies as st

from blobstore.plots.modules import module_and_part, modules_and_parts

PARTS = st.sampled_from(["a", "layers", "3", "30", "0", "weight", "", "é", "x" * 3, "1234567890"])


@example(["a.3.b", "a.3.weight", "a.3", "a.30.b", "a.3.b.4", "a.3..weight", "a.3.weight.weight"])
@given(st.lists(st.lists(PARTS, max_size=5).map(".".join), max_size=12))
def test_neighbours_change_no_place(names: list[str]) -> None:
    assert list(modules_and_parts(names)) == [module_and_part(name) for name in names]
