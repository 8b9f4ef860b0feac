"""The sweep over schedules: real calls of a tiny pair, its totals against the texts, table, file and figure."""

import io
import json

import pytest
from rich.console import Console
from test_benchmark import pair, short_prompts  # noqa: F401  (fixtures)

from dspark_hf.benchmark import SweepSettings, run_sweep
from dspark_hf.benchmark.sweep import Cell, MethodTotals, _threshold_curves

METHODS = ["dspark-constant:1", "dspark-constant:3", "dspark-confidence:0.50", "dspark-hardware", "dspark"]


def run(settings: SweepSettings) -> tuple[list[Cell], str]:
    console = Console(record=True, width=160, file=io.StringIO())
    return run_sweep(settings, console), console.export_text()


@pytest.fixture(scope="module")
def result(pair, short_prompts, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("sweep")
    settings = SweepSettings(
        **pair,
        methods=METHODS,
        batch_size=[1, 4],
        prompts=short_prompts,
        max_new_tokens=9,
        json=str(folder / "sweep.json"),
        plot=str(folder / "thresholds.png"),
    )
    return *run(settings), folder


def test_repeats_go_over_the_prompts_again(pair, short_prompts):  # noqa: F811
    settings = {"methods": ["dspark-constant:1"], "batch_size": [2], "temperature": [1.0], "max_new_tokens": 5}
    once, twice = (
        run(SweepSettings(**pair, **settings, prompts=short_prompts, repeats=n))[0][0].methods["plain"] for n in (1, 2)
    )
    assert twice.num_new_tokens == 2 * once.num_new_tokens


class TestRun:
    def test_every_cell_has_every_method(self, result):
        cells, text, _ = result
        assert [(cell.batch_size, cell.temperature) for cell in cells] == [(1, 0.0), (1, 1.0), (4, 0.0), (4, 1.0)]
        assert all([*cell.methods] == ["plain", *METHODS] for cell in cells)
        assert "batch 4" in text and "T = 1" in text and "dspark-hardware" in text
        assert text.count("against the best constant") == 4

    def test_totals_are_those_of_the_calls(self, result):
        for cell in result[0]:
            # Two prompts: two calls of one row, or one call that is filled up to four. Nothing ends early.
            num_rows = 2 if cell.batch_size == 1 else 4
            for name, totals in cell.methods.items():
                assert totals.num_new_tokens == 9 * num_rows
                assert totals.seconds > 0
                if name == "plain":
                    assert totals.num_rounds == 0 and totals.acceptance_length is None
                else:
                    assert totals.accepted <= totals.verified
            one, three = (cell.methods[f"dspark-constant:{n}"] for n in (1, 3))
            # A token of each row comes from the prefill; the others are bonuses and accepted ones.
            assert one.num_rounds + one.accepted == 8 * num_rows
            assert three.verified > one.verified

    def test_files(self, result):
        cells, _, folder = result
        report = json.loads((folder / "sweep.json").read_text())
        assert report["settings"]["json"] == "sweep.json"
        assert str(folder) not in json.dumps(report)
        numbers = report["cells"][3]["methods"]["dspark"]
        assert numbers["ratio_to_plain"] == pytest.approx(cells[3].ratio("dspark"))
        assert (folder / "thresholds.png").read_bytes().startswith(b"\x89PNG")


def totals(rate: float, verified: int = 10, accepted: int = 5) -> MethodTotals:
    return MethodTotals(100, 100 / rate, num_rounds=10, verified=verified, accepted=accepted)


class TestNumbers:
    CELL = Cell(
        1,
        0.0,
        {
            "plain": MethodTotals(100, 10.0),
            "dspark-constant:1": totals(12),
            "dspark-constant:2": totals(15, verified=20, accepted=8),
            "dspark-confidence:0.80": totals(11, verified=4, accepted=3),
            "dspark-confidence:0.30": totals(13, verified=8, accepted=6),
        },
    )

    def test_ratios(self):
        assert self.CELL.ratio("dspark-constant:2") == pytest.approx(1.5)
        assert self.CELL.best_constant == "dspark-constant:2"
        assert self.CELL.methods["dspark-constant:2"].acceptance_length == pytest.approx(1.8)

    def test_the_curve_of_thresholds_starts_with_full_drafts(self):
        (curve,) = _threshold_curves([self.CELL]).values()
        assert curve == [(0.0, 0.4, 1.8), (0.3, 0.75, 1.6), (0.8, 0.75, 1.3)]


class TestSettings:
    def test_the_default_methods_are_all_schedules(self):
        methods = SweepSettings(thresholds=[0.5]).cells(2)[0].method_names
        assert methods[:4] == ["plain", "dspark-constant:1", "dspark-constant:2", "dspark-confidence:0.5"]
        assert {"dspark", "dspark-hardware", "dspark-acceptance", "dspark-entropy"} < set(methods)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"batch_size": []}, "--batch-size and --temperature"),
            ({"temperature": [-1.0]}, "--batch-size and --temperature"),
            ({"batch_size": [0]}, "--batch-size is 0"),
            ({"thresholds": [1.5]}, "--thresholds"),
            ({"methods": ["fastest"]}, "--methods names fastest"),
            ({"methods": ["prompt-lookup"], "batch_size": [2]}, "takes no batch"),
            ({"json": "nowhere/else/x.json"}, "--json is nowhere"),
            ({"num_prompts": 0}, "--num-prompts is 0"),
        ],
    )
    def test_wrong_options_are_named_before_anything_is_loaded(self, settings, message):
        with pytest.raises(ValueError, match=message):
            SweepSettings(**settings)
