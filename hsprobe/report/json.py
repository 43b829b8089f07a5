"""The report as JSON: the same facts as on the terminal, without a number that JSON does not know."""

from __future__ import annotations

import dataclasses
import json
import math
from enum import Enum
from typing import Any, TextIO

from hsprobe import __version__
from hsprobe.diagnose.model import Report

SCHEMA_VERSION = 1


def document(report: Report) -> dict[str, Any]:
    """The report as plain data; a figure that does not exist is null."""
    coverage = report.coverage
    facts: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "hsprobe_version": __version__,
        "verdict": "same" if report.same else "different",
        "train": report.train,
        "infer": report.infer,
        "compared": report.compared,
        "findings": report.findings,
        "chunks": report.chunks,
        "layers": report.layers,
        "divergence": report.divergence,
        "ranks": report.ranks,
        "coverage": dataclasses.asdict(coverage) | {"share": coverage.share},
        "draft": report.draft,
        "notes": report.notes,
    }
    found: dict[str, Any] = plain(facts)
    return found


def write(report: Report, stream: TextIO) -> None:
    """Write the report as one JSON object."""
    dump(document(report), stream)


def dump(facts: dict[str, Any], stream: TextIO) -> None:
    """Write plain data, and refuse NaN rather than write what is not JSON."""
    json.dump(facts, stream, indent=2, allow_nan=False, ensure_ascii=False)
    stream.write("\n")


def plain(value: Any) -> Any:
    """Dataclasses, enums and figures that do not exist (null) as JSON knows them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
