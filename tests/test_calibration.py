"""Calibration: numbers against hand-made cases, the fit against a head that is off, the file, and the real rounds."""

import json
import math
import random
import sys

import kit
import pytest
import torch

from dspark_hf import DSparkDrafter, UnsupportedGenerationError
from dspark_hf.calibrating import calibrate
from dspark_hf.calibration import (
    CALIBRATION_NAME,
    Calibration,
    area_under_roc,
    expected_calibration_error,
    fit,
    reliability,
    report,
)
from dspark_hf.calibration_run import CalibrationSettings
from dspark_hf.cli import main
from dspark_hf.figures import plot_reliability


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def blocks_of(true_temperatures, num_blocks, seed=0):
    """Logits of a head that is off by these temperatures, and what becomes of its drafts."""
    rng = random.Random(seed)
    logits, accepted = [], []
    for _ in range(num_blocks):
        honest = [rng.gauss(1.0, 1.5) for _ in true_temperatures]
        logits.append([z * t for z, t in zip(honest, true_temperatures, strict=True)])
        count = 0
        while count < len(honest) and rng.random() < 1 / (1 + math.exp(-honest[count])):
            count += 1
        accepted.append(count)
    return torch.tensor(logits, dtype=torch.float64), torch.tensor(accepted)


class TestNumbers:
    def test_error_of_two_bins(self):
        predicted, came_true = tensor(0.1, 0.1, 0.9, 0.9), tensor(0, 1, 1, 1)
        assert expected_calibration_error(predicted, came_true, 2) == pytest.approx((2 * 0.4 + 2 * 0.1) / 4)

    def test_what_comes_true_as_often_as_predicted_has_no_error(self):
        assert expected_calibration_error(tensor(0.25, 0.25, 0.25, 0.25), tensor(1, 0, 0, 0)) == pytest.approx(0)
        assert expected_calibration_error(tensor(1.0, 0.0), tensor(1, 0)) == 0

    def test_errors_of_both_signs_cancel_within_a_bin_only(self):
        assert expected_calibration_error(tensor(0.4, 0.4), tensor(0, 1), 1) == pytest.approx(0.1)
        assert expected_calibration_error(tensor(0.4, 0.6), tensor(1, 0), 2) == pytest.approx(0.6)

    def test_curve(self):
        curve = reliability(tensor(0.1, 0.3, 0.9, 1.0), tensor(0, 1, 1, 1), 2)
        assert curve.count == [2, 2]
        assert curve.predicted == pytest.approx([0.2, 0.95])
        assert curve.observed == pytest.approx([0.5, 1.0])
        assert reliability(tensor(0.1), tensor(1.0), 2).predicted == [pytest.approx(0.1), 0.0]

    @pytest.mark.parametrize(
        ("scores", "came_true", "expected"),
        [
            ((1, 2, 3, 4), (0, 0, 1, 1), 1.0),
            ((1, 2, 3, 4), (1, 1, 0, 0), 0.0),
            ((1, 1, 1, 1), (1, 0, 1, 0), 0.5),
            ((1, 2, 2, 3), (0, 0, 1, 1), 3.5 / 4),
        ],
    )
    def test_area(self, scores, came_true, expected):
        assert area_under_roc(tensor(*scores), tensor(*came_true)) == pytest.approx(expected)

    def test_there_is_no_area_without_both_outcomes(self):
        assert math.isnan(area_under_roc(tensor(1, 2), tensor(1, 1)))
        assert math.isnan(area_under_roc(tensor(), tensor()))


