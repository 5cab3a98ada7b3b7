"""The workers' ends of a weight sync between process groups, and of the canary: mixed into the actor's worker
and the rollout worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rondo.controller import WorkerContext, dispatch
from rondo.core.batch import ROW_ID, Batch, ragged_rows
from rondo.core.columns import IMAGES
from rondo.core.errors import ReplicaLostError, RolloutError, WeightSyncError
from rondo.core.images import ImageRef, images_as_text
from rondo.core.types import GenerateRequest, RouteShape, SamplingParams
from rondo.data.rows import route_columns
from rondo.platform import give_back
from rondo.system.activity import Activity, progress
from rondo.training import Engine
from rondo.weights.checksum import checksum
from rondo.weights.disk import read_weights, remove_weights, write_weights
from rondo.weights.exchange import SendReport, Transfer, piece_of, receive, send
from rondo.weights.layout import Layout
from rondo.weights.own_group import OwnGroup
from rondo.weights.sync import Sent, SyncReport, gather_along

if TYPE_CHECKING:
    from rondo.rollout.fanout import WeightFanout
    from rondo.workers.replicas import Replicas

ROWS_PER_RANK = 1 << 20  # of a probe: row id = rank · this + number of the replica


class _Transfers:
    """What both ends of a weight transfer share. Ranks are those of the world of host processes."""

    context: WorkerContext
    _transfer: Transfer | None = None
    _own: OwnGroup | None = None  # with NCCL

    @dispatch("broadcast")
    def prepare_transfer(self, transfer: Transfer) -> bool:
        """Says what `send_weights`, or `receive_weights`, does from now on. Returns whether one lost rank
        ends the transfer for all.
        """
        self._leave("another transfer was prepared")
        self._transfer = transfer
        self._own = transfer.own_group(self.context.device)
        return self._own is not None

    async def break_transfer(self, why: str) -> None:
        """Ends what is under way where nobody may notice that a peer is gone: with NCCL. gloo notices it, and
        goes on with the others.
        """
        own = self._own  # now: the next transfer may be prepared while a thread is waited for
        if own is not None:
            await asyncio.to_thread(own.abort, why)

    def close(self) -> None:
        """See Worker.close."""
        self._leave("the worker was closed")

    def _leave(self, why: str) -> None:
        if self._own is not None:
            self._own.abort(why)


class SendsWeights(_Transfers):
    """The trainer's end of a weight transfer."""

    engine: Engine

    @dispatch("broadcast")
    def weight_layout(self, dtype: str, what: Sent = "merged") -> Layout:
        """Says who holds what of the parameters, as they are sent: in `dtype`."""
        return self.engine.parameters(what).layout(dtype)

    @dispatch("per_rank")
    def send_weights(self, *, version: int, what: Sent = "merged") -> SendReport:
        """Does this rank's part of sending `version` to the ranks of the transfer, while they run
        `receive_weights`. A receiver that goes away is reported, and the others are served.
        """
        transfer = _prepared(self._transfer)
        source = self.engine.parameters(what)
        with source.local() as shards, Activity("sending weights", in_bytes=True):
            piece = piece_of(transfer.source, shards)
            return send(transfer, version, piece, self.context.device, self._own)

    @dispatch("broadcast")
    def write_weights(
        self, folder: str, version: int, bucket_bytes: int, dtype: str, what: Sent = "merged"
    ) -> SyncReport:
        """Writes `version` to disk and removes the ones before it. Collective; rank 0 writes."""
        path, leader = Path(folder), self.context.rank == 0
        source = self.engine.parameters(what)
        report = write_weights(source, path, version, bucket_bytes, dtype=dtype, leader=leader)
        if leader:
            remove_weights(path, keep=version)
        return report

    @dispatch("broadcast")
    def gather_along(self, bucket_bytes: int, dtype: str, what: Sent = "merged") -> None:
        """Takes part in the gathering of ranks that have an engine beside them (`load_weights`)."""
        gather_along(self.engine.parameters(what), bucket_bytes, dtype)

    @dispatch("broadcast")
    def parameter_checksums(self, dtype: str, what: Sent = "merged") -> Mapping[str, int]:
        """Returns the checksums of the parameters in `dtype`, by checkpoint name. Collective."""
        return self.engine.parameters(what).checksums(dtype)


