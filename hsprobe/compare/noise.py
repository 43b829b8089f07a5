"""How far apart two right computations of the same state may be: the built-in model, or measured figures.

**The model.** Rounding enters with every layer and is carried on by the residual stream; independent errors
add in squares, hence the square root of the number of layers. A row error (see `statistics.row_errors`)
between two faithful computations is expected to stay below

    expected = C * eps * sqrt(depth + 1)

with eps the machine epsilon of the coarser precision involved (storage or compute, either side).

C is 2, and 12 for float32, where the two sides do not differ by rounding alone: other kernels take other
exponentials, reciprocal roots and summation orders, each good to several units in the last place. Measured
between real captures, in units of eps * sqrt(depth + 1), as the range over all depths from 1 on of the median
row and of the row that 99.5 % stay below (SGLang 0.5.23 and transformers 5.19 on a CPU):

    model            pair                       captures                       rows   median     99.5 %
    trained, L = 10  bfloat16 to float32        transformers, both              951   0.6-0.8    1.2-1.7
                     bfloat16 to float32        SGLang to transformers, prefill 1518  0.6-0.7    1.1-1.4
                                                the same, verify                383   0.6-0.8    1.2-1.7
                     bfloat16 to bfloat16       SGLang to transformers         1518   0.5-1.0    1.3-1.8
                     float32 to float32         SGLang to transformers, prefill 1518  0          0.9-2.1
                                                the same, verify                383   0.4-1.8    1.8-3.3
                                                SGLang, other batches           567   0          0
    random Llama     bfloat16 to float32        transformers, both              340   0.9-1.2    1.4-1.7
    random Qwen3     bfloat16 to float32        transformers, both              340   1.0-1.3    1.5-1.8
    random DeepSeek  bfloat16 to float32        transformers, both              340   0.9-1.1    1.2-25

So medians stay below C with a factor of 1.6 to spare, 6 in float32, before the allowances below. In the last
line 3 of 340 rows took other experts: their routing was a tie up to rounding. Such rows are no noise of this
kind: of a mixture of experts in half precision more rows may stick out (`strays`), and measured figures are
what it deserves.

**Measured figures** come from two benign captures by way of `hsprobe noise` (see `tolerance`), and take the
model's place where there are any.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hsprobe.compare.stack import Depth
    from hsprobe.compare.statistics import ErrorStats
    from hsprobe.compare.tolerance import Tolerance

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
# A stray row in two hundred may stick out for its own reasons, in a short capture one or two at once.
STRAY_SHARE = 0.005
_FEW_STRAYS, _FEW_SHARE = 2.0, 0.025
# A routing tie in a mixture of experts turns a token and those after it: in bfloat16 1 % of all rows (above),
# and in a single phase of a short capture 2 of 76.
_ROUTED_SHARE = 0.03
_FEW_ROUTED, _FEW_ROUTED_SHARE = 4.0, 0.08

MODEL, FILE, BOTH = "model", "file", "model and file"


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


def epsilon(dtype: str) -> float:
    """Machine epsilon of a dtype; float32's for one that is not known."""
    return _EPS.get(plain(dtype), _EPS["float32"])


def expected_error(dtype: str, depth: int) -> float:
    """The row error to expect between two faithful computations at a depth (0..L; use L for `final`)."""
    eps = epsilon(dtype)
    factor = _C_FLOAT32 if eps <= _EPS["float32"] else _C
    return factor * eps * math.sqrt(depth + 1)


def needed(stats: ErrorStats) -> float:
    """The smallest expected error at which these rows would pass as equal; NaN without finite rows."""
    return max(
        stats.median / MEDIAN_ALLOWANCE, stats.all_but(strays(stats.finite, stats.routed)) / ROW_ALLOWANCE
    )


def strays(rows: int, routed: bool = False) -> float:
    """How many rows may stick out for reasons of their own: of few rows one or two, of many a small share.

    Args:
        routed: whether rounding may send a row to other experts (see `routes_by_rounding`).
    """
    if routed:
        return max(_ROUTED_SHARE * rows, min(_FEW_ROUTED, _FEW_ROUTED_SHARE * rows))
    return max(STRAY_SHARE * rows, min(_FEW_STRAYS, _FEW_SHARE * rows))


def routes_by_rounding(experts: int, *dtypes: str | None) -> bool:
    """Whether rounding decides where some rows go: a mixture of experts computed in less than float32."""
    return experts > 0 and epsilon(coarsest(*dtypes)) > _EPS["float32"]


@dataclass(frozen=True)
class Level:
    """The row error to expect, and whether the model or measured figures say so."""

    expected: float
    source: str = MODEL

    @property
    def row_limit(self) -> float:
        """A row with a larger error counts as different."""
        return ROW_ALLOWANCE * self.expected

    @staticmethod
    def widest(levels: Iterable[Level]) -> Level:
        """What holds for rows of several phases together."""
        found = list(levels)
        sources = {level.source for level in found}
        return Level(max(level.expected for level in found), sources.pop() if len(sources) == 1 else BOTH)


@dataclass(frozen=True)
class Noise:
    """What error to expect at a depth between two precisions.

    Attributes:
        num_layers: L, the depth that stands for `final` and for a depth that is not known.
        tolerance: measured figures, used where they cover a depth, phase and pair of dtypes.
    """

    num_layers: int
    tolerance: Tolerance | None = None

    def level(self, depth: Depth, dtypes: tuple[str, str], phase: int | None = None) -> Level:
        """What to expect.

        Args:
            depth: as in a trace; None where it is not known, which is given the noise of the deepest.
            dtypes: the coarsest precision that either side stored or computed in.
            phase: of the served row; None for the widest of all phases.
        """
        if self.tolerance is not None:
            measured = self.tolerance.expected(depth, dtypes, phase)
            if measured is not None:
                return Level(measured, FILE)
        depth = depth if isinstance(depth, int) else self.num_layers
        return Level(expected_error(coarsest(*dtypes), depth))

    def levels(self, depth: Depth, dtypes: tuple[str, str], phases: Iterable[int]) -> dict[int, Level]:
        """`level` for each phase."""
        return {int(phase): self.level(depth, dtypes, int(phase)) for phase in phases}
