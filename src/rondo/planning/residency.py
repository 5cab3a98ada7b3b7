"""Residency: what is on the device in which phase of a step. Pure; host processes apply it, trainers name the
phase.

    phase      parameters, moments                          key/value cache of the rollout engines
    generate   at rest                                      there
    train      on the device during a role's own calls,     given back with rollout.sleep, else there
               at rest between them

A model at rest is on its device, or in host memory with <role>.offload_params and <role>.offload_optimizer;
the training engine moves it around each call (`FsdpEngine`). The cache is what a phase decides.
"""

from __future__ import annotations

from typing import Literal

Phase = Literal["generate", "train"]  # train: from the step's batch until the next version is loaded


def keeps_cache(phase: Phase, *, sleep: bool) -> bool:
    """Whether the engines' key/value cache is on the device. sleep: rollout.sleep."""
    return phase == "generate" or not sleep
