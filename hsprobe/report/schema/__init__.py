"""The JSON Schema of `--format json`, made from the report's own classes so that neither can drift.

`python -m hsprobe.report.schema` prints it; `report.schema.json` beside this module is what it printed.
"""

from __future__ import annotations

import dataclasses
import json
import types
from enum import Enum
from importlib.resources import files
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hsprobe.compare.coverage import Coverage
from hsprobe.diagnose.consistency import Comparison, SelfReport
from hsprobe.diagnose.draft.model import DraftFindings
from hsprobe.diagnose.model import ChunkLine, Divergence, Finding, LayerLine, Ranks, SideSummary

NAME = "report.schema.json"

_NOT_A_NUMBER = "A figure that does not exist is null."


def published() -> dict[str, Any]:
    """The schema as shipped."""
    found: dict[str, Any] = json.loads(files(__package__).joinpath(NAME).read_text(encoding="utf-8"))
    return found


def build() -> dict[str, Any]:
    """The schema of the reports as they are now."""
    definitions: dict[str, Any] = {}
    head = {
        "schema_version": {"const": 1},
        "hsprobe_version": {"type": "string"},
        "verdict": {"enum": ["same", "different"]},
    }
    diff = {
        **head,
        "train": _of(SideSummary, definitions),
        "infer": _of(SideSummary, definitions),
        "compared": {"type": "string", "description": 'Tensor names, such as "aux with aux".'},
        "findings": _of(list[Finding], definitions),
        "chunks": _of(list[ChunkLine], definitions),
        "layers": _of(list[LayerLine], definitions),
        "divergence": _of(Divergence | None, definitions),
        "ranks": _of(Ranks | None, definitions),
        "coverage": _coverage(definitions),
        "draft": _of(DraftFindings | None, definitions),
        "notes": {"type": "array", "items": {"type": "string"}},
    }
    alone = {
        **head,
        "infer": _of(SideSummary, definitions),
        "rows": {"type": "integer"},
        "contexts": {"type": "integer"},
        "repeated_contexts": {"type": "integer"},
        "comparisons": _of(list[Comparison], definitions),
        "findings": _of(list[Finding], definitions),
        "draft": _of(DraftFindings | None, definitions),
        "notes": {"type": "array", "items": {"type": "string"}},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:hsprobe:report:1",
        "title": "What `hsprobe diff --format json` writes",
        "description": f"Of two traces, or of one compared with itself. {_NOT_A_NUMBER}",
        "oneOf": [
            {"title": "hsprobe diff TRAIN INFER", **_object(diff)},
            {"title": "hsprobe diff INFER", "description": _summary(SelfReport), **_object(alone)},
        ],
        "$defs": dict(sorted(definitions.items())),
    }


def text() -> str:
    """The schema as it stands in the file."""
    return json.dumps(build(), indent=2) + "\n"


def _coverage(definitions: dict[str, Any]) -> dict[str, Any]:
    found = _of(Coverage, definitions)
    known = definitions[Coverage.__name__]
    known["properties"]["share"] = {"type": "number", "description": "matched / train_rows, 0 to 1."}
    known["required"] = [*known["properties"]]
    return found


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def _of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type as `hsprobe.report.json.plain` writes it.

    Raises:
        TypeError: a type that reports do not hold so far.
    """
    plain: dict[Any, dict[str, Any]] = {
        str: {"type": "string"},
        bool: {"type": "boolean"},
        int: {"type": "integer"},
        float: {"type": ["number", "null"]},
        type(None): {"type": "null"},
        Any: {},
    }
    if kind in plain:
        return dict(plain[kind])
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (list, tuple):
        return {"type": "array", "items": _of(arguments[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of(arguments[1], definitions)}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of(argument, definitions) for argument in arguments]}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _reference(kind, definitions)
    raise TypeError(f"no JSON Schema for {kind!r}")


def _reference(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}
        hints = get_type_hints(kind)
        members = {f.name: _of(hints[f.name], definitions) for f in dataclasses.fields(kind)}
        definitions[kind.__name__] = {"description": _summary(kind), **_object(members)}
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _summary(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]
