"""The change that mends a wiring, in the served model's own convention."""

from __future__ import annotations

from collections.abc import Sequence

from hsprobe.diagnose.evidence import Evidence, Serving
from hsprobe.diagnose.model import Mend
from hsprobe.diagnose.naming import listed
from hsprobe.formats.sglang_ids import Rule, class_rule, depths_of, ids_for

KEY = "eagle_aux_hidden_state_layer_ids"


def ids_mend(evidence: Evidence) -> Mend:
    """The ids that make the server hand over the depths that the draft was trained on."""
    wanted = evidence.wanted_depths
    if "final" in evidence.trained_depths:
        return Mend(
            steps=["No ids make SGLang hand over the final norm's output; train on depths before it."]
        )
    if wanted is None:
        return Mend(
            steps=[
                "The depths the draft was trained on are not known, so no ids can be given: declare them in "
                "the dump, or capture every depth ('--sites aux,layer') so that they can be identified."
            ]
        )
    serving = evidence.serving
    layers = serving.num_layers or evidence.num_layers
    if serving.producer != "sglang" or layers is None:
        return Mend(steps=[f"Serve depths {listed(sorted(wanted))}.", *order_steps(evidence)])
    reach = ids_for(serving.architecture, wanted, layers, serving.version)
    if reach.ids is None:
        return Mend(
            steps=[
                f"No ids make SGLang hand over depths {listed(sorted(wanted))}: {reach.reason}. "
                "Train the draft on depths that it can capture.",
                *order_steps(evidence),
            ]
        )
    if reach.ids == serving.ids:
        return Mend(
            steps=[
                f"The ids {serving.ids} already ask for these depths: check that the capture was made with "
                "the draft config it names.",
                *order_steps(evidence),
            ]
        )
    old = "not set" if serving.ids is None else str(serving.ids)
    steps = [_place(serving), *_rule_steps(serving, layers), *order_steps(evidence)]
    return Mend(f"{KEY}: {old}  ->  {reach.ids}", steps)


def order_steps(evidence: Evidence) -> list[str]:
    """What to do about a training order that SGLang cannot serve; empty where the order is ascending."""
    wanted = evidence.wanted_depths
    if wanted is None or wanted == sorted(wanted):
        return []
    order = sorted(range(len(wanted)), key=lambda j: wanted[j])
    return permutation_steps(order, sorted(wanted), sglang=evidence.serving.producer == "sglang")


def permutation_steps(order: Sequence[int], depths: Sequence[int] | None, *, sglang: bool) -> list[str]:
    """How to bring the training chunks into the served order.

    Args:
        order: served position -> training chunk.
        depths: the served depths, where they are known.
    """
    order = list(order)
    steps = []
    if sglang:
        steps.append(
            "SGLang concatenates in ascending layer order whatever the order of the ids: no ids mend this."
        )
    as_depths = f" (depths {listed(depths)})" if depths is not None else ""
    steps.append(f"Write the training dump's chunks in the order {order}{as_depths} and train again;")
    steps.append(f"or keep the draft and put the column blocks of its fc.weight in the order {order}.")
    return steps


def _place(serving: Serving) -> str:
    where = serving.draft_config or "the draft's config.json"
    return f'Set it in "eagle_config" of {where}.'


def _rule_steps(serving: Serving, layers: int) -> list[str]:
    """Explain the rule where it is one that surprises."""
    entry = class_rule(serving.architecture, serving.version)
    if entry.rule is Rule.OUTPUT:
        return []
    version = f"SGLang {serving.version}" if serving.version else "SGLang"
    steps = [f"{version} reads the ids of {serving.architecture} by a rule of its own: {entry.rule.value}."]
    if serving.ids is not None:
        read = depths_of(serving.architecture, serving.ids, layers, serving.version)
        steps.append(f"{serving.ids} therefore means depths {listed(read)}.")
    return steps
