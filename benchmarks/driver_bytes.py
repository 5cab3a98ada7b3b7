"""Bytes through the controller against bytes of the batch, for growing batches, on both backends.

    python benchmarks/driver_bytes.py [--devices 2] [--backends local ray]

One step as the RL loop makes it: groups of 8 rows are born on the workers, joined, cut over dp for a call
that writes a per-token column and for one that returns metrics. No model: the workers make and read arrays.
Counted is what `cluster.driver_bytes()` counts (docs/controller.md).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import time

import numpy as np

from rondo.config.schema import ClusterConfig, RayBackendConfig
from rondo.controller import Cluster, Worker, WorkerGroup, dispatch, start_cluster
from rondo.core.batch import ROW_ID, Batch, BatchRef, ragged_rows
from rondo.core.types import StepStats

GROUP = 8
PROMPT_TOKENS = 64


class ArrayWorker(Worker):
    """Makes rows like a rollout worker and reads them like a trainer."""

    async def run_group(self, seq: int, response_tokens: int) -> Batch:
        """GROUP rows with the columns of a rollout."""
        lengths = np.full(GROUP, response_tokens, np.int32)

        def per_token(dtype: type) -> object:
            return ragged_rows([np.ones(response_tokens, dtype)] * GROUP, dtype)

        return Batch.of(
            {
                ROW_ID: np.arange(GROUP) + seq * GROUP,
                "group_id": np.full(GROUP, seq),
                "reward": np.ones(GROUP, np.float32),
                "prompt_length": np.full(GROUP, PROMPT_TOKENS, np.int32),
                "response_length": lengths,
                "prompt_ids": ragged_rows([np.ones(PROMPT_TOKENS)] * GROUP, np.int32),
                "response_ids": per_token(np.int32),
                "response_mask": per_token(np.uint8),
                "rollout_log_probs": per_token(np.float32),
                "policy_versions": per_token(np.int32),
            }
        )

    @dispatch("split", reads=("prompt_ids", "response_ids"), writes=("old_log_probs",))
    def compute_log_prob(self, batch: Batch) -> Batch:
        """One float per response token."""
        rows = ragged_rows(batch.rows("response_ids"), np.float32)
        return Batch.of({ROW_ID: batch.scalars(ROW_ID), "old_log_probs": rows})

    @dispatch(
        "split", reads=("prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "old_log_probs")
    )
    def update_actor(self, batch: Batch) -> StepStats:
        """Metrics only."""
        stats = StepStats()
        stats.add_sum("tokens", float(batch.lengths("response_ids").sum()))
        return stats


async def step(group: WorkerGroup, groups: int, response_tokens: int) -> BatchRef:
    """Rollout, log-probs, update."""
    index = ("group_id", "reward", "prompt_length", "response_length")
    parts = await asyncio.gather(
        *(
            group.call_rank(seq % group.size, ArrayWorker.run_group, seq, response_tokens, keep=index)
            for seq in range(groups)
        )
    )
    batch = await group.call(ArrayWorker.compute_log_prob, BatchRef.concat(parts))
    await group.call(ArrayWorker.update_actor, batch)
    return batch


async def measure(cluster: Cluster, backend: str) -> None:
    """Print one line per batch size."""
    group = await cluster.create_group("arrays", ArrayWorker)
    await step(group, 2, 8)
    for groups, response_tokens in ((16, 32), (16, 256), (16, 2048), (64, 2048), (64, 8192)):
        before, started = cluster.driver_bytes(), time.perf_counter()
        batch = await step(group, groups, response_tokens)
        driver, seconds = cluster.driver_bytes() - before, time.perf_counter() - started
        batch_bytes = (await batch.fetch()).num_bytes
        rows = groups * GROUP
        print(
            f"| {backend} | {cluster.num_devices} | {rows} | {response_tokens} | {batch_bytes:,} | {driver:,}"
            f" | {driver / rows:,.0f} | {driver / batch_bytes:.4f} | {seconds * 1e3:.0f} |",
            flush=True,
        )


async def main() -> None:
    """Run both backends, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=2, help="hosts of the ray backend")
    parser.add_argument("--backends", nargs="+", default=["local", "ray"], choices=["local", "ray"])
    arguments = parser.parse_args()
    print(
        "| backend | devices | rows | response tokens | batch bytes | driver bytes | per row | share | ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for backend in arguments.backends:
        config = ClusterConfig(device="cpu", threads=1)
        if backend == "ray":
            config = dataclasses.replace(config, backend=RayBackendConfig(), devices=arguments.devices)
        async with await start_cluster(config) as cluster:
            await measure(cluster, backend)


if __name__ == "__main__":
    asyncio.run(main())
