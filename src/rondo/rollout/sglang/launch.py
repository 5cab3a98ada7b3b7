"""SGLang's own engine, started and spoken to: everything here runs on one event loop.

    SglangCore (this process) ─ messages ─▶ scheduler 0 … tensor_parallel − 1, each with worker.py

SGLang's process for detokenizing is not started: nothing here is text.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import multiprocessing
import os
import shutil
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    ConfigureLoggingReq,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    GenerateReqInput,
    LoadLoRAAdapterReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UnloadLoRAAdapterReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.managers.load_snapshot import shm_path_for
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.hf_transformers_utils import get_context_length

from rondo.core.errors import ConfigError, WeightSyncError
from rondo.core.types import GenerateRequest
from rondo.models.loading import load_model_config
from rondo.models.names import Parts
from rondo.platform import on_host
from rondo.rollout.adapters import Served
from rondo.rollout.native.sampling import seed_ahead
from rondo.rollout.protocol import EngineSpec
from rondo.rollout.sglang.options import ENGINE, ROOM, device_arguments
from rondo.rollout.sglang.worker import HOOKS, LOADER, SAMPLER, Delivery, DeliveryTask, register_model, run
from rondo.rollout.third_party import MERGE, Hook
from rondo.rollout.third_party_engine import model_folder, versions_of
from rondo.weights.bucket import SharedBucket

_TOP_K_OFF = -1
_URGENT = 1  # SGLang takes large numbers first, and of equal ones those that came first
DROP_SECONDS = 60.0  # SGLang counts requests of adapters itself, and waits for them without end
_ALIGNED = 32  # columns of an MLP's inner matrices
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SglangStep:
    """New tokens of one request."""

    token_ids: Sequence[int]
    """The tokens that are new in this step."""
    log_probs: Sequence[float]
    """The log-prob of each new token."""
    finished: str
    """"", "stop", "length" or "abort"."""
    message: str
    """What SGLang says of an abort."""
    prompt_ids: Sequence[int]
    """The prompt as SGLang read it."""
    cached: int
    """Prompt tokens (prefix included) whose keys and values were there already, as of the last prefill."""
    versions: Sequence[int] | None = None
    """With the last step, of all its tokens, by SGLang's own count; None: it has not said so."""
    routes: np.ndarray | None = None
    """With the last step of a mixture's, those of prompt and response, int32 [n, layers, k]; layers without
    experts say nothing."""


class _Engine(Engine):
    """SGLang's engine with rondo's worker.py in the schedulers, and without detokenizers."""

    run_scheduler_process_func = staticmethod(run)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> tuple[list[Any], list[str]]:
        return [], []


