"""The one entry: what the served states cost the draft, and which finding costs how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.statistics import Floats
from hsprobe.diagnose.diff import DEFAULT_ROWS
from hsprobe.diagnose.draft.findings import held_against
from hsprobe.diagnose.dumped import Told, opened
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.gather import Gatherer
from hsprobe.diagnose.producer import Producer
from hsprobe.diagnose.registry import findings
from hsprobe.diagnose.sides import Side, check_same_model, open_side
from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import Options
from hsprobe.impact import counters, sources
from hsprobe.impact.chains import Chains
from hsprobe.impact.mixing import HANDOVER, Mixer, aspect, named
from hsprobe.impact.model import Acceptance, Cost, ImpactReport, Reported
from hsprobe.impact.texts import Bools, Text, texts
from hsprobe.impact.walk import chance, lengths, together, walk
from hsprobe.remote.location import Location, locate
from hsprobe.trace.reader import Trace

LEAST_LOSS = 0.02
"""A smaller share of the accept length is no loss: rounding alone turns about so many drafts."""
FEW_HEADS = 200
"""Figures from fewer positions than these are rough."""
FAITHFUL = 0.1
"""A server that accepts this share less than its draft does offline runs another draft than the folder's."""

OnText = Callable[[int, int], None]
Active = frozenset[int]


def _quietly(text: str, *, stays: bool = False) -> None:
    pass


def impact(
    train: Location | str,
    infer: Location | str,
    *,
    draft: Path | str,
    target: Path | str | None = None,
    steps: int | None = None,
    least_loss: float = LEAST_LOSS,
    rows: int = DEFAULT_ROWS,
    device: str = "cpu",
    dump: Options | None = None,
    told: Told = _quietly,
    on_text: OnText = lambda done, total: None,
) -> ImpactReport:
    """Run the draft on both sides' states over the requests of the capture.

    Args:
        train: the training dump as its producer wrote it, or a trace of it or of the whole model.
        infer: trace of the running server, with the tokens that it generated.
        draft: folder of the draft's checkpoint.
        target: folder of the target's, for the token embeddings; by default the one that INFER names.
        steps: drafted tokens a verify pass; by default as INFER's server was told.
        least_loss: share of the accept length below which a loss is none.
        rows: as for `hsprobe diff`.
        device: where torch runs the draft.
        dump, told: as for `hsprobe.diagnose.diff`.
        on_text: gets (done, total) requests.

    Raises:
        HsprobeError: a file is unreadable or of another model, the draft cannot be run, or no request can be.
    """
    with (
        Trace.open(infer) as infer_trace,
        opened(locate(train), dump, beside=infer_trace, told=told) as train_trace,
    ):
        sides = open_side(train_trace, "train"), open_side(infer_trace, "infer")
        check_same_model(*sides)
        told("comparing the states of both sides")
        evidence = Gatherer(*sides, rows).run()
        how = counters.served(infer_trace)
        evidence.producer = Producer.of(train_trace.provenance)
        folder, model = Path(draft), target or how.target
        count = _steps(steps or how.steps, infer_trace.path)
        chains = Chains.open(folder, None if model is None else Path(model), count, device)
        run = _Run(*sides, evidence, chains, folder)
        run.over(texts(infer_trace), on_text)
        report = run.report(how, least_loss)
        if not report.draft_costs or not any(name.startswith("draft.") for name in sides[1].stacks):
            return report
        return replace(report, draft_faults=_draft_faults(evidence, infer_trace, folder, model))


def _steps(count: int | None, path: Location) -> int:
    if count is None:
        raise HsprobeError(
            f"{path} does not say how many tokens the server drafted.",
            "Give --steps, the server's --speculative-num-steps.",
        )
    return count


def _draft_faults(evidence: Evidence, infer: Trace, draft: Path, target: Path | str | None) -> list[str]:
    """What the served draft does otherwise than the folder's, named as `hsprobe diff --draft` names it."""
    evidence.draft = held_against(infer, draft, target)
    found = [one for one in findings(evidence) if aspect(one) is None]
    return [f"{one.code} {one.name}: {one.title}" for one in found]


