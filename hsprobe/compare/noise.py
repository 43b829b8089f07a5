"""How far apart two right computations of the same state may be.

Rounding enters with every layer and is carried on by the residual stream; independent errors add in
squares, hence the square root of the number of layers. A row error (see `statistics.row_errors`) between
two faithful computations is expected to stay below

    expected = C * eps * sqrt(depth + 1)

with eps the machine epsilon of the coarser precision involved (storage or compute, either side).

Where C comes from: random 8-block pre-norm transformers with weights and activations rounded to bfloat16
(eps 2**-8), against float32, showed relative errors of 0.005 to 0.022 at depths 1 to 8, which is 0.9 to
1.9 eps * sqrt(depth + 1); rounded up to 2. Float32 is given more, because there the two sides do not
differ by rounding alone: other kernels take other exponentials, reciprocal roots and summation orders,
each good to several units in the last place.
"""

import math

_EPS = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
_C = 2.0
_C_FLOAT32 = 12.0

# The middle row may exceed the expectation threefold, a single row tenfold, before they count as different.
MEDIAN_ALLOWANCE = 3.0
ROW_ALLOWANCE = 10.0


def coarsest(*dtypes: str | None) -> str:
    """The dtype with the largest machine epsilon; unknown names are passed over, default float32."""
    known = [name for name in (plain(d) for d in dtypes) if name in _EPS]
    return max(known, key=lambda name: _EPS[name]) if known else "float32"


def plain(dtype: str | None) -> str:
    """`torch.bfloat16`, `BF16` -> `bfloat16`."""
    name = (dtype or "").removeprefix("torch.").lower()
    return {
        "bf16": "bfloat16",
        "fp16": "float16",
        "half": "float16",
        "fp32": "float32",
        "float": "float32",
    }.get(name, name)


def expected_error(dtype: str, depth: int) -> float:
    """The row error to expect between two faithful computations at a depth (0..L; use L for `final`)."""
    eps = _EPS.get(plain(dtype), _EPS["float32"])
    factor = _C_FLOAT32 if eps <= _EPS["float32"] else _C
    return factor * eps * math.sqrt(depth + 1)
