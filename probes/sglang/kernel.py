"""The kernel of `gather`, in Triton: words of eight bytes of eight tensors, into columns of one buffer."""

# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

# Numbers and addresses come as they are: variants for those that are 1, or multiples of 16, would be compiled
# when they are first needed, in the middle of a capture.
_NUMBERS = ["stride", *(f"{kind}{index}" for kind in "wro" for index in range(8))]
_ADDRESSES = ["target", *(f"s{index}" for index in range(8))]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ADDRESSES)
def copy_columns(
    target, stride,
    s0, s1, s2, s3, s4, s5, s6, s7,
    w0, w1, w2, w3, w4, w5, w6, w7,
    r0, r1, r2, r3, r4, r5, r6, r7,
    o0, o1, o2, o3, o4, o5, o6, o7,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    which = tl.program_id(2)
    source, words, rows, offset = s0, w0, r0, o0
    if which == 1:
        source, words, rows, offset = s1, w1, r1, o1
    if which == 2:
        source, words, rows, offset = s2, w2, r2, o2
    if which == 3:
        source, words, rows, offset = s3, w3, r3, o3
    if which == 4:
        source, words, rows, offset = s4, w4, r4, o4
    if which == 5:
        source, words, rows, offset = s5, w5, r5, o5
    if which == 6:
        source, words, rows, offset = s6, w6, r6, o6
    if which == 7:
        source, words, rows, offset = s7, w7, r7, o7
    inside = at < words
    values = tl.load(source + row * rows + at, mask=inside)
    tl.store(target + row * stride + offset + at, values, mask=inside)
