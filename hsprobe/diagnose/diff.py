"""The one entry: compare a training dump with a capture."""

from __future__ import annotations

from pathlib import Path

from hsprobe.compare.tolerance import read as read_tolerance
from hsprobe.diagnose.draft.findings import held_against
from hsprobe.diagnose.dumped import Told, opened
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.gather import Gatherer
from hsprobe.diagnose.model import Finding, Report, State
from hsprobe.diagnose.naming import numbers, plural
from hsprobe.diagnose.producer import Producer
from hsprobe.diagnose.producer import notes as dump_notes
from hsprobe.diagnose.ranks.facts import RankFacts
from hsprobe.diagnose.ranks.survey import Survey
from hsprobe.diagnose.ranks.verdict import judged
from hsprobe.diagnose.ranks.wording import overview
from hsprobe.diagnose.sides import Side, check_same_model
from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import Options
from hsprobe.remote.location import Location, locate

DEFAULT_ROWS = 512


def diff(
    train: Location | str,
    infer: Location | str,
    *,
    rows: int = DEFAULT_ROWS,
    noise: Path | str | None = None,
    dump: Options | None = None,
    told: Told | None = None,
    draft: Path | str | None = None,
    target: Path | str | None = None,
) -> Report:
    """Say whether the states in `infer` are those the draft was trained on, and if not, what is wrong.

    Args:
        train: the training dump as its producer wrote it, or a trace of it or of the whole model.
        infer: trace of the running server.
        rows: most rows to identify chunks on; the direct comparison takes all.
        noise: a file made by `hsprobe noise`, used in place of the noise model where it has figures.
        dump: what is known of the training dump that it does not say itself.
        told: is told how far the reading of a dump is.
        draft: folder of the trained draft, to hold the served one against, stage by stage.
        target: folder of the target, whose embedding the draft uses; by default the one that INFER names.

    Raises:
        HsprobeError: a file is unreadable, holds nothing, is of another model, or no row has a partner.
    """
    tolerance = None if noise is None else read_tolerance(Path(noise))
    with (
        opened(locate(infer), told=told) as infer_trace,
        opened(locate(train), dump, beside=infer_trace, told=told) as train_trace,
    ):
        train_side, train_ranks = Survey(train_trace, "train").run()
        survey = Survey(infer_trace, "infer", train_side)
        infer_side, infer_ranks = survey.run()
        check_same_model(train_side, infer_side)
        if tolerance is not None:
            tolerance.check_model(infer_side.architecture, infer_side.num_layers, infer_side.hidden)

        def gather(side: Side) -> Evidence:
            evidence = Gatherer(train_side, side, rows, tolerance).run()
            evidence.producer = Producer.of(train_trace.provenance)
            return evidence

        held = None if draft is None else held_against(infer_trace, draft, target)
        evidence, found = judged(survey, infer_side, infer_ranks, [train_ranks], gather, held)
        if not found and draft is None:
            _check_something_compared(evidence, train_side, infer_side)
        return _report(evidence, found, train_side, infer_side, infer_ranks)


def _report(evidence: Evidence, found: list[Finding], train: Side, infer: Side, ranks: RankFacts) -> Report:
    served = evidence.served.name if evidence.served else "layer"
    trained = evidence.trained.name if evidence.trained else "layer"
    return Report(
        same=not found,
        train=train.summary(),
        infer=infer.summary(),
        compared=served if served == trained else f"{trained} with {served}",
        findings=found,
        chunks=evidence.lines,
        layers=evidence.layers,
        coverage=evidence.coverage,
        divergence=evidence.divergence,
        ranks=overview(ranks),
        notes=[
            *evidence.notes,
            *ranks.notes,
            *dump_notes(evidence),
            *_notes(evidence, train, infer),
        ],
        draft=evidence.draft,
    )


def _check_something_compared(evidence: Evidence, train: Side, infer: Side) -> None:
    judged = [line for line in evidence.lines if line.state is not State.NO_ROWS or line.nonfinite_infer]
    if not judged and not evidence.layers and evidence.trained_chunks == evidence.served_chunks:
        raise HsprobeError(
            f"{train.trace.path} and {infer.trace.path} have no tensor in common that could be compared "
            f"({', '.join(train.stacks)} against {', '.join(infer.stacks)}).",
            "Capture with '--sites aux,layer'.",
        )


def _notes(evidence: Evidence, train: Side, infer: Side) -> list[str]:
    notes = list(evidence.draft.notes) if evidence.draft is not None else []
    if evidence.served is None:
        notes.append(
            "INFER holds neither aux nor draft.input: this tells whether the model computes the right "
            "states, not which of them the draft is handed; capture with '--sites aux,layer'."
        )
    elif evidence.served.name == "draft.input":
        notes.append(
            "INFER holds draft.input but no aux: a fault in the handover cannot be told from a fault in the "
            "target; capture with '--sites aux,layer,draft.input'."
        )
    unknown = [line.index for line in evidence.lines if line.trained is None]
    if unknown and not evidence.has_depths and evidence.producer is None:
        notes.append(
            f"TRAIN does not say which depths its chunks hold ({numbers(unknown)}), and no depths were "
            "captured that could tell; capture with '--sites aux,layer'."
        )
    nothing = [
        line.index for line in evidence.lines if line.state is State.NO_ROWS and not line.nonfinite_infer
    ]
    if nothing:
        notes.append(f"Nothing to compare with for chunk {numbers(nothing)}.")
    for name, side in (("TRAIN", train), ("INFER", infer)):
        if side.trace.gaps:
            reason = side.trace.gaps[0].get("reason", "no reason given")
            notes.append(f"{name} lists {plural(len(side.trace.gaps), 'gap')}; the first: {reason}.")
        if side.trace.state == "recovered":
            notes.append(f"{name} was recovered after a crash and ends at its last flush.")
    if train.num_layers and infer.num_layers and train.num_layers != infer.num_layers:
        notes.append(f"TRAIN's model has {train.num_layers} layers, INFER's has {infer.num_layers}.")
    return notes
