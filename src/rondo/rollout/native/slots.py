"""Per-slot numbers as arrays, so that the bookkeeping of a step is a few vector operations."""

from __future__ import annotations

import numpy as np

from rondo.types import Completion, SamplingParams


class SlotTable:
    """All arrays are indexed by slot. tokens: the one to feed next, at `positions`. indices: response tokens
    so far.

    prefix_slots, prefix_lengths: another slot whose first so many cache positions are the same (0: none).
    ids, log_probs, versions: [S, capacity], the response as it grows. stops: [S, K] stop tokens, -1 where
    unused.
    """

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.tokens = np.zeros(num_slots, np.int64)
        self.positions = np.zeros(num_slots, np.int64)
        self.seeds = np.zeros(num_slots, np.int64)
        self.indices = np.zeros(num_slots, np.int64)
        self.max_tokens = np.zeros(num_slots, np.int64)
        self.prefix_slots = np.arange(num_slots)
        self.prefix_lengths = np.zeros(num_slots, np.int64)
        self.temperature = np.ones(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        self.ids = np.zeros((num_slots, capacity), np.int32)
        self.log_probs = np.zeros((num_slots, capacity), np.float32)
        self.versions = np.zeros((num_slots, capacity), np.int32)
        self.stops = np.full((num_slots, 1), -1, np.int64)

    def seat(
        self,
        slot: int,
        tokens: np.ndarray,
        sampling: SamplingParams,
        seed: int,
        prefix: Completion | None,
    ) -> None:
        """Start a sequence. tokens: prompt and prefix. prefix: the response so far."""
        self.tokens[slot], self.positions[slot] = tokens[-1], len(tokens) - 1
        self.seeds[slot] = seed
        self.max_tokens[slot] = sampling.max_tokens
        self.temperature[slot], self.top_p[slot] = sampling.temperature, sampling.top_p
        self.top_k[slot], self.min_p[slot] = sampling.top_k, sampling.min_p
        self._set_stops(slot, sampling.stop_token_ids)
        self.indices[slot] = 0
        if prefix is not None:
            done = self.indices[slot] = len(prefix.token_ids)
            self.ids[slot, :done] = prefix.token_ids
            self.log_probs[slot, :done] = prefix.log_probs
            self.versions[slot, :done] = prefix.policy_versions

    def _set_stops(self, slot: int, stops: tuple[int, ...]) -> None:
        if len(stops) > self.stops.shape[1]:
            wider = np.full((len(self.stops), len(stops)), -1, np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[slot] = -1
        self.stops[slot, : len(stops)] = stops

    def move(self, source: int, target: int) -> None:
        """All numbers of `source` to `target`."""
        for array in vars(self).values():
            array[target] = array[source]

    def append(self, rows: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray, version: int) -> np.ndarray:
        """One more token in each slot of `rows`. Returns bool [R]: finished, by a stop token or by length."""
        at = self.indices[rows]
        self.ids[rows, at] = tokens
        self.log_probs[rows, at] = log_probs
        self.versions[rows, at] = version
        self.indices[rows] = at + 1
        self.positions[rows] += 1
        self.tokens[rows] = tokens
        stopped: np.ndarray = (self.stops[rows] == tokens[:, None]).any(1)
        return stopped | (at + 1 >= self.max_tokens[rows])

    def response(self, slot: int, start: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Copies of ids, log_probs and versions so far, from response token `start` on."""
        new = slice(start, int(self.indices[slot]))
        return self.ids[slot, new].copy(), self.log_probs[slot, new].copy(), self.versions[slot, new].copy()
