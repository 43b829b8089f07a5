"""Make every comparison that the two traces allow, and hand the evidence to the fault classes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hsprobe.compare.align import Pairs, by_context, pair
from hsprobe.compare.coverage import Coverage, cover
from hsprobe.compare.direct import Lane, compare_many
from hsprobe.compare.noise import Level, Noise
from hsprobe.compare.shards import Direct, Limits
from hsprobe.compare.stack import Rows, Stack
from hsprobe.compare.tolerance import Tolerance
from hsprobe.diagnose.chunkline import chunk_evidence, label_depth, row_place
from hsprobe.diagnose.evidence import ChunkEvidence, Evidence, Serving
from hsprobe.diagnose.growth import Measured, first_divergence, measure
from hsprobe.diagnose.identify import (
    STUCK,
    TWIN,
    WRONG,
    Candidate,
    Identity,
    Label,
    Matrix,
    identify,
    sampled,
    settled,
    without_own,
)
from hsprobe.diagnose.model import Depth, State
from hsprobe.diagnose.prepare import served_weights, settler
from hsprobe.diagnose.settle import TrainedChunk
from hsprobe.diagnose.sides import (
    Side,
    chunk_lanes,
    depth_candidates,
    dtypes_between,
    served_depths,
)
from hsprobe.diagnose.tokens import Tokens, compare_prompts, shifted_ids
from hsprobe.diagnose.trained import Trained, found_depth, put_in_order
from hsprobe.diagnose.values import Difference, difference
from hsprobe.errors import HsprobeError


@dataclass
class Gatherer:
    """The comparisons between two sides.

    Args:
        rows: most rows to identify chunks on (the direct comparison always takes all).
        tolerance: measured noise, None for the model's alone.
    """

    train: Side
    infer: Side
    rows: int
    tolerance: Tolerance | None = None
    notes: list[str] = field(default_factory=list)

    def run(self) -> Evidence:
        """Raises HsprobeError where nothing can be compared."""
        self.serving = Serving.of(self.infer.trace.provenance)
        self.num_layers = self.infer.num_layers or self.train.num_layers
        # Without a number of layers, as deep as any common model.
        self.noise = Noise(self.num_layers or 32, self.tolerance)
        served, trained = self.infer.chunked(), self.train.chunked()
        anchor_train, anchor_infer = self._anchors(trained, served)
        coverage = cover(self.train.trace, self.infer.trace, anchor_train, anchor_infer)
        tokens = self._tokens(anchor_train, anchor_infer)
        if not coverage.matched:
            self._refuse_without_rows(coverage, tokens)
            return self._of_tokens(coverage, tokens)
        served_lanes = chunk_lanes(served, self.infer.hidden)
        chosen = self._trained(trained, served, served_lanes)
        chunks = self._chunks(served_lanes, chosen) if served else []
        handed, widths = self._handed()
        stream = self._stream(chosen, served is None)
        differences = [d for chunk in chunks if (d := self._difference(chunk)) is not None]
        streams_differ = any(not found.line.ok for found in stream)
        return Evidence(
            serving=self.serving,
            hidden=self.infer.hidden,
            num_layers=self.num_layers,
            served=served,
            trained=trained,
            has_depths=bool(depth_candidates(self.infer, self.train)),
            trained_chunks=len(chosen),
            served_chunks=len(served_lanes),
            trained_depths=[t.depth for t in chosen],
            trained_margins=[t.margin if t.source == "identified" else None for t in chosen],
            claimed_depths=served_depths(self.serving, served, len(served_lanes)),
            chunks=chunks,
            layers=[found.line for found in stream],
            divergence=first_divergence(stream, self.infer.trace),
            handed=handed,
            handed_noise=self._handed_noise(),
            handed_widths=widths,
            coverage=coverage,
            all_served=self.all_served if served else [],
            differences=differences,
            tokens=tokens,
            weights=served_weights(self.train, self.infer) if differences or streams_differ else None,
            notes=self.notes,
        )

    def _anchors(self, trained: Stack | None, served: Stack | None) -> tuple[Stack, Stack]:
        """The two stacks whose rows stand for coverage."""
        train_layers, infer_layers = self.train.layers, self.infer.layers
        anchor_train = trained or next((lane.stack for lane in train_layers.values()), None)
        anchor_infer = served or next((lane.stack for lane in infer_layers.values()), None)
        for anchor, side in ((anchor_train, self.train), (anchor_infer, self.infer)):
            if anchor is None:
                raise HsprobeError(
                    f"{side.trace.path} holds no hidden states of the target, only {', '.join(side.stacks)}.",
                    "Capture with '--sites aux,layer'.",
                )
        assert anchor_train is not None
        assert anchor_infer is not None
        return anchor_train, anchor_infer

    def _tokens(self, train: Stack, infer: Stack) -> Tokens:
        """How the prompts of both sides compare."""
        found = compare_prompts(self.train.trace, self.infer.trace)
        lane = chunk_lanes(train, self.train.hidden)[0]
        # The depth declared, else chunk against chunk: either will do where only rows are in question.
        served = self.infer.layers.get(lane.depth) or chunk_lanes(infer, self.infer.hidden)[0]
        noise = Level.widest(self._levels(lane.depth, served.stack, train).values()).expected
        found.shifted = shifted_ids(found, lane, served, noise)
        return found

    def _refuse_without_rows(self, coverage: Coverage, tokens: Tokens) -> None:
        if tokens.many:
            return
        drift = coverage.drifts[0] if coverage.drifts else None
        why = next(iter(coverage.reasons), "no token prefix is the same")
        where = f" from position {drift.position} on" if drift and "differ" in why else ""
        raise HsprobeError(
            f"None of the {coverage.train_rows:,} training rows has a partner in "
            f"{self.infer.trace.path}: {why}{where}.",
            f"Capture with '--prompts {self.train.trace.path}', so that both see the same token ids.",
        )

    def _of_tokens(self, coverage: Coverage, tokens: Tokens) -> Evidence:
        """What can be said where no row has a partner: how the token ids differ."""
        return Evidence(
            serving=self.serving,
            hidden=self.infer.hidden,
            num_layers=self.num_layers,
            served=None,
            trained=None,
            has_depths=bool(depth_candidates(self.infer, self.train)),
            trained_chunks=0,
            served_chunks=0,
            trained_depths=[],
            claimed_depths=[],
            chunks=[],
            layers=[],
            handed=[],
            handed_noise=0.0,
            handed_widths=None,
            coverage=coverage,
            tokens=tokens,
        )

    # Which depth is each training chunk?

    def _trained(
        self, trained: Stack | None, served: Stack | None, served_lanes: list[Lane]
    ) -> list[Trained]:
        if trained is None:
            return self._asked_for(served, len(served_lanes))
        lanes = chunk_lanes(trained, self.train.hidden)
        pairs = [pair(trained, lane.stack) for lane in self.infer.layers.values()]
        if served is not None:
            pairs.append(pair(trained, served))
        candidates = [*depth_candidates(self.infer, self.train), TWIN, STUCK]
        partners: list[Stack | None] = [None] * len(lanes)
        table = self._sampled(lanes, candidates, _union([p.left for p in pairs]), {}, partners)
        found = self._identities(table, lanes, {}, partners)
        result: list[Trained] = []
        for lane, (whole, _) in zip(lanes, found, strict=True):
            depth = label_depth(whole.best) if whole.clear else None
            if lane.depth is not None and not whole.rules_out(Label.of(lane.depth)):
                result.append(Trained(lane, lane.depth, "declared", lane.depth))
            else:
                source = "unknown" if depth is None else "identified"
                result.append(Trained(lane, depth, source, lane.depth, whole.margin))
        return result

    def _asked_for(self, served: Stack | None, count: int) -> list[Trained]:
        """The training side is a whole model: compare with the depths the server was asked for."""
        layers = self.train.layers
        depths = served_depths(self.serving, served, count)
        if served is not None and len(layers) > 1:
            self.notes.append(
                "TRAIN holds every depth, not a draft's chunks: this checks the server against the model, "
                "at the depths its config asks for, not against what a draft was trained on."
            )
        return [Trained(layers.get(d), d, "asked for", None) for d in depths]

    # What is each served chunk?

    def _chunks(self, lanes: list[Lane], chosen: list[Trained]) -> list[ChunkEvidence]:
        count = min(len(lanes), len(chosen))
        directs = self._directs(lanes[:count], chosen[:count])
        names = {j: t.label(j) for j, t in enumerate(chosen)}
        candidates = [*depth_candidates(self.infer, self.train), TWIN, STUCK]
        mine = [t.lane for t in chosen if t.lane is not None and t.source != "asked for"]
        candidates += [Candidate(Label.of(None, lane.chunk or 0), lane) for lane in mine]
        stack = lanes[0].stack
        there = {
            id(c.lane.stack): c.lane.stack for c in candidates if c.lane and c.lane.stack.side == "train"
        }
        theirs = [t.lane.stack if t.lane is not None else None for t in chosen]
        partners = [theirs[k] if k < len(theirs) else None for k in range(len(lanes))]
        rows = _union([pair(stack, s).left for s in there.values()])
        table = self._sampled(lanes, candidates, rows, names, partners)
        found = self._identities(table, lanes, names, partners)
        if self.serving.producer == "sglang" and put_in_order(chosen, [whole for whole, _ in found]):
            names = {j: t.label(j) for j, t in enumerate(chosen)}
            found = self._identities(table, lanes, names, partners)
        declared = served_depths(self.serving, stack, len(lanes))
        chunks = []
        for k, (whole, by_phase) in enumerate(found[:count]):
            trained = chosen[k]
            trace, total, first = self.infer.trace, directs[k].total, directs[k].first_nonfinite
            chunks.append(
                chunk_evidence(
                    k,
                    direct=directs[k],
                    whole=whole,
                    by_phase=by_phase,
                    trained=(trained.depth, trained.source, trained.declared),
                    wanted=trained.label(k),
                    declared_served=declared[k],
                    places=(row_place(stack, trace, total.largest_at), row_place(stack, trace, first)),
                )
            )
        self.all_served = [found_depth(whole, chosen) for whole, _ in found]
        return self._settled(lanes[:count], chosen[:count], chunks, declared)

    def _settled(
        self, lanes: list[Lane], chosen: list[Trained], chunks: list[ChunkEvidence], claimed: list[Depth]
    ) -> list[ChunkEvidence]:
        """The chunks that are not as trained, with what they are instead."""
        if all(chunk.line.state in (State.OK, State.NO_ROWS) for chunk in chunks):
            return chunks
        plain = [TrainedChunk(t.lane, t.depth, t.source) for t in chosen]
        how = settler(self.train, self.infer, lanes, plain, self._levels)
        return [
            chunk
            if chunk.line.state in (State.OK, State.NO_ROWS)
            else how.settle(chunk, lanes[k], plain[k], claimed[k])
            for k, chunk in enumerate(chunks)
        ]

    def _difference(self, chunk: ChunkEvidence) -> Difference | None:
        left = chunk.leftover
        if left is None:
            return None
        depth = left.depth if left.depth >= 0 else None
        noise = Level.widest(self._levels(depth, left.served.stack, left.trained.stack).values()).expected
        return difference(chunk.line.index, left.depth, left.handed, left.served, left.trained, noise)

    def _directs(self, lanes: list[Lane], chosen: list[Trained]) -> list[Direct]:
        directs = [Direct() for _ in lanes]
        groups: dict[int, list[int]] = {}
        for k, trained in enumerate(chosen):
            if trained.lane is not None:
                groups.setdefault(id(trained.lane.stack), []).append(k)
        for members in groups.values():
            jobs: list[tuple[Lane, Lane, Limits]] = []
            for k in members:
                right = chosen[k].lane
                assert right is not None
                levels = self._levels(chosen[k].depth, lanes[k].stack, right.stack)
                jobs.append((lanes[k], right, {phase: level.row_limit for phase, level in levels.items()}))
            for k, direct in zip(members, compare_many(jobs), strict=True):
                directs[k] = direct
        return directs

    def _levels(self, depth: Depth, served: Stack, *others: Stack | None) -> dict[int, Level]:
        """The noise to expect in each phase of a served stack."""
        dtypes = dtypes_between(self.train, self.infer, served, *others)
        return self.noise.levels(depth, dtypes, np.unique(served.keys.phase).tolist())

    def _sampled(
        self,
        lanes: list[Lane],
        candidates: list[Candidate],
        rows: Rows,
        names: dict[int, Label],
        partners: list[Stack | None],
    ) -> Matrix:
        """The lanes against all candidates, on as many rows as it takes to tell what each of them is."""

        def decided(table: Matrix) -> bool:
            return all(
                settled(one)
                for _, by_phase in self._identities(table, lanes, names, partners)
                for one in by_phase.values()
            )

        table = sampled(lanes, candidates, rows, self.rows, decided)
        if len(table.rows) < min(self.rows, len(rows)):
            side = "TRAIN" if lanes[0].stack.side == "train" else "INFER"
            self.notes.append(
                f"{lanes[0].stack.name} in {side} was identified on {len(table.rows):,} of {len(rows):,} "
                f"rows, enough to be misled once in {1 / WRONG:,.0f} times at most; all rows are compared "
                "directly."
            )
        return table

    def _identities(
        self, table: Matrix, lanes: list[Lane], names: dict[int, Label], partners: list[Stack | None]
    ) -> list[tuple[Identity, dict[int, Identity]]]:
        """For each lane, over all rows and by phase. `partners`: the stacks they will be compared with."""
        labels = table.labels(names)
        result = []
        for q, lane in enumerate(lanes):
            errors = without_own(table, q)
            first = identify(errors, labels, Level(0.0))
            depth = label_depth(first.best)
            present = np.unique(table.phases).tolist()
            levels = self._levels(depth, lane.stack, partners[q])
            here = [levels[phase] for phase in present] or list(levels.values())
            whole = identify(errors, labels, Level.widest(here))
            phases = {
                phase: identify(errors[:, table.phases == phase], labels, levels[phase]) for phase in present
            }
            result.append((whole, phases))
        return result

    # The stream itself, and what the draft is handed

    def _stream(self, chosen: list[Trained], no_served: bool) -> list[Measured]:
        others: dict[Depth, Lane] = dict(self.train.layers)
        if no_served:
            others.update({t.depth: t.lane for t in chosen if t.lane is not None and t.depth is not None})
        return measure(self.infer.layers, others, self._levels)

    def _handed(self) -> tuple[list[Direct], tuple[int, int] | None]:
        aux, handed = self.infer.stacks.get("aux"), self.infer.stacks.get("draft.input")
        if aux is None or handed is None:
            return [], None
        widths = (aux.width, handed.width)
        if aux.width != handed.width:
            return [], widths
        limit = Level(self._handed_noise()).row_limit
        pairs: Pairs = by_context(handed.keys, aux.keys)
        lanes = zip(chunk_lanes(handed, self.infer.hidden), chunk_lanes(aux, self.infer.hidden), strict=True)
        jobs: list[tuple[Lane, Lane, Limits]] = [(a, b, limit) for a, b in lanes]
        return compare_many(jobs, pairs), widths

    def _handed_noise(self) -> float:
        """Both are of one capture, of which a tolerance between two captures says nothing."""
        dtypes = dtypes_between(self.infer, self.infer, self.infer.stacks.get("aux"))
        return Noise(self.noise.num_layers).level(None, dtypes).expected


def _union(parts: list[Rows]) -> Rows:
    return np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