class TestFit:
    TRUE = (0.5, 2.0, 3.0)

    def test_the_temperatures_of_a_head_that_is_off_are_found(self):
        assert fit(*blocks_of(self.TRUE, 30_000))[0] == pytest.approx(self.TRUE, rel=0.25)

    def test_errors_shrink_on_blocks_that_the_fit_did_not_see(self):
        temperatures, _ = fit(*blocks_of(self.TRUE, 30_000))
        for position in report(*blocks_of(self.TRUE, 30_000, seed=1), temperatures):
            assert position.ece_before > 0.04
            assert position.ece_after < 0.012
            assert position.brier_after < position.brier_before
            assert position.auc > 0.7

    def test_an_honest_head_is_left_alone(self):
        assert fit(*blocks_of((1.0, 1.0, 1.0), 30_000))[0] == pytest.approx([1, 1, 1], rel=0.25)

    def test_without_anything_to_tell_them_apart_the_temperature_is_one(self):
        assert fit(torch.zeros(10, 2), torch.tensor([2, 0] * 5)) == ([1.0, 1.0], [0.0, 0.0])

    def test_a_head_that_promises_too_much_everywhere_needs_a_shift(self):
        honest, accepted = blocks_of((1.0, 1.0), 5000)
        promised = honest + 1.5
        without, both = fit(promised, accepted), fit(promised, accepted, with_shifts=True)
        fresh, outcome = blocks_of((1.0, 1.0), 5000, seed=1)
        errors = [max(p.ece_after for p in report(fresh + 1.5, outcome, *numbers)) for numbers in (without, both)]
        assert errors[0] > 0.05
        assert errors[1] < 0.025
        assert both[1][0] == pytest.approx(-1.5, abs=0.4)
        first, second = (report(fresh + 1.5, outcome, *numbers)[0].auc for numbers in (without, both))
        assert first == second

    def test_what_the_report_counts(self):
        first, second = report(torch.zeros(4, 2), torch.tensor([0, 1, 2, 2]), [1.0, 1.0])
        assert (first.num_reached, second.num_reached) == (4, 3)
        assert (first.survival_rate, second.survival_rate) == (0.75, 0.5)
        # Both say 0.5, then 0.25.
        assert first.ece_before == pytest.approx(0.25) and second.ece_before == pytest.approx(0.25)


class TestFile:
    def calibration(self) -> Calibration:
        temperatures, shifts = [1.5, 0.75, 2.0], [0.5, 0.0, -1.0]
        positions = report(*blocks_of((1, 1, 1), 50), temperatures, shifts)
        return Calibration(temperatures, positions, {"fit": 5}, {"target": "t"}, shifts)

    def test_it_comes_back_as_it_was(self, tmp_path):
        calibration = self.calibration()
        assert calibration.save(tmp_path).name == CALIBRATION_NAME
        assert Calibration.load(tmp_path) == calibration

    def test_areas_that_do_not_exist_come_back_too(self, tmp_path):
        positions = report(torch.zeros(3, 1), torch.tensor([1, 1, 1]), [1.0])
        path = Calibration([1.0], positions).save(tmp_path)
        assert "NaN" not in path.read_text()  # which is no JSON
        assert math.isnan(Calibration.load(tmp_path).positions[0].auc)

    def test_a_folder_without_one_has_none(self, tmp_path):
        assert Calibration.load(tmp_path) is None

    @pytest.mark.parametrize(
        "text",
        [
            "no json",
            "[]",
            "{}",
            '{"temperatures": [0]}',
            '{"temperatures": ["1"]}',
            '{"temperatures": [1], "shifts": [0, 0]}',
        ],
    )
    def test_something_else_is_refused_with_its_path(self, tmp_path, text):
        (tmp_path / CALIBRATION_NAME).write_text(text)
        with pytest.raises(OSError, match=rf"{CALIBRATION_NAME} is not a calibration .*dspark-hf calibrate"):
            Calibration.load(tmp_path)

    def test_a_drafter_brings_its_own(self, tmp_path):
        drafter = kit.new_drafter()
        drafter.calibration = Calibration([2.0] * drafter.config.num_draft_tokens)
        drafter.save_pretrained(tmp_path)
        assert DSparkDrafter.from_pretrained(tmp_path).calibration == drafter.calibration
        (tmp_path / CALIBRATION_NAME).unlink()
        assert DSparkDrafter.from_pretrained(tmp_path).calibration is None

    def test_one_of_another_drafter_is_refused(self, tmp_path):
        drafter = kit.new_drafter()
        drafter.save_pretrained(tmp_path)
        Calibration([2.0]).save(tmp_path)
        with pytest.raises(OSError, match="has 1 temperatures, but the drafter proposes 4 tokens"):
            DSparkDrafter.from_pretrained(tmp_path)


