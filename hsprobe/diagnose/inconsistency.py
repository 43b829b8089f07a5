"""The findings of a comparison of a server with itself."""

from __future__ import annotations

from collections.abc import Sequence

from hsprobe.compare.noise import MEDIAN_ALLOWANCE
from hsprobe.diagnose.consistency import ACCOUNT, HANDOVER, Comparison, SiteLine
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.faults import draft_input, inconsistent, layer_set, one_phase, unexplained
from hsprobe.diagnose.model import Finding, Mend
from hsprobe.diagnose.naming import depth_name, plural
from hsprobe.diagnose.wording import figure

_MOST_SITES = 4


def findings(comparisons: Sequence[Comparison]) -> list[Finding]:
    """One finding a comparison in which something differs, the handover to the draft first."""
    ranks = {HANDOVER: 10, ACCOUNT: 15}
    found = [_finding(c, ranks.get(c.kind, 30)) for c in comparisons if c.bad]
    return sorted(found, key=lambda finding: finding.rank)


def _finding(found: Comparison, rank: int) -> Finding:
    bad = found.bad
    worst = max(bad, key=lambda site: site.line.over)
    return _class(found).finding(
        _title(found),
        rank=rank,
        # That rows which should be equal differ is measured, not inferred.
        confidence=1.0,
        evidence=[*_first(found), *(_proof(site) for site in bad[:_MOST_SITES]), *_rest(bad)],
        mend=Mend(steps=[_step(found)]),
        agree=worst.line.over,
        rows=worst.line.rows,
        tally="rows differ",
    )


def _class(found: Comparison) -> Explanation:
    if found.kind == HANDOVER:
        return draft_input.EXPLANATION
    if found.kind == ACCOUNT:
        # Where most rows are the depth that the server says, the ids are not what is wrong.
        median = max(site.line.error / site.line.noise for site in found.bad)
        return layer_set.EXPLANATION if median > MEDIAN_ALLOWANCE else unexplained.EXPLANATION
    return one_phase.EXPLANATION if _only_aux(found) else inconsistent.EXPLANATION


def _only_aux(found: Comparison) -> bool:
    """Whether a phase hands over something else, though it computes the same stream as another."""
    streamed = [site for site in found.sites if site.site.startswith("layer/")]
    handed = [site for site in found.bad if site.site.startswith("aux")]
    return found.left != found.right and bool(streamed and handed) and all(s.line.ok for s in streamed)


def _title(found: Comparison) -> str:
    sites = f"{len(found.bad)} of {plural(len(found.sites), 'site')}"
    if found.kind == HANDOVER:
        return f"the draft is not handed what the target computed: draft.input differs from aux in {sites}"
    if found.kind == ACCOUNT:
        return f"aux is not made of the depths that the server says it is, in {sites}"
    if found.left == found.right:
        return f"{found.left} gives other states in another pass for the same tokens, at {sites}"
    return f"{found.left} gives other states than {found.right} for the same tokens, at {sites}"


def _first(found: Comparison) -> list[str]:
    first = found.divergence
    if first is None:
        return []
    request = "an unknown request" if first.request is None else f"request {first.request}"
    return [
        f"first at {depth_name(first.depth)}: {request}, position {first.position}, token {first.token}; "
        f"error {figure(first.error)}, expected {figure(first.noise)}"
    ]


def _proof(site: SiteLine) -> str:
    line = site.line
    proof = (
        f"{site.site}: error {figure(line.error)}, noise {figure(line.noise)}; "
        f"{line.over:,} of {line.rows:,} rows differ"
    )
    return f"{proof}, most at {site.worst_at}, {figure(site.worst)}" if site.worst_at else proof


def _rest(bad: Sequence[SiteLine]) -> list[str]:
    more = len(bad) - _MOST_SITES
    return [f"and {plural(more, 'more site')}"] if more > 0 else []


def _step(found: Comparison) -> str:
    if found.kind == HANDOVER:
        return "Look at what lies between the logits processor of the target and the draft's first layer."
    if found.kind == ACCOUNT:
        return "Compare with a reference of the whole model, which says which depths these are."
    if found.left == found.right:
        return "Look at what one pass leaves behind for the next: KV cache, prefix cache, static buffers."
    return (
        f"Look at what only one of {found.left} and {found.right} passes through; begin with "
        "--disable-cuda-graph and another attention backend, and compare again."
    )
