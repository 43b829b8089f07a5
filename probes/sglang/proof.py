"""On the first passes it records, each probe shows that it sees what it says; one that does not is disarmed.

What was decided, and why. A probe may be disarmed for misreading, never for a server that is wired wrongly:
to report that is what hsprobe is for. So a probe is held only against what it was handed at the same moment:

- ``layer`` and ``mid`` are what the norm of the next part was given: that norm, applied to a few of the rows
  that were taken, has to give what SGLang handed to that part. Where that cannot be compared (a quantized
  input, rows that are gathered on the way) the state before plus the branch's output has to give what was
  taken. Weights, branches and the model's own arithmetic cancel out of both, so a fault in them changes
  neither. A layer whose state never comes by is a place that was not found. Any of these disarms the site.
- ``labels`` (the rows' tokens, positions and requests) disarm everything where the lengths contradict one
  another. Positions that do not follow from the lengths are told only: the server may compute with them.
- ``embed`` is a row of the embedding's weights for each labelled token: that shows the labels, too.
- ``aux``, ``logits_processor.*`` and the draft's sites are arguments and outputs as they pass. Whether they
  are the depths that the server declares is told, and nothing is disarmed: it may be the fault to be found.

Sums over ranks are not taken again for this: no collective is added. A norm given parts that were never
summed holds, as the model itself computes with them; comparing ranks tells those. Rounding is allowed for by
element and dtype, and a test that the state one part earlier would pass as well shows nothing. Numbers are
read once, at the end of each of the first passes without a CUDA graph: that waits for the device, and after
these passes nothing of it is left in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hsprobe.probes.sglang.identity import Sample, norm_score, same_score, sum_score
from hsprobe.probes.sglang.labels import Pass

PASSES = 4
"""Passes of a model, without CUDA graphs, within which its probes are to show what they see."""
MOST_PASSES = 64
"""Passes of any kind for that: graphs may be all that ever runs."""
SILENT_PASSES = 2
"""A state that has not come by in so many passes does not come by."""
ENOUGH = 0.95
"""Share of numbers that agree where two tensors are the same up to rounding."""
AS_THEY_COME = ("aux", "logits_processor.stored", "draft.recycled")
"""Sites that are there in some servers only."""
LABELS = "labels"
_NO_PASS = "no pass was recorded that could show it"
_ONLY_GRAPHS = "only CUDA graphs ran what could show it"
PROVEN, UNPROVEN, DISARMED = "proven", "unproven", "disarmed"

Depth = int | None


@dataclass
class Claim:
    """What a site says of itself.

    Attributes:
        depths: what is to come by; None for a site without depths.
        compared: shown by numbers, not by coming by alone.
        strict: refuted by numbers that differ, or by silence.
        shown, came: depths that were shown, that came by.
        in_graphs: whether passes ran that could not be looked at.
        doubts: depth -> why it is not shown; the depth None for all.
        refuted: how it was shown to misread.
        failed: why its probe was disarmed otherwise.
    """

    site: str
    draft: bool
    depths: set[Depth]
    compared: bool
    strict: bool
    shown: set[Depth] = field(default_factory=set)
    came: set[Depth] = field(default_factory=set)
    doubts: dict[Depth, str] = field(default_factory=dict)
    refuted: str = ""
    failed: str = ""
    in_graphs: bool = False

    @property
    def settled(self) -> bool:
        return bool(self.refuted or self.failed) or self.depths <= self.shown

    def header(self) -> dict[str, Any]:
        """As the spool's record of it."""
        if self.refuted:
            return {"site": self.site, "state": DISARMED, "why": self.refuted, "refuted": True}
        if self.failed:
            return {"site": self.site, "state": DISARMED, "why": self.failed}
        if self.settled:
            return {"site": self.site, "state": PROVEN, "why": ""}
        return {"site": self.site, "state": UNPROVEN, "why": self._why()}

    def _why(self) -> str:
        lacking = sorted(depth for depth in self.depths - self.shown if depth is not None)
        whys = dict.fromkeys(self.doubts[depth] for depth in (*lacking, None) if depth in self.doubts)
        if not whys:
            whys = {_ONLY_GRAPHS if self.in_graphs else _NO_PASS: None}
        which = f"depth {', '.join(map(str, lacking))}: " if self.shown and lacking else ""
        return which + "; ".join(whys)


@dataclass(frozen=True)
class Score:
    """Two shares of numbers that agree: with what was claimed, and with what would tell nothing.

    Attributes:
        rank: of several that tell something, the lowest counts.
    """

    claim: Claim
    depth: Depth
    rank: int
    shares: torch.Tensor
    if_not: str


