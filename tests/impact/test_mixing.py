"""Undoing one finding leaves the states that the others alone would give."""

import numpy as np
import pytest

from hsprobe.diagnose.gather import Gatherer
from hsprobe.diagnose.registry import findings
from hsprobe.diagnose.sides import check_same_model, open_side
from hsprobe.impact import sources
from hsprobe.impact.mixing import Mixer, named
from hsprobe.impact.texts import texts
from hsprobe.trace.reader import Trace
from tests.diagnose.planted import Case, at, final_norm, no_mlp, residual_twice

DEPTHS = (3, 6, 8)


def late(make):
    """Each row that of the position before."""
    return lambda s: np.concatenate([make(s)[:1], make(s)[:-1]])


@pytest.fixture
def mixed(tmp_path):
    """A function that plants chunks and gives (mixer, {code: index}, mix of a set of codes for request 0)."""
    opened = []

    def plant(made, dumped=None):
        train, infer = Case("", "", trained=DEPTHS, made=made, dumped=dumped).write(tmp_path, "float32")
        traces = Trace.open(train), Trace.open(infer)
        opened.extend(traces)
        sides = open_side(traces[0], "train"), open_side(traces[1], "infer")
        check_same_model(*sides)
        evidence = Gatherer(*sides, 512).run()
        found = findings(evidence)
        served = sources.served(sides[1], received=False)
        trained_source, _ = sources.trained(*sides, tmp_path)
        mixer = Mixer(found, evidence, sides[1], served, trained_source)
        text = texts(traces[1])[0]
        values = served.read(text)[0], trained_source.read(text)[0]
        index = {one.code: number for number, one in enumerate(found)}

        def mix(*codes):
            return mixer.mix(text, *values, frozenset(index[code] for code in codes))

        return mixer, index, mix

    yield plant
    for trace in opened:
        trace.close()


def expected(makes):
    from tests.synthetic import World

    states = World().states(0)
    return np.stack([make(states) for make in makes], axis=1)


def assert_states(found, makes):
    wanted = expected(makes)
    # The last token is never fed back in, so its row is on neither side's mind; the first has none before it.
    np.testing.assert_allclose(found[1:-1], wanted[1:-1], rtol=1e-4, atol=1e-4)


def test_one_finding_is_undone_by_the_training_chunk(mixed):
    mixer, index, mix = mixed([at(0), at(6), at(8)])
    assert set(index) == {"HS102"}
    assert [item.findings for item in mixer.items()] == [frozenset([0])]
    assert_states(mix("HS102"), [at(0), at(6), at(8)])
    assert_states(mix(), [at(3), at(6), at(8)])


def test_findings_of_different_chunks_are_undone_apart(mixed):
    mixer, index, mix = mixed([at(0), no_mlp(6), at(8)])
    assert set(index) == {"HS102", "HS205"}
    assert len(mixer.items()) == 2
    assert_states(mix("HS102"), [at(0), at(6), at(8)])
    assert_states(mix("HS205"), [at(3), no_mlp(6), at(8)])


@pytest.mark.parametrize(
    ("made", "codes", "first", "second"),
    [
        pytest.param(
            [late(at(d - 1)) for d in DEPTHS],
            ("HS101", "HS301"),
            [at(d - 1) for d in DEPTHS],
            [late(at(d)) for d in DEPTHS],
            id="depth-and-rows",
        ),
        pytest.param(
            [at(3), at(6), final_norm(7)],
            ("HS102", "HS201"),
            [at(3), at(6), at(7)],
            [at(3), at(6), final_norm(8)],
            id="depth-and-norm",
        ),
        pytest.param(
            [at(3), late(residual_twice(6)), at(8)],
            ("HS202", "HS301"),
            [at(3), residual_twice(6), at(8)],
            [at(3), late(at(6)), at(8)],
            id="form-and-rows",
        ),
    ],
)
def test_findings_that_meet_in_a_chunk_are_undone_one_by_one(mixed, made, codes, first, second):
    mixer, index, mix = mixed(made)
    assert set(index) == set(codes)
    assert len(mixer.items()) == 2, [named(item.findings, mixer.findings) for item in mixer.items()]
    assert_states(mix(codes[0]), first)
    assert_states(mix(codes[1]), second)
    assert_states(mix(*codes), made)


def test_a_fault_of_the_dump_and_one_of_the_server_in_one_chunk_are_undone_together(mixed):
    dumped = [late(at(3)), at(6), at(8)]
    mixer, index, mix = mixed([at(2), at(6), at(7)], dumped=dumped)
    assert set(index) == {"HS102", "HS301"}
    assert [item.findings for item in mixer.items()] == [frozenset(index.values())]
    assert_states(mix(), dumped)
