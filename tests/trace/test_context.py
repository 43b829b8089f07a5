"""The context of a row is a hash of its whole token prefix, computed as a chain."""

from hashlib import blake2b
from struct import pack, unpack

from hypothesis import given
from hypothesis import strategies as st

from hsprobe.trace.context import START, context_hashes, extend

tokens = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20)


def test_the_chain_is_the_documented_one() -> None:
    first = unpack("<Q", blake2b(pack("<Qq", 0, 15)).digest()[:8])[0]
    second = unpack("<Q", blake2b(pack("<Qq", first, -1)).digest()[:8])[0]
    assert context_hashes([15, -1]) == [first, second]


@given(tokens, tokens)
def test_extending_a_prefix_equals_hashing_the_whole(prefix: list[int], rest: list[int]) -> None:
    before = context_hashes(prefix)
    assert before + extend(before[-1] if before else START, rest) == context_hashes(prefix + rest)


@given(tokens, tokens)
def test_contexts_are_equal_exactly_as_far_as_the_tokens_are(a: list[int], b: list[int]) -> None:
    agree = [x == y for x, y in zip(a, b, strict=False)]
    common = agree.index(False) if False in agree else len(agree)
    equal = [x == y for x, y in zip(context_hashes(a), context_hashes(b), strict=False)]
    assert equal == [i < common for i in range(len(equal))]


@given(tokens)
def test_no_context_of_a_token_is_the_code_for_none(ids: list[int]) -> None:
    assert 0 not in context_hashes(ids)


def test_no_tokens_have_no_contexts() -> None:
    assert context_hashes([]) == []
