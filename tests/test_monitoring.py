"""The monitor of a service: what its window shows, when it rings, what it exports."""

import math
import threading

import kit
import pytest

from dspark_hf.monitoring import AcceptanceMonitor
from dspark_hf.trace import Round, Trace


def rounds(*accepted: int, proposed: int = 4, seconds: float = 0.1) -> Trace:
    return Trace([Round([7] * proposed, n, None, n + 1, seconds=seconds) for n in accepted])


def plain(count: int, seconds: float = 0.05) -> Trace:
    return Trace([Round([], 0, None, 1, source="none", seconds=seconds) for _ in range(count)])


class TestWindow:
    def test_numbers(self):
        monitor = AcceptanceMonitor()
        monitor.add(rounds(3, 1))
        monitor.add(plain(2))
        now = monitor.now()
        assert (now.num_rounds, now.num_new_tokens) == (4, 8)
        assert now.acceptance_length == 2.0
        assert now.acceptance_rate == 0.5
        assert now.verified_per_round == 2.0
        assert now.rounds_without_draft == 0.5
        assert now.tokens_per_second == pytest.approx(8 / 0.3)
        # Eight plain rounds would have taken 0.4 seconds.
        assert now.speed == pytest.approx(0.4 / 0.3)

    def test_rows_of_a_batch(self):
        monitor = AcceptanceMonitor()
        both = Round([[7, 7], [7]], [2, 0], None, [3, 1], rows=[0, 1], seconds=0.2, is_batch=True)
        alone = Round([[], []], [0, 0], None, [1, 1], rows=[0, 1], seconds=0.15, is_batch=True)
        monitor.add(Trace([both, alone]))
        now = monitor.now()
        assert now.acceptance_length == 1.5
        assert now.acceptance_rate == pytest.approx(2 / 3)
        assert now.speed == pytest.approx(0.15 * 3 / 0.35)

    def test_old_rounds_leave(self):
        monitor = AcceptanceMonitor(window=3)
        monitor.add(rounds(0, 0, 0, 0, 4, 4, 4))
        assert monitor.now().num_rounds == 3
        assert monitor.now().acceptance_length == 5.0

    def test_what_nobody_knows_is_nan(self):
        empty = AcceptanceMonitor().now()
        assert empty.num_rounds == 0 and math.isnan(empty.acceptance_length) and math.isnan(empty.speed)
        monitor = AcceptanceMonitor()
        monitor.add(rounds(1))
        assert math.isnan(monitor.now().speed)

    @pytest.mark.parametrize("settings", [{"window": 0}, {"patience": 0}])
    def test_wrong_settings(self, settings):
        with pytest.raises(ValueError, match="expected numbers of rounds from 1 on"):
            AcceptanceMonitor(**settings)


class TestAlarm:
    def test_it_rings_once_when_acceptance_stays_low_and_again_after_it_recovered(self):
        heard = []
        monitor = AcceptanceMonitor(window=4, alarm_below=2.0, patience=3, on_alarm=heard.append)
        monitor.add(rounds(3, 3, 3, 3))
        monitor.add(rounds(0, 0, 0, 0))  # the window is below from the third on
        assert heard == []
        monitor.add(rounds(0, 0, 0))
        assert len(heard) == 1
        assert heard[0].acceptance_length < 2.0
        monitor.add(rounds(3, 3, 3, 3))
        monitor.add(rounds(*[0] * 8))
        assert len(heard) == 2

    def test_a_short_dip_is_forgiven(self):
        heard = []
        monitor = AcceptanceMonitor(window=2, alarm_below=2.0, patience=5, on_alarm=heard.append)
        for _ in range(10):
            monitor.add(rounds(0, 0, 0, 4, 4))
        assert heard == []

    def test_without_a_threshold_there_is_none(self):
        monitor = AcceptanceMonitor(on_alarm=lambda now: pytest.fail("rang"))
        monitor.add(rounds(*[0] * 500))


