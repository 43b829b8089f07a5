"""Which norm of the model a fitted gain belongs to.

Shapes: H channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hsprobe.compare.statistics import Floats
from hsprobe.diagnose.weights import tensors

FINAL, LAYER = "final", "layer"
# A gain is recognised when it is this near, or within this many times the noise of the states.
_NEAR, _NOISES = 0.02, 3.0


@dataclass(frozen=True)
class Norm:
    """The norm that explains a gain.

    Attributes:
        code: the fault class. words: what happened to the state. note: how far it is certain.
    """

    code: str
    words: str
    note: str


@dataclass(frozen=True)
class Norms:
    """The norms of the served model.

    Attributes:
        gains: name -> gain, from the model's folder or from the capture. Each [H].
        final: names of final norms among them.
        num_layers: L, where known.
        codes: "final" and "layer" -> the fault class of a state so normed.
    """

    gains: Mapping[str, Floats]
    final: frozenset[str]
    num_layers: int | None
    codes: Mapping[str, str]

    def name(self, fitted_H: Floats, depth: int, term: str, noise: float) -> Norm:
        """The norm whose gain this is; by the depth alone where no gain is known that tells."""
        near = self._near(fitted_H, max(_NEAR, _NOISES * noise))
        last = depth == self.num_layers and term == "norm"
        finals = [name for name in near if name in self.final]
        others = [name for name in near if name not in self.final]
        natural = _natural(others, depth, term)
        if finals and not natural:
            return self._final(f"its gain is that of {finals[0]}")
        if last:
            how = f"its gain is that of {finals[0]}" if finals else "the norm after the last layer"
            return self._final(how)
        if others and not finals:
            return self._layer(natural or others[0], f"its gain is that of {natural or others[0]}")
        if natural:
            return self._layer(
                natural,
                f"its gain is that of {natural} and of {finals[0]} alike: which of the two was applied "
                "cannot be told from the values",
            )
        return self._layer(
            "an RMS norm",
            "no norm weight is known to hold its gain against: a model folder that can be read, or a capture "
            "of the last layer and of logits_processor.input, would name the norm",
        )

    def _final(self, note: str) -> Norm:
        return Norm(self.codes[FINAL], "after the final norm", note)

    def _layer(self, name: str, note: str) -> Norm:
        if "input_layernorm" in name:
            name = "the input norm of {below}"
        elif "post_attention" in name:
            name = "the norm after the attention of {above}"
        return Norm(self.codes[LAYER], f"overwritten by {name}", note)

    def _near(self, fitted: Floats, most: float) -> list[str]:
        found = []
        for name, gain in self.gains.items():
            # Some models store a gain less one.
            for weight in (gain, 1.0 + gain):
                size = float(np.linalg.norm(weight))
                if size > 0 and float(np.linalg.norm(fitted - weight)) <= most * size:
                    found.append((float(np.linalg.norm(fitted - weight)) / size, name))
        if not found:
            return []
        best = min(error for error, _ in found)
        return [name for error, name in sorted(found) if error <= max(2 * best, 0.25 * most)]


def _natural(names: list[str], depth: int, term: str) -> str:
    """The norm that a later kernel applies to this very state, if it is among them."""
    wanted = f"layers.{depth}.input_layernorm" if term == "norm" else f"layers.{depth - 1}.post_attention"
    return next((name for name in names if wanted in name), "")


def stored_gains(folder: object, width: int) -> dict[str, Floats]:
    """The norm weights of width H in a model folder; empty where it cannot be read."""
    return tensors(folder, lambda name, shape: "norm" in name and shape == [width])


def is_final(name: str) -> bool:
    """Whether a weight's name is that of the norm after the last layer."""
    return "layers." not in name and name.endswith(("model.norm.weight", "norm.weight", "ln_f.weight"))
