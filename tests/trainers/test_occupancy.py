"""Busy shares on a clock that is moved by hand."""

from __future__ import annotations

import pytest

from rondo.trainers.loop.busy import Occupancy


def test_shares_of_a_step_by_hand() -> None:
    now = [0.0]
    watch = Occupancy(clock=lambda: now[0])

    def at(seconds: float, what: str, role: str, device: int, method: str) -> None:
        now[0] = seconds
        if what == "begin":
            watch.call_sent(role, 0, device, method)
        else:
            watch.call_ended(role, 0, device, method, 0.0, 0.0, died=False)

    at(0, "begin", "rollout", 1, "run_group")  # two overlap: 0-6 busy
    at(1, "begin", "rollout", 1, "run_group")
    at(2, "begin", "actor", 0, "update_actor")
    at(3, "begin", "critic", 0, "update_critic")  # same device: 2-5 counts once
    at(4, "end", "actor", 0, "update_actor")
    at(5, "end", "critic", 0, "update_critic")
    at(5, "end", "rollout", 1, "run_group")
    at(6, "end", "rollout", 1, "pause")  # one is in flight, but its engine stands still until 8
    at(8, "begin", "rollout", 1, "resume")
    at(8, "end", "rollout", 1, "resume")
    now[0] = 10.0
    assert watch.shares() == pytest.approx({"perf/trainer_busy_share": 0.3, "perf/rollout_busy_share": 0.8})
    at(11, "end", "rollout", 1, "run_group")  # began in the step before
    at(11, "begin", "rollout", 1, "statistics")  # no episode
    now[0] = 14.0
    assert watch.shares() == pytest.approx({"perf/trainer_busy_share": 0.0, "perf/rollout_busy_share": 0.25})


def test_mean_over_devices_and_nothing_before_the_first_step() -> None:
    now = [0.0]
    watch = Occupancy(clock=lambda: now[0])
    for device in (0, 1):
        watch.call_sent("actor", device, device, "num_parameters")
        watch.call_ended("actor", device, device, "num_parameters", 0.0, 0.0, died=False)
    now[0] = 100.0
    watch.step_started()
    watch.call_sent("actor", 0, 0, "update_actor")
    now[0] = 104.0
    assert watch.shares() == {"perf/trainer_busy_share": 0.5}


def test_a_device_counts_while_its_host_lives() -> None:
    now = [0.0]
    watch = Occupancy(clock=lambda: now[0])
    for device in (0, 1):
        watch.call_sent("rollout", device, device, "run_group")
    now[0] = 4.0
    watch.call_ended("rollout", 1, 1, "run_group", 0.0, 0.0, died=True)
    now[0] = 5.0
    watch.call_ended("rollout", 0, 0, "run_group", 0.0, 0.0, died=False)
    now[0] = 12.0
    assert watch.shares() == {"perf/rollout_busy_share": (5 + 4) / (12 + 4)}
    watch.call_sent("rollout", 0, 0, "run_group")
    now[0] = 16.0
    assert watch.shares() == {"perf/rollout_busy_share": 1.0}
    watch.call_ended("rollout", 0, 0, "run_group", 0.0, 0.0, died=True)
    now[0] = 17.0
    assert watch.shares() == {}
