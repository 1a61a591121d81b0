"""Clocks and displays."""

from __future__ import annotations

import time

import pytest

from rl_recipes.progress import Clock, Display, PhaseTimer


def test_phases_add_up() -> None:
    timer = PhaseTimer()
    for _ in range(2):
        with timer("reward"):
            time.sleep(0.01)
    report = timer.report()
    assert 0.02 <= report["seconds_reward"] <= report["seconds"]


def test_a_run_ends_in_time_for_its_last_evaluation() -> None:
    clock = Clock(used=100.0)
    assert not clock.is_over()
    clock.limit, clock.reserved, clock.earlier = 200.0, 30.0, 40.0
    assert clock.elapsed() == pytest.approx(140, abs=1)
    clock.note(5.0)
    assert not clock.is_over()
    clock.note(29.0)
    clock.note(31.0)
    assert clock.is_over(), "140 + 31 + 30 would be more than 200"
    assert clock.left_for(3, 5.0) == pytest.approx(15)
    assert clock.left_for(30, 5.0) == pytest.approx(30, abs=1)


def test_time_before_the_clock_was_made_counts() -> None:
    assert Clock.since_process_start().elapsed() > 0.1


def test_a_log_file_gets_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(100) as display:
        for number in range(1, 101):
            display.iteration({"iteration": number, "reward_mean": 0.5, "reward_std": 0.1, "seconds": 2.0}, 61.0)
    lines = capsys.readouterr().out.splitlines()
    assert 10 < len(lines) < 30
    assert lines[-1] == "iteration 100/100  reward 0.500 ± 0.100  1:01 left  (2.0 s)"
    with Display(1, enabled=False) as display:
        display.say("other processes are silent")
    assert capsys.readouterr().out == ""
