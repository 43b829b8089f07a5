"""The order of a dump's files."""

from hypothesis import given
from hypothesis import strategies as st

from hsprobe.formats.naturally import in_natural_order, natural

NUMBERS = st.integers(0, 10**6).map(str) | st.from_regex(r"0{0,2}[0-9]{1,25}", fullmatch=True)
NAMES = st.builds(
    lambda before, numbers, after: [f"{before}{number}{after}" for number in numbers],
    st.sampled_from(["", "data_", "rows_1-", "x2y", "7"]),
    st.lists(NUMBERS, max_size=12),
    st.sampled_from(["", ".pt", "_3.pt", "9"]),
)


def test_numbers_count_as_numbers() -> None:
    assert in_natural_order(["d10.pt", "d9.pt", "e1.pt", "d.pt"]) == ["d9.pt", "d10.pt", "d.pt", "e1.pt"]


@given(NAMES, st.lists(st.text("ab0129٣²._", max_size=6), max_size=3))
def test_names_that_differ_in_a_number_alone_are_sorted_as_any_others(
    names: list[str], more: list[str]
) -> None:
    assert in_natural_order(names) == sorted(names, key=natural)
    assert in_natural_order(names + more) == sorted(names + more, key=natural)
