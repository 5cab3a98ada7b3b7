"""Starts the tests that need a CUDA device on one in host memory, in processes of their own.

What they are is written here once: tests/gpu, and the host card's own; how many pass, and which are left out.
A test of tests/gpu that is new, or is skipped, changes a number here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.host_card.build import REQUIRED, environment, library, why_not

ROOT = Path(__file__).resolve().parents[2]
GPU = "tests/gpu/test_"
MEGATRON = ("tests/host_card/test_megatron.py", "tests/host_card/test_megatron_runs.py")

LEFT_OUT: Mapping[str, str] = {
    f"{GPU}training.py::test_the_head_of_a_large_vocabulary_needs_little_memory": "a terabyte of products",
    f"{GPU}training.py::test_log_probs_without_logits_equal_those_of_chunks": "kernels in triton",
    f"{GPU}training.py::test_log_probs_without_logits_need_less_memory": "kernels in triton",
    f"{GPU}paths.py::test_a_run[head without logits]": "kernels in triton",
    f"{GPU}paths.py::test_a_run[sinks and windows]": "a CPU rounds bfloat16 otherwise: a router's tie",
}
"""Tests of tests/gpu that only a real card can run, and why; a name without brackets is all its cases."""


@dataclass(frozen=True)
class Part:
    """Tests that one process runs."""

    tests: tuple[str, ...]
    """Files, or ids."""
    passed: int
    markers: str = "gpu"
    preload: str = ""
    """What the ranks' processes import ahead, beside what all tests' do."""
    cards: int = 2

    def also_of(self, other: Part) -> list[str]:
        """The ids that `other` names of these tests."""
        return [one for one in other.tests if "::" in one and one.startswith(self.tests)]


QUICK = Part(
    (
        "tests/host_card",
        f"{GPU}card.py",
        f"{GPU}decode.py::test_log_probs_on_cuda",
        f"{GPU}decode.py::test_prompts_with_images_on_cuda[qwen3_vl-native]",
        f"{GPU}decode.py::test_prompts_with_images_on_cuda[idefics3-transformers]",
        f"{GPU}decode.py::test_noise_of_the_device_is_the_hosts",
        f"{GPU}ipc.py",
        f"{GPU}platform.py",
        f"{GPU}two_cards.py",
        f"{GPU}cuda.py::test_greedy_equals_generate_on_cuda[lean]",
        f"{GPU}cuda.py::test_cuda_and_cpu_take_the_same_first_step",
        f"{GPU}training.py::test_a_checkpoint_restores_what_rests_anywhere[both]",
        f"{GPU}training.py::test_a_snapshot_is_what_it_was[both]",
        f"{GPU}training.py::test_a_users_tensor_on_the_card_is_named_where_columns_are_on_the_cpu",
        f"{GPU}training.py::test_flash_equals_sdpa[heads1-asks1]",
        f"{GPU}families.py::test_training_is_that_of_the_cpu[qwen3_moe]",
        f"{GPU}families.py::test_decoding_is_that_of_the_cpu[gemma2]",
        f"{GPU}paths.py::test_a_run[defaults]",
        f"{GPU}paths.py::test_a_run[offload]",
    ),
    passed=116,
    markers="gpu and not slow",
)
SLOW: Mapping[str, Part] = {
    "one card": Part(
        (
            f"{GPU}training.py",
            f"{GPU}cuda.py",
            f"{GPU}decode.py::test_prompts_with_images_on_cuda",
            f"{GPU}families.py",
        ),
        24 + 20 + 70,
    ),
    "paths": Part((f"{GPU}paths.py",), 33),
    "two cards": Part((f"{GPU}ipc.py", f"{GPU}two_cards.py"), 6 + 8, markers="gpu and slow"),
    "runs": Part(
        ("tests/host_card", *(f"--ignore={one}" for one in MEGATRON)), 9 + 9, markers="gpu and slow"
    ),
    "megatron": Part(MEGATRON, 35, preload="rondo.training.megatron.backend", cards=4),
}
"""How many pass, with those that are in QUICK, too: they run once. A part is a process, and one that forks
ranks: ten seconds for what both import."""


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if reason := why_not():
        if os.environ.get(REQUIRED):
            pytest.fail(f"{reason}, and {REQUIRED} is set")
        pytest.skip(reason)
    library()


def run(part: Part, done_before: Sequence[str] = ()) -> None:
    left_out = [f"--deselect={name}" for name in (*LEFT_OUT, *done_before)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", part.markers]
    with environment(cards=part.cards) as variables:
        done = subprocess.run(
            [*command, "--tb=short", *left_out, *part.tests],
            cwd=ROOT,
            env={**variables, "RONDO_TESTS_PRELOAD": part.preload},
            capture_output=True,
            text=True,
        )
    numbers = {
        word: int(n) for n, word in re.findall(r"(\d+) (\w+)", done.stdout.strip().rpartition("\n")[2])
    }
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert numbers["passed"] == part.passed - len(done_before), numbers
    assert "skipped" not in numbers, done.stdout[-2_000:]


def test_a_part_of_the_tests_for_cards() -> None:
    run(QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("part", list(SLOW))
def test_all_tests_for_cards(part: str) -> None:
    run(SLOW[part], SLOW[part].also_of(QUICK))