class TestConfidence:
    def test_each_position_has_its_temperature(self):
        drafter = kit.new_drafter()
        states, previous = torch.randn(2, 4, 32), torch.randint(50, (2, 4))
        raw = torch.logit(drafter.confidence(states, previous).double())
        drafter.calibration = Calibration([0.5, 1.0, 2.0, 4.0])
        whole = drafter.confidence(states, previous)
        torch.testing.assert_close(whole.double(), torch.sigmoid(raw / tensor(0.5, 1, 2, 4)), rtol=1e-5, atol=1e-6)
        for k in range(4):
            one = drafter.confidence(states[:, k : k + 1], previous[:, k : k + 1], k)
            torch.testing.assert_close(one, whole[:, k : k + 1])

    def test_generation_goes_by_it(self):
        """What every position says is halved, so a threshold cuts where it did not before; the text stays."""
        model, plain = kit.target(), kit.continuation(kit.target(), kit.PROMPT, 12)

        def confidences(temperature: float) -> list[float]:
            drafter = kit.new_drafter()
            drafter.calibration = Calibration([temperature] * 4)
            with drafter.trace() as trace:
                output = model.generate(
                    **kit.inputs(),
                    max_new_tokens=12,
                    do_sample=False,
                    assistant_model=drafter,
                    num_assistant_tokens_schedule="constant",
                )
            assert output[0, len(kit.PROMPT) :].tolist() == plain
            return [c for r in trace.rounds for c in r.confidence or []]

        sure, unsure = confidences(0.1), confidences(10.0)
        assert len(sure) == len(unsure) > 3
        assert max(abs(c - 0.5) for c in unsure) < 0.2 < max(abs(c - 0.5) for c in sure)


class TestCalibrate:
    def run(self, drafter=None, **settings) -> Calibration:
        prompts = [kit.PROMPT[i:] for i in range(6)]
        settings = {"max_new_tokens": 24, **settings}
        return calibrate(drafter or kit.new_drafter(), kit.target(), prompts, **settings)

    @pytest.mark.parametrize("do_sample", [False, True])
    def test_real_rounds(self, do_sample):
        state = torch.get_rng_state()
        calibration = self.run(do_sample=do_sample)
        assert torch.equal(torch.get_rng_state(), state)
        assert len(calibration.temperatures) == len(calibration.positions) == 4
        assert calibration.num_blocks["fit"] > 10 and calibration.num_blocks["report"] > 10
        assert calibration.positions[0].num_reached == calibration.num_blocks["report"]
        assert calibration.provenance["decoding"].startswith("sampling" if do_sample else "greedy")
        again = self.run(do_sample=do_sample)
        assert (again.temperatures, again.num_blocks) == (calibration.temperatures, calibration.num_blocks)

    def test_blocks_are_those_of_the_trace(self):
        """An oracle that is wrong at position 2 of every other draft: half the drafts end there."""
        drafter, prompt = kit.new_drafter(), kit.PROMPT
        answer = kit.continuation(kit.target(), prompt, 24)
        with kit.knowing(answer, len(prompt), wrong_at=2):
            calibration = calibrate(drafter, kit.target(), [prompt, prompt], max_new_tokens=24)
        first, second, third, _ = (position.survival_rate for position in calibration.positions)
        assert first == second == 1.0
        assert 0.3 < third < 0.8

    def test_a_calibration_that_is_on_already_is_seen_through(self):
        drafter = kit.new_drafter()
        fresh = self.run(drafter)
        drafter.calibration = Calibration([3.0, 0.5, 1.0, 2.0], shifts=[1.0, 0.0, -0.5, 0.2])
        again = self.run(drafter)
        assert again.temperatures == pytest.approx(fresh.temperatures)
        assert drafter.calibration.temperatures == [3.0, 0.5, 1.0, 2.0]

    def test_texts_need_a_tokenizer(self):
        with pytest.raises(ValueError, match="pass the target's `tokenizer`"):
            calibrate(kit.new_drafter(), kit.target(), ["a", "b"])

    def test_texts(self):
        calibration = calibrate(kit.new_drafter(), kit.target(), ["x y z"] * 2, kit.tokenizer(), max_new_tokens=24)
        assert calibration.num_blocks["fit"] == calibration.num_blocks["report"] > 0

    @pytest.mark.parametrize(
        ("settings", "message"), [({"held_out": 1}, "`held_out` is 1"), ({"max_new_tokens": 2}, "Only 0 full drafts")]
    )
    def test_wrong_settings(self, settings, message):
        with pytest.raises(ValueError, match=message):
            self.run(**settings)
        with pytest.raises(ValueError, match="`prompts` holds 1 prompts"):
            calibrate(kit.new_drafter(), kit.target(), [kit.PROMPT])

    def test_a_drafter_without_the_head_is_refused(self):
        with pytest.raises(UnsupportedGenerationError, match=r"no confidence head.*'entropy'"):
            self.run(kit.new_drafter(enable_confidence_head=False))

    def test_the_file_is_plain_json(self, tmp_path):
        self.run().save(tmp_path)
        fields = json.loads((tmp_path / CALIBRATION_NAME).read_text())
        assert set(fields) == {"temperatures", "shifts", "positions", "num_blocks", "provenance"}