@dataclass
class _Tally:
    """What one set of states reached, request by request."""

    walks: list[Acceptance] = field(default_factory=list)
    lengths: list[NDArray[np.int64]] = field(default_factory=list)

    def add(self, hits_SN: Bools, text: Text) -> None:
        self.walks.append(walk(hits_SN, text.completion))
        self.lengths.append(lengths(hits_SN))


class _Run:
    """Runs the draft over the requests under every set of findings that is asked about."""

    def __init__(self, train: Side, infer: Side, evidence: Evidence, chains: Chains, draft: Path) -> None:
        self.train, self.infer, self.chains, self.draft = train, infer, chains, draft
        self.findings = found = findings(evidence)
        self.notes: list[str] = []
        handover = any(aspect(one) == HANDOVER for one in found)
        self.served = sources.served(infer, received=handover)
        self.trained, said = sources.trained(train, infer, draft)
        self.notes += said
        chains.check_width(self.trained.width, train.trace.path)
        chains.check_width(self.served.width, infer.trace.path)
        # The server's own stream where it was captured; a reference's holds the same states else.
        stream = infer if any(isinstance(depth, int) for depth in infer.layers) else train
        self.mixer = Mixer(found, evidence, stream, self.served, self.trained)
        self.items = self.mixer.items()
        self.everything: Active = frozenset(f for item in self.items for f in item.findings)
        self.tallies: dict[Active, _Tally] = {}
        for item in self.items:
            for active in (item.findings, self.everything - item.findings):
                self.tallies.setdefault(active, _Tally())
        self.training, self.serving = _Tally(), _Tally()
        self.predicted: dict[str, Acceptance] = {}
        self.generated = 0
        self.left_out: Counter[str] = Counter()
        self.filled: Counter[str] = Counter()

    def over(self, requests: list[Text], on_text: OnText) -> None:
        """Run all requests.

        Raises:
            HsprobeError: there are none that can be run.
        """
        if not requests:
            raise HsprobeError(
                f"{self.infer.trace.path} holds no request with generated tokens.",
                "Capture with --max-new-tokens 64 or more; acceptance shows only while tokens are generated.",
            )
        self.generated = sum(text.completion for text in requests)
        for done, text in enumerate(requests, start=1):
            self._one(text)
            on_text(done, len(requests))
        if not self.training.walks:
            why = "; ".join(f"{count} {reason}" for reason, count in self.left_out.most_common())
            raise HsprobeError(
                f"No request of {self.infer.trace.path} can be run on both sides: {why}.",
                "Make the training side from the same prompts, with as many --max-new-tokens.",
            )

    def _one(self, text: Text) -> None:
        served, in_served = self.served.read(text)
        trained, in_trained = self.trained.read(text)
        first = text.prompt_len - 1
        reach = _reach(in_served[first:-1])
        both = min(reach, _reach(in_trained[first:-1]))
        wrong = None
        if in_served[:-1].all():
            wrong = self._hits(served, text, text.completion)
            self.predicted[text.rid] = walk(wrong, text.completion)
        if both < 2:
            # A prompt's last row is there without anything generated.
            side = "training" if reach > 1 else "served"
            self.left_out[f"without {side} states of what was generated"] += 1
            return
        if not self._fill(served, in_served, trained, in_trained, first + both):
            self.left_out["with prompt rows that are on neither side"] += 1
            return
        wrong = self._hits(served, text, both) if wrong is None else wrong[:, :both]
        self._compare(text, served, trained, wrong)

    def _fill(self, served: Floats, in_served: Bools, trained: Floats, in_trained: Bools, rows: int) -> bool:
        """Take prompt rows that one side lacks from the other; whether all `rows` are there then."""
        here, there = in_served[:rows], in_trained[:rows]
        if here.all() and there.all():
            return True
        if not self.mixer.comparable or not (here | there).all():
            return False
        served[:rows][~here] = trained[:rows][~here]
        trained[:rows][~there] = served[:rows][~there]
        self.filled["INFER"] += int((~here).sum())
        self.filled["TRAIN"] += int((~there).sum())
        return True

    def _compare(self, text: Text, served: Floats, trained: Floats, wrong: Bools) -> None:
        """Run the draft on the training side's states and all mixtures. `wrong`: hits of the served ones."""
        heads = wrong.shape[1]
        right = self._hits(trained, text, heads)
        self.serving.add(wrong, text)
        self.training.add(right, text)
        for active, tally in self.tallies.items():
            if active == self.everything:
                tally.add(wrong, text)
            elif not active:
                tally.add(right, text)
            else:
                tally.add(self._hits(self.mixer.mix(text, served, trained, active), text, heads), text)

    def _hits(self, states_TKH: Floats, text: Text, heads: int) -> Bools:
        first = text.prompt_len - 1
        return self.chains.hits(states_TKH.reshape(len(text), -1), text, range(first, first + heads))

    def report(self, how: counters.Served, least_loss: float) -> ImpactReport:
        """What came of it."""
        steps = self.chains.steps
        trained, served = (together(tally.walks, steps) for tally in (self.training, self.serving))
        loses = _length(trained) - _length(served)
        pairs = zip(self.training.lengths, self.serving.lengths, strict=True)
        mean, error = chance([(a - b).astype(np.float64) for a, b in pairs])
        states_cost = loses > least_loss * _length(trained) and mean > 2 * error
        reported = self._reported(steps)
        off = reported.error if reported is not None else None
        draft_costs = off is not None and off > FAITHFUL
        return ImpactReport(
            draft=str(self.draft),
            steps=steps,
            train=self.train.summary(),
            infer=self.infer.summary(),
            trained=trained,
            served=served,
            loses=loses,
            noise=2 * error if np.isfinite(error) else 0.0,
            lost=states_cost or draft_costs,
            states_cost=states_cost,
            draft_costs=draft_costs,
            reported=reported,
            costs=self._costs(trained, served),
            requests=len(self.training.walks),
            heads=sum(len(one) for one in self.training.lengths),
            left_out=dict(self.left_out),
            filled={side: count for side, count in self.filled.items() if count},
            notes=[*self.notes, *self._further_notes(how)],
        )

    def _costs(self, trained: Acceptance, served: Acceptance) -> list[Cost]:
        found = []
        for item in self.items:
            codes, titles = named(item.findings, self.findings)
            alone = together(self.tallies[item.findings].walks, self.chains.steps)
            mended = together(self.tallies[self.everything - item.findings].walks, self.chains.steps)
            loses, gains = _length(trained) - _length(alone), _length(mended) - _length(served)
            found.append(Cost(codes, titles, alone, mended, loses, gains))
        return sorted(found, key=lambda cost: -cost.loses)

    def _reported(self, steps: int) -> Reported | None:
        counted = counters.by_request(self.infer.trace.provenance, steps)
        both = [rid for rid in self.predicted if rid in counted and self.predicted[rid].passes]
        if not both:
            return None
        server = together([counted[rid] for rid in both], steps)
        return Reported(len(both), server, together([self.predicted[rid] for rid in both], steps))

    def _further_notes(self, how: counters.Served) -> list[str]:
        notes = []
        if how.topk is not None and how.topk != 1:
            notes.append(
                f"The server drafts trees (topk {how.topk}); what is predicted is a chain (topk 1), which "
                "accepts less."
            )
        if how.steps is not None and how.steps != self.chains.steps:
            notes.append(f"The server drafted {how.steps} steps, the prediction {self.chains.steps}.")
        heads = sum(len(one) for one in self.training.lengths)
        if heads < self.generated:
            notes.append(
                f"{heads:,} of the {self.generated:,} generated tokens have states on both sides; "
                "the others are not compared."
            )
        if heads < FEW_HEADS:
            notes.append(
                f"{heads} generated tokens give rough figures; capture both sides with more --max-new-tokens."
            )
        others = [one for one in self.findings if aspect(one) is None]
        for one in others:
            notes.append(f"{one.code} {one.name} is not about states and has no figure here: {one.title}.")
        return notes


def _reach(there: Bools) -> int:
    """How many of the first are there without a hole."""
    return len(there) if there.all() else int(np.argmin(there))


def _length(found: Acceptance) -> float:
    return found.length or 0.0
