"""Right wirings with wrong values, and values that only look wrong."""

from pathlib import Path

import numpy as np
import pytest

from hsprobe.diagnose import Report, State, diff
from hsprobe.errors import HsprobeError
from hsprobe.trace.writer import TraceWriter
from tests.synthetic import Floats, Spoil, World, prompts, write_infer, write_train

DEPTHS = (3, 6, 8)


@pytest.fixture
def train(tmp_path: Path) -> Path:
    return write_train(tmp_path / "t.h5", DEPTHS)


def _codes(report: Report) -> list[str]:
    return [finding.code for finding in report.findings]


def _where(name: str, change: Spoil) -> Spoil:
    """Change the tensors whose name begins so (names end in `@phase`)."""

    def spoil(tensor: str, x: Floats) -> Floats:
        return change(tensor, x) if tensor.startswith(name) else x

    return spoil


class TestBenign:
    """Nothing here is a fault."""

    @pytest.mark.parametrize("reference", ["float32", "bfloat16"])
    def test_bfloat16_against_float32(self, tmp_path: Path, reference: str) -> None:
        other = "bfloat16" if reference == "float32" else "float32"
        left = write_train(tmp_path / "t.h5", DEPTHS, world=World(dtype=reference, loud=True, sink=True))
        right = write_infer(tmp_path / "i.h5", DEPTHS, world=World(dtype=other, loud=True, sink=True))
        report = diff(left, right)
        assert report.same
        assert all(1e-3 < line.error < line.noise for line in report.chunks)

    def test_requests_in_another_order_and_more_of_them(self, tmp_path: Path, train: Path) -> None:
        world = World(requests=[*prompts(3, seed=9), *prompts()[::-1]])
        report = diff(train, write_infer(tmp_path / "i.h5", DEPTHS, world=world))
        assert report.same
        assert report.coverage.share == 1

    def test_a_request_sent_twice(self, tmp_path: Path, train: Path) -> None:
        world = World(requests=prompts() * 2)
        assert diff(train, write_infer(tmp_path / "i.h5", DEPTHS, world=world)).same

    def test_rows_spared_by_a_prefix_cache(self, tmp_path: Path, train: Path) -> None:
        report = diff(train, write_infer(tmp_path / "i.h5", DEPTHS, cached=8))
        assert report.same
        assert report.coverage.matched == report.coverage.train_rows - 32

    def test_one_stray_row_in_many(self, tmp_path: Path) -> None:
        world = World(requests=prompts(12))

        def change(_: str, x: Floats) -> Floats:
            if len(x) == 15:
                x[4] *= 1.7
            return x

        left = write_train(tmp_path / "t.h5", DEPTHS, world=world)
        right = write_infer(tmp_path / "i.h5", DEPTHS, world=world, spoil=_where("aux@prefill", change))
        assert diff(left, right).same

    @pytest.mark.parametrize(("experts", "dtype"), [(8, "bfloat16"), (8, "float32"), (0, "bfloat16")])
    def test_rows_sent_to_other_experts_by_rounding(self, tmp_path: Path, experts: int, dtype: str) -> None:
        world = World(requests=prompts(8), dtype=dtype, experts=experts)
        turned: list[str] = []

        def change(name: str, x: Floats) -> Floats:
            if len(turned) < 4:
                turned.append(name)
                x[0] *= 1.7
            return x

        left = write_train(tmp_path / "t.h5", DEPTHS, world=world)
        right = write_infer(tmp_path / "i.h5", DEPTHS, world=world, spoil=_where("aux@verify", change))
        report = diff(left, right)
        # Only a mixture of experts, and only in half precision, has ties that rounding decides.
        assert report.same == (experts > 0 and dtype == "bfloat16")


