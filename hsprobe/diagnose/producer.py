"""What the producer of a training dump calls things, for findings and notes about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hsprobe.diagnose.model import Depth, Finding
from hsprobe.diagnose.naming import listed, numbers, plural
from hsprobe.formats.dump import DEPTHS, Sure

if TYPE_CHECKING:
    from hsprobe.diagnose.evidence import Evidence

# Codes about depths; the others name chunks or rows.
_ABOUT_DEPTHS = "HS1"
_MOST_NAMED = 3


@dataclass(frozen=True)
class Producer:
    """What the trace of a dump remembers of it.

    Attributes:
        name: such as "SpecForge offline".
        setting: what its layer ids are called. offset: depth minus id. sure: how the depths are known.
        default: the depths it captures when it is not told.
        about: everything else.
    """

    name: str
    setting: str | None = None
    offset: int = 0
    sure: str = Sure.UNKNOWN.value
    default: list[int] | None = None
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, provenance: dict[str, Any]) -> Producer | None:
        """Read it from provenance, which may hold anything; None for a trace that was no dump."""
        about = provenance.get("dump")
        if not isinstance(about, dict):
            return None
        layers = about.get("layers")
        layers = layers if isinstance(layers, dict) else {}
        setting, offset, default = layers.get("setting"), layers.get("offset"), about.get("default")
        return cls(
            name=str(about.get("format") or "an unknown producer"),
            setting=setting if isinstance(setting, str) else None,
            offset=offset if isinstance(offset, int) else 0,
            sure=str(layers.get("sure") or Sure.UNKNOWN.value),
            default=default if isinstance(default, list) and all(type(d) is int for d in default) else None,
            about=about,
        )

    @property
    def numbers_its_own_way(self) -> bool:
        """Whether it has layer ids, and does not just speak of depths."""
        return self.setting is not None and (self.setting != DEPTHS or self.offset != 0)

    def ids(self, depths: Sequence[Depth]) -> str:
        """`[2, 5, 8]`: depths as this producer numbers them, `?` where that cannot be said."""
        return f"[{listed(d - self.offset if isinstance(d, int) else d for d in depths)}]"


def in_own_numbers(finding: Finding, evidence: Evidence) -> Finding:
    """The finding with the layers it is about, as the dump's producer numbers them."""
    producer = evidence.producer
    if producer is None or not producer.numbers_its_own_way or not finding.code.startswith(_ABOUT_DEPTHS):
        return finding
    lines = [line for line in evidence.lines if line.index in finding.chunks]
    if not lines or all(line.trained is None for line in lines):
        return finding
    served = [line.served for line in lines]
    if all(depth is None for depth in served):
        served = [evidence.claimed_depths[line.index] for line in lines]
    noun = "chunk" if len(lines) == 1 else "chunks"
    trained = producer.ids([line.trained for line in lines])
    chunks = numbers([line.index for line in lines])
    sentence = f"as {producer.name} numbers layers ({producer.setting}): {noun} {chunks} trained on {trained}"
    if any(depth is not None for depth in served):
        sentence += f", served {producer.ids(served)}"
    return replace(finding, evidence=[sentence, *finding.evidence])


def notes(evidence: Evidence) -> list[str]:
    """What had to be assumed or found out about the dump, a sentence each."""
    producer = evidence.producer
    if producer is None:
        return []
    found = [*_depths(producer, evidence), *_final(producer), *_samples(producer)]
    more = producer.about.get("notes")
    return found + [str(note) for note in more if isinstance(note, str)] if isinstance(more, list) else found


def _depths(producer: Producer, evidence: Evidence) -> list[str]:
    if producer.setting is None or evidence.trained is None:
        return []
    known = evidence.trained_depths
    ids = f", {producer.setting} {producer.ids(known)}" if producer.numbers_its_own_way else ""
    default = ""
    if producer.default is not None:
        same = known == producer.default
        default = f", the producer's default{'' if same else f' being {producer.ids(producer.default)}'}"
    if producer.sure in (Sure.RECORDED.value, Sure.GIVEN.value):
        return []
    if any(depth is None for depth in known):
        return [
            f"{producer.name} does not record which layers its chunks hold, and they could not all be "
            f"inferred; name them in its own numbering ({producer.setting}) with --train-layers{default}."
        ]
    margins = [margin for margin in evidence.trained_margins if margin is not None]
    closest = f"; the next best depth fits {min(margins):,.0f} times worse" if margins else ""
    return [
        f"{producer.name} does not record which layers its chunks hold; inferred from the capture: depths "
        f"{listed(known)}{ids}{default}{closest}."
    ]


def _final(producer: Producer) -> list[str]:
    final = producer.about.get("final")
    if not isinstance(final, dict) or final.get("sure") in (Sure.RECORDED.value, Sure.GIVEN.value):
        return []
    if producer.about.get("left_out"):
        return ["The dump's last states were left out: it is not known where they were taken."]
    if final.get("sure") == Sure.INFERRED.value:
        side = "before" if final.get("norm") == "pre" else "after"
        return [f"The dump's last states are from {side} the final norm, inferred from the capture."]
    return []


def _samples(producer: Producer) -> list[str]:
    about = producer.about
    found = []
    total, read, skipped = about.get("samples"), about.get("read"), about.get("skipped")
    if isinstance(total, int) and isinstance(read, int) and read < total:
        if about.get("scanned_all"):
            found.append(f"Of {total:,} samples {read:,} share token ids with the capture; they were read.")
        else:
            found.append(
                f"Every captured prompt was found among the first {total:,} samples; {read:,} were read."
            )
    if isinstance(skipped, list) and skipped:
        named = [
            f"{one.get('sample')}: {one.get('reason')}"
            for one in skipped[:_MOST_NAMED]
            if isinstance(one, dict)
        ]
        rest = f" (and {len(skipped) - len(named):,} more)" if len(skipped) > len(named) else ""
        found.append(f"{plural(len(skipped), 'sample')} could not be read. {' '.join(named)}{rest}")
    padded = about.get("padded")
    if isinstance(padded, int) and padded:
        found.append(f"{plural(padded, 'row')} of padding were left out: {about.get('padding')}.")
    return found