class SglangCore:
    """Builds the engine, and blocks until it can take requests. Afterwards every coroutine runs on one and
    the same event loop. Raises ConfigError; whatever SGLang raises.
    """

    def __init__(self, spec: EngineSpec) -> None:
        ENGINE.check_hooks((*HOOKS, Hook(Engine, "_launch_detokenizer_subprocesses")))
        self._folder = model_folder(spec)
        try:
            register_model(self._folder)
            self._engine = _Engine(**arguments(spec, self._folder))
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        # The load of its schedulers, which have the file open, for a router of SGLang's. There is none here,
        # and a process that is killed would leave it.
        Path(shm_path_for(self._engine.port_args.instance_id)).unlink(missing_ok=True)
        self._manager = self._engine.tokenizer_manager
        self._ranks = spec.tensor_parallel
        self._route_shape = _route_shape(spec) if spec.routes else None
        self._deliveries = 0
        self._fences: list[asyncio.Event] = []
        self._named = False  # SGLang knows which version the weights are
        self._taken: set[str] = set()  # keys of the requests whose tokens somebody takes
        self._manager._result_dispatcher._mapping[ConfigureLoggingReq] = self._fence_came
        self.cache_tokens = int(
            self._engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]
        )
        if self.cache_tokens < spec.max_context + ROOM:
            self.close()
            raise ConfigError(
                f"SGLang's cache has room for {self.cache_tokens} tokens, less than one request of "
                f"{spec.max_context}; raise rollout.engine.mem_fraction_static or max_total_tokens"
            )
        _on_a_workers_death(_end_this_process)

    # ---- requests ----

    async def generate(
        self, key: str, request: GenerateRequest, adapters: Served | None = None
    ) -> AsyncIterator[SglangStep]:
        """Gives every new token as it comes. key: unique among all that were ever given, and no other one's
        beginning. Prompt and prefix are prefilled together. adapters: without them SGLang computes with the
        base, and says nothing.
        """
        sampling, prompt = request.sampling, [int(token) for token in request.token_ids]
        prefix = [] if request.prefix is None else [int(token) for token in request.prefix.token_ids]
        parameters = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or _TOP_K_OFF,
            "min_p": sampling.min_p,
            "max_new_tokens": sampling.max_tokens - len(prefix),
            "stop_token_ids": [int(token) for token in sampling.stop_token_ids],
            # SGLang counts by the position of the token before, which for the first is len(prompt) - 1.
            "sampling_seed": seed_ahead(request.seed, 1 - len(prompt)),
        }
        message = GenerateReqInput(
            priority=_URGENT if request.urgent else 0,
            input_ids=[*prompt, *prefix],
            sampling_params=parameters,
            rid=key,
            return_logprob=True,
            return_prompt_token_ids=True,
            stream=True,
            lora_path=None if adapters is None else adapters.name,
            return_routed_experts=self._route_shape is not None,
        )
        self._taken.add(key)
        try:
            async for out in self._manager.generate_request(message, None):
                yield _step(out, self._route_shape, named=self._named)
        finally:
            self._taken.discard(key)

    def abort(self, key: str) -> None:
        """Ends a request from which a step has come already; its last step comes."""
        self._manager.abort_request(key)

    async def pause(self) -> None:
        """Stops; when this returns nothing is computed, and every token that was made has been given to its
        consumer. Requests in flight are back in the queue, without keys and values.
        """
        await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        await self._fence()

    async def resume(self) -> None:
        await self._manager.continue_generation(ContinueGenerationReqInput())

    async def _fence(self) -> None:
        """Sends a message that goes to the scheduler and comes back on the tokens' own way, behind all of
        them. (The replies to other messages take another way.)
        """
        came = asyncio.Event()
        self._fences.append(came)
        self._manager.auto_create_handle_loop()
        await self._manager._async_dispatch_to_scheduler(ConfigureLoggingReq())
        await came.wait()
        states = list(self._manager.rid_to_state.items())
        for _ in range(4):  # consumers were woken before us; these let them run
            await asyncio.sleep(0)
        while any(state.out_list and key in self._taken for key, state in states):
            await asyncio.sleep(0)

    def _fence_came(self, _: object) -> None:
        self._fences.pop(0).set()

    # ---- weights: while paused ----

    async def begin(self, *, first: bool) -> None:
        """Begins an update; one that did not end goes on. first: the parameters hold nothing yet."""
        await self._open()
        if first:
            await self._deliver("blank")

    async def _open(self) -> None:
        """Has SGLang take deliveries, which it does during an update only."""
        self._manager.auto_create_handle_loop()
        done, message = await self._manager.begin_weight_update(BeginWeightUpdateReqInput())
        if not done and "already open" not in message:
            raise WeightSyncError(f"SGLang refused to begin an update: {message}")

    async def load(self, bucket: SharedBucket, parts: Parts) -> dict[str, int]:
        """Loads a bucket, by `parts` under a checkpoint's names; returns the checksums by name, computed in
        the schedulers from the bytes that arrived there.
        """
        answers = await self._deliver("bucket", bucket, parts)
        if any(answer != answers[0] for answer in answers):
            raise WeightSyncError(f"SGLang's workers read different bytes for {_names(bucket)}")
        sums: dict[str, int] = answers[0]["checksums"]
        return sums

    async def look(self, bucket: SharedBucket) -> list[dict[str, int]]:
        """See ThirdPartyEngine.look. The update that this begins goes on with the first weights."""
        await self._open()
        return [answer["checksums"] for answer in await self._deliver("look", bucket)]

    async def close_buckets(self) -> None:
        """See ThirdPartyEngine.close_buckets."""
        await self._deliver("close")

    async def unset(self) -> list[str]:
        """Returns, of the first update, SGLang's own names of parameters that no tensor has reached."""
        return sorted({name for answer in await self._deliver("inspect") for name in answer["unset"]})

    async def _deliver(
        self, task: DeliveryTask, bucket: SharedBucket | None = None, parts: Parts | None = None
    ) -> list[dict[str, Any]]:
        self._deliveries += 1
        delivery = Delivery(task, str(self._folder / f"delivery-{self._deliveries}"), bucket, parts or {})
        payload = MultiprocessingSerializer.serialize([(delivery.as_name(), torch.empty(0))])
        done, message = await self._manager.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[payload] * self._ranks, load_format=LOADER, flush_cache=False
            )
        )
        if not done:
            raise WeightSyncError(f"SGLang refused an update of its weights: {message}")
        answers = [delivery.read(rank) for rank in range(self._ranks)]
        for rank, answer in enumerate(answers):
            if "error" in answer:
                what = "its parameters" if bucket is None else _names(bucket)
                raise WeightSyncError(f"SGLang's worker {rank} could not set {what}: {answer['error']}")
        return answers

    async def end(self) -> None:
        """Has the next token computed with the received weights, keys and values included."""
        done, message = await self._manager.end_weight_update(EndWeightUpdateReqInput())
        if not done:
            raise WeightSyncError(f"SGLang refused to end the update: {message}")
        flushed = await self._manager.flush_cache()
        if not flushed.success:
            raise WeightSyncError(f"SGLang did not clear its cache of keys and values: {flushed.message}")

    async def name_weights(self, version: int) -> None:
        """Has SGLang count which tokens the weights make from now on."""
        await self._manager.update_weight_version(UpdateWeightVersionReqInput(new_version=str(version)))
        self._named = True

    async def load_adapters(self, adapters: Served) -> None:
        """Has every scheduler read them; requests may name them from now on."""
        message = LoadLoRAAdapterReqInput(lora_name=adapters.name, lora_path=str(adapters.folder))
        loaded = await self._manager.load_lora_adapter(message)
        if not loaded.success:
            raise WeightSyncError(f"SGLang refused the adapters: {loaded.error_message}")

    async def drop_adapters(self, adapters: Served) -> None:
        """Forgets them; no request uses them any more."""
        message = UnloadLoRAAdapterReqInput(lora_name=adapters.name)
        who = f"{adapters.name} (version {adapters.version})"
        try:  # it waits until its own count of their requests is 0
            dropped = await asyncio.wait_for(self._manager.unload_lora_adapter(message), DROP_SECONDS)
        except TimeoutError as error:
            raise WeightSyncError(f"SGLang still has requests with {who}, and rondo has none") from error
        if not dropped.success:
            raise WeightSyncError(f"SGLang did not forget {who}: {dropped.error_message}")

    # ---- life ----

    async def sleep(self) -> None:
        """Gives the cache's memory back; while paused."""
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))

    async def wake(self) -> None:
        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["kv_cache"]))

    def close(self) -> None:
        """Ends every child of this process; the engine's own are all that it has."""
        _on_a_workers_death(signal.SIG_IGN)
        self._engine.shutdown()
        multiprocessing.active_children()  # reaps them
        shutil.rmtree(self._folder, ignore_errors=True)


