"""What `hsprobe impact` found out. Plain data, no arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

from hsprobe.diagnose.model import SideSummary


@dataclass(frozen=True)
class Acceptance:
    """What a chain of drafts reaches over all requests, as SGLang counts it.

    Attributes:
        tokens: completion tokens, the one that prefill gives included.
        passes: verify passes that they took.
        accepted: accepted[k] passes had k drafted tokens accepted. A predicted pass that ran past the end of
            its request is not among them, since what it would have had accepted is not known.
    """

    tokens: int
    passes: int
    accepted: list[int] = field(default_factory=list)

    @property
    def length(self) -> float | None:
        """Tokens a verify pass; None without a pass."""
        return self.tokens / self.passes if self.passes else None

    @property
    def steps(self) -> list[float | None]:
        """For each drafting step: how often it was accepted, of the passes in which all before it were."""
        found: list[float | None] = []
        for step in range(1, len(self.accepted)):
            reached = sum(self.accepted[step - 1 :])
            found.append(sum(self.accepted[step:]) / reached if reached else None)
        return found


@dataclass(frozen=True)
class Reported:
    """The server's own counters, and the prediction for the very same requests.

    Attributes:
        requests: how many requests both are about.
        server, predicted: over these.
        error: how far the predicted length is off, relative to the server's.
    """

    requests: int
    server: Acceptance
    predicted: Acceptance

    @property
    def lacks(self) -> float:
        """Accept length that the server falls short of the prediction by."""
        return (self.predicted.length or 0.0) - (self.server.length or 0.0)

    @property
    def error(self) -> float | None:
        if self.server.length is None or self.predicted.length is None:
            return None
        return self.predicted.length / self.server.length - 1


@dataclass(frozen=True)
class Cost:
    """What one finding, or several that cannot be taken apart, cost.

    Attributes:
        codes, titles: of the findings.
        alone: acceptance with the training side's states, spoilt by this alone.
        mended: acceptance with the served states, this alone undone.
        loses: accept length that it costs alone, from the training side's.
        gains: accept length that undoing it alone gives back.
    """

    codes: list[str]
    titles: list[str]
    alone: Acceptance
    mended: Acceptance
    loses: float
    gains: float


@dataclass(frozen=True)
class ImpactReport:
    """Everything `hsprobe impact` found out.

    Attributes:
        draft: the folder of the draft that was run.
        steps: drafted tokens a verify pass.
        trained, served: acceptance with either side's states, over the same requests.
        loses: accept length that the served states cost.
        noise: how much of it could be chance: two standard errors over the requests.
        lost: whether the served side loses acceptance beyond noise, by its states or by its draft.
        states_cost: whether the states are to blame for it. draft_costs: whether the server's own draft is,
            which accepts less than the same draft does offline on the same states.
        draft_faults: what its draft does otherwise, in words, where it costs and was recorded.
        reported: None where the server counted nothing.
        requests, left_out: requests run, and why others were not -> how many.
        filled: rows of one side that the other lacks, taken from it -> how many, by side lacking them.
    """

    draft: str
    steps: int
    train: SideSummary
    infer: SideSummary
    trained: Acceptance
    served: Acceptance
    loses: float
    noise: float
    lost: bool
    states_cost: bool
    draft_costs: bool
    reported: Reported | None
    costs: list[Cost]
    requests: int
    heads: int
    left_out: dict[str, int] = field(default_factory=dict)
    filled: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    draft_faults: list[str] = field(default_factory=list)