class ReceivesWeights(_Transfers):
    """The rollout's end of a weight transfer."""

    replicas: Replicas
    routes: RouteShape | None = None
    """Of what the engines say of a mixture's routes; None: they say nothing of them."""

    @dispatch("broadcast")
    def receive_weights(self, version: int, what: Sent = "merged") -> SyncReport:
        """Makes the engines serve `version`, which the trainer sends meanwhile. They must be paused."""
        transfer = _prepared(self._transfer)
        with closing(self._sink(what)) as sink, Activity("receiving weights", in_bytes=True):
            progress(0, of=transfer.source.num_bytes)
            report = receive(transfer, version, sink, self.context.device, self._own)
        whole = transfer.source.num_bytes * len(transfer.target_ranks)
        return self._delivered(report, sink.peak_bytes, whole)

    @dispatch("broadcast")
    def read_weights(self, folder: str, version: int, what: Sent = "merged") -> SyncReport:
        """Makes the engines serve `version` as the trainer has written it. They must be paused."""
        with closing(self._sink(what)) as sink:
            report = read_weights(Path(folder), version, sink)
        return self._delivered(report, sink.peak_bytes, report.bytes_moved)

    def _sink(self, what: Sent) -> WeightFanout:
        """Returns where weights go. Before an engine wakes for them, models that stand beside it (a critic, a
        judge) give back what they do not use.
        """
        give_back(self.context.device)
        return self.replicas.sink(what)

    def _delivered(self, report: SyncReport, peak_bytes: int, whole: int) -> SyncReport:
        """Returns the report with the way from here to engines in processes of their own: it is they who need
        the weights. peak_bytes: of the buckets for them. whole: bytes for one engine of every rank.
        """
        own = self.replicas.num_processes * whole
        self.replicas.loaded(report.version)
        return replace(
            report,
            bytes_moved=report.bytes_moved + own,
            bytes_needed=own or report.bytes_needed,
            peak_bytes=report.peak_bytes + peak_bytes,
        )

    async def probe(
        self,
        token_ids: Sequence[int],
        images: tuple[ImageRef, ...],
        sampling: SamplingParams,
        seed: int,
        version: int,
    ) -> Batch:
        """Generates one short response of every engine that serves `version`: rows with prompt_ids,
        response_ids, rollout_log_probs, images and a mixture's routes; row_id says whose (`probed`). Past the
        router, whose statistics stay as they are, and before all that waits in an engine.

        Raises WeightSyncError when tokens carry another version, or no engine here serves this one.
        """
        engines = {
            number: engine
            for number, engine in enumerate(self.replicas.router.engines().values())
            if engine.version == version
        }
        ids = np.asarray(token_ids, np.int32)
        requests = [
            GenerateRequest(
                f"canary-{version}-{number}", ids, sampling, seed=seed, urgent=True, images=images
            )
            for number in engines
        ]
        answers = await asyncio.gather(
            *(engine.generate(request) for engine, request in zip(engines.values(), requests, strict=True)),
            return_exceptions=True,
        )
        rows, found = [], []
        for number, answer in zip(engines, answers, strict=True):
            if isinstance(answer, ReplicaLostError):
                continue  # it died meanwhile: the router has it started again
            if isinstance(answer, BaseException):
                raise answer
            if set(answer.policy_versions.tolist()) - {version}:
                raise WeightSyncError(
                    f"engine {number} of rollout[{self.context.rank}] was told to serve version {version}, "
                    f"and stamps its tokens with {sorted(set(answer.policy_versions.tolist()))}"
                )
            rows.append(self.context.rank * ROWS_PER_RANK + number)
            found.append(answer)
        if not found and not self.replicas.wanting:
            raise WeightSyncError(f"no engine of rollout[{self.context.rank}] serves version {version}")
        columns: dict[str, Any] = {
            ROW_ID: np.array(rows, np.int64),
            "prompt_ids": ragged_rows([ids] * len(found), np.int32),
            "response_ids": ragged_rows([answer.token_ids for answer in found], np.int32),
            "rollout_log_probs": ragged_rows([answer.log_probs for answer in found], np.float32),
            IMAGES: [images_as_text(images)] * len(found),
        }
        if self.routes is not None:  # the trainer computes along them, as in an update
            known = [(len(ids), len(answer.token_ids), answer.routes) for answer in found]
            columns |= route_columns(known, self.routes)
        return Batch.of(columns)

    def differing_tensor(self, number: int, checksums: Mapping[str, int]) -> str:
        """Writes a sentence: the first parameter of engine `number` whose checksum is not the trainer's,
        where the engine can read its weights back.
        """
        engine = list(self.replicas.router.engines().values())[number]
        able = engine.capabilities()
        if not able.reads_back:
            return f"{able.engine} cannot read its weights back, so the tensor that differs has no name here"
        for name, expected in checksums.items():
            try:
                tensor = engine.parameter(name)  # type: ignore[attr-defined]
            except (RolloutError, WeightSyncError) as error:
                return f"{name!r} cannot be read back: {error}"
            if checksum(tensor) != expected:
                return f"the first tensor that differs is {name!r}"
        return (
            f"all {len(checksums)} tensors are equal: the weights arrived, and the two compute another model"
        )


def probed(row_id: int) -> tuple[int, int]:
    """Returns the rollout rank and the number of its engine, of a row that `probe` made."""
    return divmod(row_id, ROWS_PER_RANK)


def _prepared(transfer: Transfer | None) -> Transfer:
    if transfer is None:
        raise WeightSyncError("no transfer was prepared on this rank: the controller calls prepare_transfer")
    return transfer
