"""Reads a model's config.json, however it is written: an accessor gives None for what is no such value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsprobe.check.files import CONFIG_BYTES, document

_TEXT = ("text_config", "language_config", "llm_config")
_MOST_IDS = 4096


@dataclass(frozen=True)
class Config:
    """A config.json.

    Attributes:
        raw: the whole object. text: the part about the language model, where there is one of its own.
    """

    path: Path
    raw: dict[str, Any]
    text: dict[str, Any]

    @classmethod
    def read(cls, home: Path) -> Config:
        """Read a folder's config.json.

        Raises:
            HsprobeError: there is none, or it makes no sense.
        """
        raw = document(home, "config.json", CONFIG_BYTES)
        text = next((raw[key] for key in _TEXT if isinstance(raw.get(key), dict)), raw)
        return cls(home / "config.json", raw, text)

    def get(self, key: str) -> Any:
        """A value of the language model's part, else of the top."""
        found = self.text.get(key)
        return self.raw.get(key) if found is None else found

    def integer(self, key: str) -> int | None:
        """A positive integer."""
        found = self.get(key)
        return found if _is_integer(found) and 0 < found < 1 << 31 else None

    def number(self, key: str) -> float | None:
        """A finite number."""
        return as_number(self.get(key))

    def flag(self, key: str) -> bool:
        """Whether a value is true in Python's sense, as SGLang asks."""
        return bool(self.get(key))

    def words(self, key: str) -> str | None:
        """A short printable string."""
        found = self.get(key)
        return found if isinstance(found, str) and found.isprintable() and 0 < len(found) <= 100 else None

    def part(self, key: str) -> dict[str, Any]:
        """An object, empty where there is none."""
        found = self.raw.get(key)
        return found if isinstance(found, dict) else {}

    @property
    def architecture(self) -> str:
        """The first of `architectures`, empty where there is none."""
        named = self.raw.get("architectures")
        first = named[0] if isinstance(named, list) and named else None
        return first if isinstance(first, str) and first.isprintable() and len(first) <= 100 else ""

    @property
    def num_layers(self) -> int | None:
        """L, the number of decoder layers."""
        return self.integer("num_hidden_layers")

    @property
    def hidden_size(self) -> int | None:
        """H, the width of the residual stream."""
        return self.integer("hidden_size")

    @property
    def dtype(self) -> str | None:
        """`bfloat16`, ...: transformers 5 calls it `dtype`, earlier ones `torch_dtype`."""
        found = self.words("dtype") or self.words("torch_dtype")
        return found.removeprefix("torch.") if found else None

    @property
    def rope(self) -> dict[str, Any]:
        """RoPE's settings without its base: scaling, as either version of transformers writes them."""
        for key in ("rope_parameters", "rope_scaling"):
            found = self.get(key)
            if isinstance(found, dict):
                kind = found.get("rope_type", found.get("type", "default"))
                kept = {k: v for k, v in found.items() if k not in ("rope_theta", "rope_type", "type")}
                return {"rope_type": kind, **kept} if kind != "default" or kept else {}
        return {}

    @property
    def rope_theta(self) -> float | None:
        """The base of RoPE, wherever it is written."""
        nested = self.get("rope_parameters")
        inner = as_number(nested.get("rope_theta")) if isinstance(nested, dict) else None
        return self.number("rope_theta") if inner is None else inner

    @property
    def head_dim(self) -> int | None:
        """Width of an attention head."""
        hidden, heads = self.hidden_size, self.integer("num_attention_heads")
        return self.integer("head_dim") or (hidden // heads if hidden and heads else None)


def as_number(value: Any) -> float | None:
    """A finite number, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        return None
    return float(value)


def as_ids(value: Any) -> list[int] | None:
    """A list of integers, None for anything else."""
    if not isinstance(value, list) or len(value) > _MOST_IDS:
        return None
    return list(value) if all(_is_integer(one) and abs(one) < 1 << 31 for one in value) else None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: Any, most: int = 60) -> str:
    """A value from a file, fit to print."""
    text = repr(value)
    text = "".join(c if c.isprintable() else "?" for c in text[: most + 1])
    return text if len(text) <= most else text[: most - 3] + "..."
