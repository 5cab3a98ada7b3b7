"""Mixes for tests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rondo.algorithms.registry import policy_loss
from rondo.core.types import Prompt


def nothing(prompt: Prompt, responses: Sequence[np.ndarray]) -> list[str]:
    return []


def solution(prompt: Prompt) -> list[str]:
    return [prompt.fields["solution"]]


def first_again(responses: Sequence[np.ndarray], log_probs: Sequence[np.ndarray]) -> list[Any]:
    """The first sampled answer, with its log-probs."""
    return [(responses[0], log_probs[0])]


def without_log_probs(responses: Sequence[np.ndarray]) -> list[Any]:
    return [responses[0]]


def doubled(given_log_probs: Tensor, given: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    return {"twice": 2 * given_log_probs * given}


@policy_loss("told_before", prepare=doubled)
def told_before(log_probs: Tensor, given: Tensor, twice: Tensor, replaying: Tensor) -> tuple[Tensor, Any]:
    """Reads what comes of a mix, of its own preparation, and of a number that adapts."""
    told = {"actor/twice": (twice.sum(), (given > 0).sum()), "actor/switch": replaying.amax()}
    return -log_probs * replaying, told


def of_the_sampler(log_probs: Tensor, rollout_log_probs: Tensor) -> tuple[Tensor, Any]:
    return log_probs - rollout_log_probs, {}


class Remembers:
    """Gives what a digest of every reward so far says: one that is lost changes all after it."""

    def __init__(self) -> None:
        self.digest = ""
        self.counts = np.zeros(3, np.int64)

    def rows(self, prompt: Prompt, rewards: np.ndarray, seed: int, step: int) -> list[np.ndarray]:
        text = f"{self.digest} {prompt.prompt_id} {rewards.tolist()} {seed} {step}"
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        number = int(self.digest[0], 16) % 3
        self.counts[number] += 1
        ids = np.frombuffer(bytes.fromhex(self.digest), np.uint8)
        return [ids[4 * i : 4 * i + 4].astype(np.int32) % 100 for i in range(number)]

    def metrics(self) -> dict[str, float]:
        return {"asked": float(self.counts.sum())}

    def state(self) -> dict[str, Any]:
        return {"digest": self.digest, "counts": self.counts}

    def load(self, state: Mapping[str, Any]) -> None:
        self.digest, self.counts = state["digest"], state["counts"].copy()


class Hears(Remembers):
    def heard(self, rewards: np.ndarray) -> None:
        raise AssertionError


class Picks:
    """Offers the sampled answers again; the one of least mean entropy joins."""

    def rows(self, responses: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(responses)

    def pick(self, entropy: Sequence[np.ndarray]) -> int:
        return int(np.argmin([one.mean() for one in entropy]))

    def state(self) -> None:
        return None

    def load(self, state: None) -> None: ...