def arguments(spec: EngineSpec, folder: Path) -> dict[str, Any]:
    """Returns SGLang's ServerArgs for `spec`. Raises ConfigError."""
    longest = int(get_context_length(load_model_config(spec.source).get_text_config()))
    if spec.max_context > longest:
        raise ConfigError(
            f"SGLang gives the model positions for {longest} tokens (it reads max_position_embeddings only), "
            f"but prompt and response may have {spec.max_context}; lower data.max_prompt_tokens or "
            "rollout.max_tokens, or set model.override.max_position_embeddings"
        )
    return {
        "log_level": "warning",
        "grammar_backend": "none",
        **device_arguments(spec),
        **_for_adapters(spec),
        **spec.options,
        "enable_return_routed_experts": spec.routes,
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "custom_weight_loader": [LOADER],
        "trust_remote_code": spec.source.trust_remote_code,
        "dtype": spec.dtype,
        "random_seed": spec.seed % (1 << 31),
        "context_length": spec.max_context + ROOM,
        "max_running_requests": spec.max_concurrent,
        "tp_size": spec.tensor_parallel,
        "sampling_backend": SAMPLER,
        "schedule_policy": "fcfs",
        "enable_priority_scheduling": True,
        "disable_priority_preemption": True,
        "default_priority_value": 0,
        "stream_interval": 1,
        "incremental_streaming_output": True,
        "skip_server_warmup": True,
        "json_model_override_args": '{"eos_token_id": null}',  # what ends a response is stop_token_ids alone
        "custom_sigquit_handler": _say_that_a_worker_died,
    }