class Proof:
    """What the probes of one process have shown.

    Args:
        disarm: ends a site's recording, for a reason.

    Attributes:
        open: by whether it is the draft's: whether a model's probes have anything left to show.
        active: whether the pass under way is looked at.
    """

    def __init__(self, disarm: Callable[[str, str], None]) -> None:
        self.open = {False: True, True: True}
        self.active = False
        self._disarm = disarm
        self._claims: dict[str, Claim] = {}
        self._passes = {False: 0, True: 0}
        self._looked_at = {False: 0, True: 0}
        self._scores: list[Score] = []
        self._samples: dict[tuple[str, Depth], Sample] = {}
        self._declared: Sequence[int] = ()
        self._final: Sample | None = None
        self._watches: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self._watching = False
        self._told: dict[str, dict[str, Any]] = {}
        self.expect(LABELS, compared=True)

    # What probes tell

    def expect(
        self,
        site: str,
        depths: Iterable[Depth] = (None,),
        *,
        draft: bool = False,
        compared: bool = False,
        strict: bool = False,
    ) -> None:
        """A site is to come by at these depths; more may follow in another call."""
        claim = self._claims.setdefault(site, Claim(site, draft, set(), compared, strict))
        claim.depths |= set(depths)

    def watch(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """What to put around the target's parts for its first passes, and how to undo that."""
        self._watches.append((begin, end))

    def doubt(self, site: str, why: str, depth: Depth = None) -> None:
        """Something stands in the way of showing it."""
        if site in self._claims:
            self._claims[site].doubts[depth] = why

    def stopped(self, site: str, why: str) -> bool:
        """A site's probe was disarmed; whether anything was expected of it."""
        found = [one for one in self._claims.values() if f"{one.site}.".startswith(f"{site}.")]
        for claim in found:
            if not claim.refuted:
                claim.failed = claim.failed or why
        return bool(found)

    def graph(self, *, draft: bool) -> None:
        """A pass ran from a CUDA graph, in which nothing can be looked at."""
        if self.open[draft]:
            for claim in self._of(draft):
                claim.in_graphs = True

    def saw(self, site: str, depth: Any, tensor_TW: torch.Tensor, depths: Sequence[int] | None) -> None:
        """A tensor of the pass under way was taken."""
        if site not in self._claims and site in AS_THEY_COME:
            self.expect(site, draft=site.startswith("draft."), compared=not site.startswith("draft."))
        claim = self._claims.get(site)
        if claim is None:
            return
        depth = depth if depth in claim.depths else None
        claim.came.add(depth)
        sample = Sample.of(tensor_TW)
        if sample is not None:
            self._samples[site, depth] = sample
        if depths is not None:
            self._declared = depths

    def part(
        self, site: str, depth: int, before: Sample | None, branch: Sample | None, result: Any, norm: Any
    ) -> None:
        """A part of the target was handed its input.

        Args:
            before, branch: the state before, and what was to be added; None where it cannot be told.
            result: what the part was handed.
            norm: the norm that made it.
        """
        claim, taken = self._claims.get(site), self._samples.get((site, depth))
        if claim is None or taken is None or not claim.strict:
            return
        scores = (
            (0, norm_score(taken, before, result, norm), "it is not what the norm there was given"),
            (1, sum_score(taken, before, branch), "it is not the state before plus what was to be added"),
        )
        told = False
        for rank, shares, if_not in scores:
            if shares is not None:
                told = True
                self._scores.append(Score(claim, depth, rank, shares, f"at depth {depth}, {if_not}"))
        if not told:
            claim.doubts.setdefault(
                depth, "neither the norm's output nor the sum before it can be compared here"
            )

    def final(self, normed_TH: Any) -> None:
        """What the target's final norm put out in this pass."""
        self._final = Sample.of(normed_TH)

    def same(self, site: str, expected: Sample | None, if_not: str, depth: Depth = None) -> None:
        """What was taken there is to be this."""
        claim, taken = self._claims.get(site), self._samples.get((site, depth))
        if claim is None or taken is None or expected is None:
            return
        shares = same_score(taken, expected)
        if shares is not None:
            self._scores.append(Score(claim, depth, 2, shares, if_not))

    # The order of events

    def begin(self, current: Pass, batch: Any) -> None:
        """A pass is about to be recorded, of a model whose probes have something left to show."""
        draft = current.form.is_draft
        self._scores, self._samples, self._final = [], {}, None
        self.active = True
        if not draft and not self._watching:
            self._watching = True
            for start, _ in self._watches:
                start()
        self._labels(current, batch)

    def end(self, current: Pass) -> list[dict[str, Any]]:
        """A pass has ended; returns what there is to tell anew."""
        self.active = False
        draft = current.form.is_draft
        self._looked_at[draft] += 1
        if not current.graph:
            self._passes[draft] += 1
            self._compare()
            self._judge()
            self._listen(draft)
        self._scores, self._samples, self._final = [], {}, None
        self._close(draft)
        for claim in self._of(draft):
            if claim.refuted:
                self._disarm("pass" if claim.site == LABELS else claim.site, claim.refuted)
        return self.news()

    def give_up(self, why: str) -> None:
        """The self-test itself failed."""
        for claim in self._claims.values():
            if not claim.settled:
                claim.doubts = {None: f"the self-test failed: {why}"}
        self.active = False
        self.open = {False: False, True: False}
        self._stop_watching()

    def news(self, *, everything: bool = False) -> list[dict[str, Any]]:
        """What each probe has shown so far; only what has changed unless everything is asked for."""
        found = {site: claim.header() for site, claim in self._claims.items()}
        told, self._told = self._told, found
        return [header for site, header in found.items() if everything or told.get(site) != header]

    def _of(self, draft: bool) -> list[Claim]:
        return [claim for claim in self._claims.values() if claim.draft == draft]

    def _labels(self, current: Pass, batch: Any) -> None:
        form, claim = current.form, self._claims[LABELS]
        counted = {
            "positions": current.positions.shape[0],
            "token ids": form.n_rows if current.ids is None else current.ids.shape[0],
            "rows of its requests": sum(form.req_rows),
        }
        if set(counted.values()) != {form.n_rows}:
            named = ", ".join(f"{count} {what}" for what, count in counted.items())
            claim.refuted = f"the lengths of a {form.phase} batch contradict one another: {named}"
            self._disarm("pass", claim.refuted)
            return
        expected = None if claim.settled else _positions(current, batch)
        if expected is not None:
            agree = (current.positions == expected.to(current.positions.device)).float().mean()
            if_not = f"positions of a {form.phase} pass do not follow from the lengths of its requests"
            self._scores.append(Score(claim, None, 2, torch.stack([agree, agree * 0]), if_not))

    def _compare(self) -> None:
        """What the target handed over, with what was taken before that."""
        aux = self._samples.get(("aux", None))
        final = self._samples.get(("logits_processor.input", None))
        self.same("logits_processor.input", self._final, "it is not what the final norm put out")
        if aux is not None and self._declared:
            parts = [self._samples.get(("layer", depth)) for depth in self._declared]
            beside = Sample.beside(parts)
            if beside is None:
                self.doubt("aux", "the depths that the server declares were not taken in the same pass")
            named = ", ".join(map(str, self._declared))
            self.same("aux", beside, f"it is not depth {named}, as the server declares")
        kept = next((one for one in (aux, final) if one is not None), None)
        self.same("logits_processor.stored", kept, "it is not what the target handed over in this pass")

    def _judge(self) -> None:
        if not self._scores:
            return
        numbers = torch.stack([score.shares.float() for score in self._scores]).tolist()
        best: dict[tuple[str, Depth], tuple[int, Score, float]] = {}
        for score, (agree, rival) in zip(self._scores, numbers, strict=True):
            mute = agree != agree or (agree >= ENOUGH and rival >= ENOUGH)
            key = score.claim.site, score.depth
            if mute:
                score.claim.doubts.setdefault(score.depth, "the state before it would have passed as well")
            elif key not in best or score.rank < best[key][0]:
                best[key] = score.rank, score, agree
        for _, score, agree in best.values():
            claim = score.claim
            if claim.failed:
                continue
            if agree >= ENOUGH:
                claim.shown.add(score.depth)
                continue
            why = f"{score.if_not} ({agree:.0%} of the numbers agree)"
            claim.shown.discard(score.depth)
            claim.doubts[score.depth] = why
            if claim.strict:
                claim.refuted = claim.refuted or why

    def _listen(self, draft: bool) -> None:
        """Who came by, and who did not."""
        for claim in self._of(draft):
            if not claim.compared:
                claim.shown |= claim.came & claim.depths
            silent = claim.depths - claim.came
            if self._passes[draft] < SILENT_PASSES or not silent or claim.settled or claim.site == LABELS:
                continue
            unexplained = sorted(depth for depth in silent if depth is not None and not claim.doubts)
            if claim.strict and unexplained:
                which = ", ".join(map(str, unexplained))
                claim.refuted = claim.refuted or (
                    f"nothing came by for depth {which}: this SGLang's layers hand on their states otherwise"
                )
            elif not claim.doubts:
                claim.doubts = dict.fromkeys(silent, "nothing came by")

    def _close(self, draft: bool) -> None:
        spent = self._passes[draft] >= PASSES or self._looked_at[draft] >= MOST_PASSES
        if not spent and not all(claim.settled for claim in self._of(draft)):
            return
        self.open[draft] = False
        if not draft:
            self._stop_watching()

    def _stop_watching(self) -> None:
        if self._watching:
            for _, stop in self._watches:
                stop()
        self._watching, self._watches = False, []


def _positions(current: Pass, batch: Any) -> torch.Tensor | None:
    """What the lengths of the requests say of a target's positions."""
    form = current.form
    if form.is_draft:
        return None
    if form.phase == "prefill":
        before = getattr(batch, "extend_prefix_lens_cpu", None)
        if before is None:
            return None
        firsts = [int(first) for first in before][: len(form.req_rows)]
        if len(firsts) < len(form.req_rows):
            return None
        runs = [torch.arange(n) + first for n, first in zip(form.req_rows, firsts, strict=True)]
        return torch.cat(runs)
    lengths = getattr(batch, "seq_lens", None)
    if form.phase == "decode" and isinstance(lengths, torch.Tensor) and len(lengths) == form.n_rows:
        return lengths.to(torch.int64) - 1
    return None