class TestNotFinite:
    @staticmethod
    def _holes(_: str, x: Floats) -> Floats:
        x[::3, 64:128] = np.nan
        return x

    def test_in_the_capture(self, tmp_path: Path, train: Path) -> None:
        infer = write_infer(tmp_path / "i.h5", DEPTHS, spoil=_where("aux@prefill", self._holes))
        report = diff(train, infer)
        assert _codes(report) == ["HS502"]
        assert "of the capture hold NaN or Inf" in report.findings[0].title
        assert "the first at request s0, position 0 (prefill)" in report.findings[0].evidence[0]
        bad = report.chunks[1].nonfinite_infer
        assert bad == sum(-(-(len(r) // 2) // 3) for r in prompts())
        assert report.chunks[1].error < report.chunks[1].noise

    def test_in_the_training_dump(self, tmp_path: Path) -> None:
        left = write_train(tmp_path / "t.h5", DEPTHS, spoil=_where("aux", self._holes))
        report = diff(left, write_infer(tmp_path / "i.h5", DEPTHS))
        assert _codes(report) == ["HS502"]
        assert "of the training dump hold" in report.findings[0].title

    def test_does_not_hide_a_wrong_wiring(self, tmp_path: Path, train: Path) -> None:
        infer = write_infer(tmp_path / "i.h5", (2, 5, 7), spoil=_where("aux@prefill", self._holes))
        assert _codes(diff(train, infer)) == ["HS502", "HS101"]

    def test_everywhere_in_a_chunk(self, tmp_path: Path, train: Path) -> None:
        def all_gone(_: str, x: Floats) -> Floats:
            x[:, :64] = np.inf
            return x

        report = diff(train, write_infer(tmp_path / "i.h5", DEPTHS, spoil=_where("aux", all_gone)))
        assert _codes(report) == ["HS502"]
        assert [line.state for line in report.chunks] == [State.NO_ROWS, State.OK, State.OK]


class TestOtherValues:
    def test_coarse_weights_are_not_called_a_layer(self, tmp_path: Path, train: Path) -> None:
        rng = np.random.default_rng(0)

        def coarse(_: str, x: Floats) -> Floats:
            return x * (1 + rng.normal(scale=0.15, size=x.shape).astype(np.float32))

        infer = write_infer(tmp_path / "i.h5", DEPTHS, spoil=coarse, sites=["aux"])
        report = diff(train, infer)
        assert _codes(report) == ["HS501"]
        title = "aux chunks 0, 1 and 2 are depths 3, 6, 8 as trained, in a coarser precision"
        assert report.findings[0].title == title
        assert [line.state for line in report.chunks] == [State.DIFFERENT] * 3
        assert "changed by as little would look the same (HS503)" in report.findings[0].evidence[-1]

    def test_rows_of_one_request_are_found_among_many(self, tmp_path: Path, train: Path) -> None:
        marked = len(prompts()[2]) // 2

        def shift(_: str, x: Floats) -> Floats:
            return np.roll(x, 1, axis=0) if len(x) == marked else x

        report = diff(train, write_infer(tmp_path / "i.h5", DEPTHS, spoil=_where("aux@prefill", shift)))
        codes = _codes(report)
        assert codes == ["HS301"]
        assert report.findings[0].title == (
            "rows of aux chunks 0, 1 and 2 hold the states 1 position before their own in prefill"
        )
        assert any("request s2" in sentence for sentence in report.findings[0].evidence)

    def test_one_vector_in_every_row(self, tmp_path: Path, train: Path) -> None:
        def stuck(_: str, x: Floats) -> Floats:
            x[:, :64] = np.arange(64)
            return x

        report = diff(train, write_infer(tmp_path / "i.h5", DEPTHS, spoil=_where("aux", stuck)))
        assert _codes(report) == ["HS302"]
        assert report.findings[0].title == "aux chunk 0 holds one and the same vector in every row"

    def test_a_sink_row_and_a_loud_channel_hide_no_difference(self, tmp_path: Path) -> None:
        world = World(loud=True, sink=True)

        def partial(_: str, x: Floats) -> Floats:
            quiet = np.ones(x.shape[1], bool)
            quiet[[3, 5, 17, 40]] = False
            quiet[64:] = False
            x[:, quiet] *= 0.9
            return x

        left = write_train(tmp_path / "t.h5", DEPTHS, world=world)
        report = diff(
            left, write_infer(tmp_path / "i.h5", DEPTHS, world=world, spoil=_where("aux@", partial))
        )
        assert [line.state for line in report.chunks] == [State.DIFFERENT, State.OK, State.OK]

    def test_a_handover_that_changes_the_tensor(self, tmp_path: Path, train: Path) -> None:
        def shift(_: str, x: Floats) -> Floats:
            return np.roll(x, 1, axis=0) if len(x) > 1 else x * 1.5

        report = diff(train, write_infer(tmp_path / "i.h5", DEPTHS, spoil=_where("draft.input", shift)))
        assert _codes(report) == ["HS601"]
        assert (
            "draft.input differs from aux for the same tokens in chunks 0, 1 and 2"
            in report.findings[0].title
        )

    def test_a_model_that_departs_at_one_layer(self, tmp_path: Path) -> None:
        def depart(name: str, x: Floats) -> Floats:
            depth = name.split("@")[0].removeprefix("layer/")
            late = int(depth) >= 5 if depth.isdigit() else depth == "logits_processor.input"
            return x * 0.8 if late else x

        left = write_train(tmp_path / "t.h5", every=True)
        report = diff(left, write_infer(tmp_path / "i.h5", (2, 3, 4), spoil=depart))
        assert _codes(report) == ["HS504"]
        assert report.findings[0].title == (
            "the model states agree up to depth 4 (output of layer 3) "
            "and differ from depth 5 (output of layer 4) on"
        )
        assert [line.ok for line in report.layers[:6]] == [True] * 5 + [False]


class TestTrouble:
    """What cannot be compared is an error, not a verdict."""

    def test_another_width_is_another_model(self, tmp_path: Path, train: Path) -> None:
        with pytest.raises(HsprobeError, match=r"64 wide.*32.*different models"):
            diff(train, write_infer(tmp_path / "i.h5", DEPTHS, world=World(width=32)))

    def test_an_empty_capture(self, tmp_path: Path, train: Path) -> None:
        with TraceWriter(tmp_path / "i.h5", {"producer": "sglang"}) as writer:
            writer.add_rank(0, {})
        with pytest.raises(HsprobeError, match="nothing was captured"):
            diff(train, tmp_path / "i.h5")

    def test_other_prompts(self, tmp_path: Path, train: Path) -> None:
        infer = write_infer(tmp_path / "i.h5", DEPTHS, world=World(requests=prompts(seed=77)))
        with pytest.raises(HsprobeError, match=r"None of the 162 training rows has a partner.*--prompts"):
            diff(train, infer)

    def test_a_capture_of_other_sites(self, tmp_path: Path, train: Path) -> None:
        with pytest.raises(HsprobeError, match=r"no hidden states of the target|nothing was captured"):
            diff(train, write_infer(tmp_path / "i.h5", DEPTHS, sites=[]))
