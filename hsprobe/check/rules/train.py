"""CK8xx: what the draft was trained on, from a trace, against what will be captured."""

from __future__ import annotations

from collections.abc import Iterator

from hsprobe.check.model import Said, Severity, rule
from hsprobe.check.rules.depths import ids_key
from hsprobe.check.setup import Setup
from hsprobe.check.wording import depth_list
from hsprobe.diagnose.naming import listed
from hsprobe.formats.sglang_ids import ids_for

_SOURCE = "docs/trace-format.md"


@rule(
    "CK801",
    "TRAINED_DEPTHS",
    Severity.ERROR,
    summary="the draft was trained on other depths than SGLang will capture",
    why="Every chunk of a wrong depth is a state that the draft never saw. Nothing crashes; the "
    "acceptance length falls.",
    mend="Set the ids that the target's class reads as the trained depths.",
    sources=(_SOURCE, "https://github.com/sgl-project/sglang/pull/25454"),
)
def trained_depths(setup: Setup) -> Iterator[Said]:
    """Sets of depths."""
    train, found, layers = setup.train, setup.captured, setup.target.num_layers
    if train is None or train.depths is None or found.depths is None or layers is None:
        return
    if sorted(train.depths) == found.depths:
        return
    served = "the final state" if found.final else f"depths {depth_list(found.depths)}"
    wanted = depth_list(train.depths)
    if train.sure:
        text, severity = f"the draft was trained on depths {wanted}, and SGLang will capture {served}", None
    else:
        text = f"{train.producer} takes depths {wanted} by default, and SGLang will capture {served}"
        severity = Severity.WARNING
    if found.final:
        yield Said(text, severity=severity, mend=("Serve with EAGLE3, with use_aux_hidden_state true.",))
        return
    reach = ids_for(setup.target.architecture, train.depths, layers, setup.version, found.family)
    if reach.ids is None:
        yield Said(text, severity=severity, mend=(f"No ids reach these depths: {reach.reason}.",))
        return
    old = "not set" if found.ids is None else str(found.ids)
    change = f"{ids_key(found)}: {old}  ->  {reach.ids}"
    if train.sure:
        yield Said(text, change=change)
    else:
        mend = f"If the dump was made with the default: {change}. Else give its ids with --train-layers."
        yield Said(text, severity=severity, mend=(mend,))


@rule(
    "CK802",
    "TRAINED_ORDER",
    Severity.ERROR,
    summary="the draft was trained on its chunks in another order than SGLang's",
    why="SGLang concatenates in ascending layer order whatever the order of the ids; fc multiplies each "
    "chunk by the columns that another was trained with.",
    mend="Put the column blocks of fc.weight in ascending order of the layers, or train again.",
    sources=("https://github.com/ml-explore/mlx-lm/pull/1469", _SOURCE),
)
def trained_order(setup: Setup) -> Iterator[Said]:
    """Depths of the training vector that do not ascend."""
    train = setup.train
    if train is None or train.depths is None or train.depths == sorted(train.depths):
        return
    order = sorted(range(len(train.depths)), key=lambda k: (train.depths or [])[k])
    yield Said(
        f"the training vector holds depths {listed(train.depths)} in this order; SGLang hands them over as "
        f"{listed(sorted(train.depths))}",
        mend=(f"Put the column blocks of fc.weight in the order {order}, or train again.",),
    )


@rule(
    "CK803",
    "TRAINED_MODEL",
    Severity.ERROR,
    summary="the training trace is of another target",
    why="States of another model, or of another size, are nothing that this draft can be compared with.",
    mend="Give the trace of the training run of this draft and this target.",
    sources=(_SOURCE,),
)
def trained_model(setup: Setup) -> Iterator[Said]:
    """Class, number of layers and width."""
    if setup.train is None:
        return
    told = setup.train.model
    for key, actual, words in (
        ("architecture", setup.target.architecture, "class"),
        ("num_layers", setup.target.num_layers, "number of layers"),
        ("hidden_size", setup.target.hidden_size, "hidden size"),
    ):
        trained = told.get(key)
        plain = isinstance(trained, str | int) and not isinstance(trained, bool)
        if plain and trained and actual and trained != actual and str(trained).isprintable():
            yield Said(
                f"the {words} of the target is {actual}, that of the training trace {str(trained)[:100]}",
                # The text part of a wrapped model is trained on under its own name.
                severity=Severity.WARNING if key == "architecture" else None,
            )


@rule(
    "CK804",
    "TRAINED_UNKNOWN",
    Severity.NOTE,
    summary="the training trace does not say which depths it holds",
    why="A reference of the whole model fits any ids, and some producers do not write down their layers.",
    mend="Compare with hsprobe diff, which finds the depths from the values.",
    sources=(_SOURCE,),
)
def trained_unknown(setup: Setup) -> Iterator[Said]:
    """No declared depths."""
    train = setup.train
    if train is not None and train.depths is None:
        what = (
            "is a reference of the whole model"
            if train.whole
            else "does not say which depths its chunks have"
        )
        yield Said(f"{train.path} {what}: the depths cannot be compared")


@rule(
    "CK805",
    "TRAINED_DTYPE",
    Severity.NOTE,
    summary="the training states were computed in another dtype than the target's config asks for",
    why="The states differ by rounding, which grows with the depth. It is no fault, and a small cost.",
    mend="Let hsprobe diff say how large the difference is.",
    sources=("docs/noise.md",),
)
def trained_dtype(setup: Setup) -> Iterator[Said]:
    """dtype of the trace's model against the config's."""
    if setup.train is None:
        return
    told, actual = setup.train.model.get("dtype"), setup.target.dtype
    if isinstance(told, str) and actual is not None and told.isprintable() and told != actual:
        yield Said(f"the training states were computed in {told[:40]}, and the target's config says {actual}")