class TestCommand:
    @pytest.fixture
    def pair(self, tmp_path) -> list[str]:
        for name in ("target", "drafter"):
            (tmp_path / name).mkdir()
        model = kit.new_target()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        model.save_pretrained(tmp_path / "target")
        kit.tokenizer().save_pretrained(tmp_path / "target")
        kit.new_drafter().save_pretrained(tmp_path / "drafter")
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"turns": [f"x y z {i}"]}) + "\n" for i in range(6)))
        names = {"target": tmp_path / "target", "drafter": tmp_path / "drafter", "prompts": prompts}
        arguments = [part for name, path in names.items() for part in (f"--{name}", str(path))]
        return ["calibrate", *arguments, "--dtype", "float32", "--device", "cpu", "--max-new-tokens", "24"]

    def test_the_file_goes_beside_the_drafter(self, pair, tmp_path, capsys):
        assert main([*pair, "--num-prompts", "4"]) == 0
        drafter = DSparkDrafter.from_pretrained(tmp_path / "drafter")
        assert drafter.calibration.provenance["num_prompts"] == 4
        assert drafter.calibration.provenance["datasets"] == ["prompts"]
        printed = capsys.readouterr().out
        assert (
            "ECE, mean of all positions" in printed and f"wrote {tmp_path / 'drafter' / CALIBRATION_NAME}" in printed
        )

    def test_elsewhere_and_with_a_figure(self, pair, tmp_path):
        pytest.importorskip("matplotlib")
        (tmp_path / "out").mkdir()
        assert main([*pair, "--output", str(tmp_path / "out"), "--plot", str(tmp_path / "reliability.png")]) == 0
        assert (tmp_path / "out" / CALIBRATION_NAME).is_file()
        assert (tmp_path / "reliability.png").read_bytes()[:4] == b"\x89PNG"

    def test_a_folder_that_is_not_there(self, pair, tmp_path, capsys):
        assert main([*pair, "--output", str(tmp_path / "nowhere")]) == 1
        assert "is no folder" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("settings", "message"),
        [({}, "--output is missing"), ({"output": ".", "max_new_tokens": 0}, "--max_new_tokens is 0")],
    )
    def test_wrong_settings(self, settings, message):
        with pytest.raises(ValueError, match=message):
            CalibrationSettings(**settings)


class TestFigure:
    def test_a_calibration_without_a_report_has_nothing_to_draw(self, tmp_path):
        with pytest.raises(ValueError, match="carries no report"):
            plot_reliability(Calibration([1.0]), tmp_path / "figure.png")

    def test_without_matplotlib_the_package_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        calibration = Calibration([1.0], report(torch.zeros(4, 1), torch.tensor([0, 1, 1, 0]), [1.0]))
        with pytest.raises(ImportError, match=r"pip install \"dspark-hf\[plot\]\""):
            plot_reliability(calibration, tmp_path / "figure.png")