def _for_adapters(spec: EngineSpec) -> dict[str, Any]:
    if spec.adapters is None:
        return {}
    targets = {one.module.rpartition(".")[2] for one in spec.adapters.by_weight.values()}
    given = {
        "enable_lora": True,
        "max_lora_rank": spec.adapters.rank,
        "lora_target_modules": sorted(targets),
        "max_loras_per_batch": spec.adapters.versions + 1,  # SGLang counts the base, too
    }
    if not on_host(spec.device):
        return given
    inner = int(load_model_config(spec.source).get_text_config().intermediate_size)
    if inner % (_ALIGNED * spec.tensor_parallel):
        raise ConfigError(
            f"actor.lora.send=adapters: on a CPU SGLang pads intermediate_size={inner} to a multiple of "
            f"{_ALIGNED} for each of {spec.tensor_parallel} workers, and then takes no adapters; {MERGE}",
            key="actor.lora.send",
        )
    return given | {"lora_backend": "torch_native"}


def _route_shape(spec: EngineSpec) -> tuple[int, int]:
    """Returns the number of layers whose routes SGLang gives, and k."""
    config = load_model_config(spec.source).get_text_config()
    return int(config.num_hidden_layers), int(config.num_experts_per_tok)


def _step(out: dict[str, Any], route_shape: tuple[int, int] | None, *, named: bool) -> SglangStep:
    meta = out["meta_info"]
    ended = meta["finish_reason"] or {}
    routes = None
    if route_shape is not None and meta.get("routed_experts") is not None:
        flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
        routes = flat.reshape(-1, *route_shape)
    if "cached_tokens" not in meta:  # a request that never ran, or was in the queue again: all tokens are out
        return SglangStep(
            (), (), ended["type"], ended.get("message", ""), out["prompt_token_ids"], 0, None, routes
        )
    spans = meta.get("weight_versions") if named else None
    return SglangStep(
        token_ids=out["output_ids"],
        log_probs=[entry[0] for entry in meta["output_token_logprobs"]],
        finished=ended.get("type", ""),
        message=ended.get("message") or "",
        prompt_ids=out["prompt_token_ids"],
        cached=int(meta["cached_tokens"]),
        versions=None if spans is None else versions_of((s["version"], s["start"], s["end"]) for s in spans),
        routes=routes,
    )


def _names(bucket: SharedBucket) -> str:
    names = [entry.name for entry in bucket.entries]
    return f"{names[0]!r} … {names[-1]!r}" if len(names) > 1 else repr(names[0])


# SGLang's workers send SIGQUIT to this process when they die.


def _on_a_workers_death(handler: Any) -> None:
    try:
        signal.signal(signal.SIGQUIT, handler)
    except ValueError:  # not the main thread: SIGQUIT ends the process, as it does by itself
        _log.debug("no handler for SIGQUIT outside the main thread")


def _say_that_a_worker_died(*_: object) -> None:
    """While the engine is built: the constructor notices by itself, and says why."""
    _log.error("a worker of SGLang died")


def _end_this_process(*_: object) -> None:
    """Afterwards: what is left of the engine is of no use. The parent process sees its end."""
    _log.error("a worker of SGLang died; so does the engine")
    os._exit(1)