class TestWatching:
    def test_it_sees_the_calls_inside_also_those_that_fail(self):
        monitor, drafter = AcceptanceMonitor(), kit.new_drafter()
        call = {**kit.inputs(), "max_new_tokens": 8, "do_sample": False, "assistant_model": drafter}
        with monitor.watching(drafter) as trace:
            kit.target().generate(**call)
        assert monitor.now().num_rounds == len(trace.rounds) > 0
        seen = monitor.now().num_rounds
        kit.target().generate(**call)
        assert monitor.now().num_rounds == seen
        with pytest.raises(RuntimeError, match="mine"), monitor.watching(drafter):
            kit.target().generate(**call)
            raise RuntimeError("mine")
        assert monitor.now().num_rounds > seen

    def test_threads(self):
        monitor = AcceptanceMonitor(window=10_000)
        threads = [threading.Thread(target=lambda: monitor.add(rounds(*[1] * 200))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert monitor.now().num_rounds == 1200
        assert monitor.now().acceptance_length == 2.0


class TestPrometheus:
    def test_every_number_is_a_gauge_with_help_and_labels(self):
        monitor = AcceptanceMonitor()
        monitor.add(rounds(3, 1))
        lines = monitor.prometheus(model='a "b"\\c').splitlines()
        assert len(lines) == 3 * 8
        assert 'dspark_hf_acceptance_length{model="a \\"b\\"\\\\c"} 3' in lines
        assert "# TYPE dspark_hf_acceptance_length gauge" in lines
        assert 'dspark_hf_speed{model="a \\"b\\"\\\\c"} NaN' in lines

    def test_without_labels(self):
        monitor = AcceptanceMonitor()
        assert "dspark_hf_num_rounds 0" in monitor.prometheus().splitlines()
        assert monitor.prometheus().endswith("\n")


class TestSummary:
    """What the summary of a trace says about verification and about the confidences."""

    def test_verified_tokens_and_rounds_without_a_draft(self):
        summary = Trace([*rounds(3, 1).rounds, *plain(2).rounds]).summary()
        assert summary.verified_per_round == 2.0
        assert summary.rounds_without_draft == 0.5
        assert math.isnan(summary.predicted_per_draft) and math.isnan(summary.accepted_per_draft)

    def test_promise_and_outcome(self):
        first = Round([7, 7], 2, [0.9, 0.5], 3)
        second = Round([7], 0, [0.8, 0.1], 1)  # looked at a second position, which ended the draft
        summary = Trace([first, second, *rounds(4).rounds]).summary()
        assert summary.predicted_per_draft == pytest.approx((0.9 + 0.45 + 0.8) / 2)
        assert summary.accepted_per_draft == 1.0

    def test_a_draft_that_a_stop_cut_short_tells_nothing(self):
        assert math.isnan(Trace([Round([7, 7], 1, [0.9, 0.5], 1)]).summary().predicted_per_draft)

    def test_rows_of_a_batch(self):
        one = Round([[7, 7], [], [7]], [2, 0, 1], [[0.5, 0.5], [], [1.0]], [3, 1, 2], rows=[0, 1, 2], is_batch=True)
        summary = Trace([one]).summary()
        assert summary.predicted_per_draft == pytest.approx((0.75 + 1.0) / 2)
        assert summary.accepted_per_draft == 1.5
        assert summary.rounds_without_draft == pytest.approx(1 / 3)

    def test_nothing_at_all(self):
        assert Trace().summary().verified_per_round == 0.0

    def test_real_rounds(self):
        drafter = kit.new_drafter()
        with drafter.trace() as trace:
            kit.target().generate(
                **kit.inputs(),
                max_new_tokens=24,
                do_sample=False,
                assistant_model=drafter,
                num_assistant_tokens_schedule="constant",
            )
        summary = trace.summary()
        assert 3 < summary.verified_per_round <= 4
        assert 0 < summary.predicted_per_draft < 4
        assert 0 <= summary.accepted_per_draft < 4
