"""What engines that stand on a package of third parties have in common: what they are told of the model, what
they refuse, and how weights reach them.
"""

from __future__ import annotations

import copy
import itertools
import logging
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rondo.core.errors import ConfigError, RolloutError, WeightSyncError
from rondo.core.types import GenerateRequest
from rondo.models.family import auto_class, record_of, why_blind
from rondo.models.loading import load_model_config, model_on_meta
from rondo.models.lora import AdapterSet
from rondo.models.names import Parts, parts_of, weights_of
from rondo.models.routers import routers_of, shape_of_routes
from rondo.planning.engine_memory import CACHE_SHARE, kv_bytes
from rondo.platform import cache_share, on_host
from rondo.rollout.adapters import Shelf
from rondo.rollout.images import RequestImages
from rondo.rollout.native.cache import layer_shapes
from rondo.rollout.protocol import Capabilities, EngineSpec
from rondo.rollout.requests import Pending, StopText, check_ready, check_request
from rondo.rollout.third_party import ThirdParty
from rondo.system.hub import local_folder
from rondo.weights.bucket import SharedBucket
from rondo.weights.checksum import checksums
from rondo.weights.intake import Intake

PendingT = TypeVar("PendingT", bound=Pending)
_log = logging.getLogger(__name__)


class ThirdPartyEngine(Generic[PendingT]):
    """The part of a `RolloutEngine` that does not compute. It lives in a process of its own, so weights come
    in buckets (`receive_bucket`, in place of `receive`).

    package: what is known of the engine. coldest: it takes smaller temperatures above 0 for others. Raises
    ConfigError.
    """

    def __init__(self, spec: EngineSpec, package: ThirdParty, coldest: float) -> None:
        package.check(spec.options, spec.device)
        self._spec = spec
        self._package = package
        self._coldest = coldest
        self._capabilities = package.capabilities(spec.options, spec.device)
        config = load_model_config(spec.source)
        self._blind = why_blind(config) or package.why_blind(config)
        self._images = None if self._blind else RequestImages(spec.source, config, spec.image_sample)
        self._vocab_size = int(config.get_text_config().vocab_size)
        self._stop_text = StopText(spec.tokenizer)
        self._weights, self._parts = expected_weights(
            config, trust_remote_code=spec.source.trust_remote_code, adapters=spec.adapters
        )
        # Adapters that come by themselves; None: weights come with them merged.
        self._shelf = None if spec.adapters is None else Shelf(spec.adapters, spec.folder)
        # What routes are; None: nobody asks for them.
        self._routers = routers_of(model_on_meta(spec.source)) if spec.routes else ()
        self._in_flight: dict[str, PendingT] = {}  # by request id
        self._asleep = False
        self._closed = False

    @property
    def version(self) -> int:
        """Returns the version of the weights that it serves; -1: none yet."""
        return self._weights.version

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def receive_bucket(self, bucket: SharedBucket) -> None:
        """Loads tensors from shared memory, which every worker opens. Raises WeightSyncError."""
        raise NotImplementedError

    def look(self, bucket: SharedBucket) -> list[dict[str, int]]:
        """Has every worker open a bucket and load nothing; returns the checksums by name, of each."""
        raise NotImplementedError

    def close_buckets(self) -> None:
        """Has every worker close what it has open of the memory that buckets are in."""
        raise NotImplementedError

    def _without_factors(self, bucket: SharedBucket) -> SharedBucket | None:
        """Keeps A and B that come by themselves. Returns what else is in the bucket; None: nothing."""
        if self._shelf is None:
            return bucket
        factors = tuple(entry for entry in bucket.entries if entry.name in self._weights.factors)
        with replace(bucket, entries=factors).tensors() as tensors:
            self._weights.note(checksums(dict(tensors)))
            for name, view in tensors:
                self._shelf.keep(name, view)
        rest = tuple(entry for entry in bucket.entries if entry.name not in self._weights.factors)
        return replace(bucket, entries=rest) if rest else None

    def _begin_with(self, pending: PendingT) -> None:
        """Says which adapters a request is made with, where several versions of them are served."""
        if self._shelf is not None:
            pending.adapters = self._shelf.begin()

    def _version_of(self, pending: PendingT) -> int:
        """Returns the version that makes a request's tokens now."""
        return self.version if pending.adapters is None else pending.adapters.version

    def _differing_stamps(self, pending: PendingT, counted: Sequence[int] | None) -> RolloutError | None:
        """Compares the versions that a request's tokens are stamped with to those that the engine itself has
        counted (None: it does not count), and returns what differs.
        """
        stamped = pending.versions
        if counted is None or list(counted[: len(stamped)]) == stamped:
            return None
        return RolloutError(
            f"request {pending.request.request_id!r}: {self._package.title} made its tokens with versions "
            f"{_as_spans(counted)}, and they are stamped {_as_spans(stamped)}; report it"
        )

    def _parts_in(self, bucket: SharedBucket) -> Parts:
        """Says how the workers take the bucket's tensors apart."""
        names = [entry.name for entry in bucket.entries]
        return {name: self._parts[name] for name in names if name in self._parts}

    def _see_routes(self, pending: PendingT, routes: np.ndarray) -> None:
        """Has a request keep where its tokens went. routes: integers [n, layers, k] of all layers."""
        shape = shape_of_routes(self._routers)
        of_experts = routes[:, [router.layer for router in self._routers]]
        pending.see_routes(of_experts.reshape(len(routes), shape.width).astype(shape.dtype))

    # ---- what is refused ----

    def _check(self, request: GenerateRequest) -> None:
        """Raises RolloutError for what cannot be served, WeightSyncError where the last update failed."""
        if self._weights.failure and not self._closed:
            raise WeightSyncError(f"request {request.request_id!r}: {self._weights.failure}")
        check_ready(
            request,
            closed=self._closed,
            asleep=self._asleep,
            version=self.version,
            in_flight=self._in_flight,
        )
        limits = {"max_context": self._spec.max_context, "vocab_size": self._vocab_size}
        check_request(request, **limits, coldest=self._coldest, blind=self._blind)
        if self._images is not None:
            self._images.check(request)

    def _refuse_in_flight(
        self, what: str, error: type[RolloutError] | type[WeightSyncError], *, held: bool
    ) -> None:
        """Raises where requests are in flight. held: they may be, because the engine is paused."""
        if self._in_flight and not held:
            count = len(self._in_flight)
            raise error(f"{what}: {count} requests are in flight; await pause() first, or wait")

    def _refuse_sleep(self, *, held: bool) -> None:
        if not self._capabilities.sleep:
            remedy = self._package.why_no_sleep(self._spec.device)
            raise RolloutError(f"{self._package.title} cannot sleep here: {remedy}")
        self._refuse_in_flight("sleep", RolloutError, held=held)


def versions_of(spans: Iterable[tuple[str, int, int]]) -> list[int]:
    """Returns the version of each token, of an engine's own spans (version, first token, behind the last)."""
    return [int(version) for version, start, end in spans for _ in range(start, end)]


def _as_spans(versions: Sequence[int]) -> str:
    """Writes "3×5 4×2": how many tokens each version made, one after the other."""
    runs = [(version, len(list(tokens))) for version, tokens in itertools.groupby(versions)]
    return " ".join(f"{version}×{count}" for version, count in runs) or "of none"


def expected_weights(
    model_config: Any, *, trust_remote_code: bool = False, adapters: AdapterSet | None = None
) -> tuple[Intake, Parts]:
    """Returns the intake of a causal LM's weights, for engines that cannot say what they lack, and how
    checkpoints, whose names such engines know, hold them; allocates nothing. Raises ConfigError where that is
    not known.
    """
    with torch.device("meta"):
        module = auto_class(model_config).from_config(
            copy.deepcopy(model_config), trust_remote_code=trust_remote_code
        )
    try:
        parts = parts_of(module)
    except ConfigError as error:
        raise ConfigError(f"{error}; use rollout.engine=native or transformers") from error
    if adapters is None:
        return Intake(weights_of(module)), parts
    shapes = {name: tuple(tensor.shape) for name, tensor in weights_of(module)}
    return Intake(weights_of(module), adapters.shapes(shapes)), parts


def token_bytes(spec: EngineSpec) -> int:
    """Returns the bytes of one token's keys and values in one worker."""
    itemsize = getattr(torch, spec.dtype).itemsize
    return sum(
        kv_bytes(shape.kv_heads, shape.key_dim, shape.value_dim, itemsize, tensor=spec.tensor_parallel)
        for shape in layer_shapes(load_model_config(spec.source))
    )


def cache_bytes(spec: EngineSpec, tokens: int, package: ThirdParty) -> int:
    """Returns the bytes that one worker's keys and values may have: those of `tokens`, and on an accelerator
    at most `cache_share` of what is free on it now.

    These engines page their cache: with less of it fewer requests run at one time, and the others wait.
    """
    wanted = tokens * token_bytes(spec)
    if on_host(spec.device):
        return wanted
    share, free = cache_share(spec.device)
    gib = 1 << 30
    _log.info(
        f"{package.title}'s key/value cache is the smaller of {wanted / gib:.1f} GiB for "
        f"{spec.max_concurrent} requests of {spec.max_context} tokens and {share / gib:.1f} GiB, "
        f"{CACHE_SHARE:.0%} of the {free / gib:.1f} GiB that are free on {spec.device}"
    )
    return min(wanted, share)


def model_folder(spec: EngineSpec) -> Path:
    """Makes a temporary folder with config.json (and the model's own Python files where they are trusted),
    for engines that start from dummy weights and without a tokenizer. It lies in spec.folder, which goes with
    the engine's process; the caller removes it where it can.

    config.json names the architecture (`Qwen3ForCausalLM`) also where the source's config leaves it out.
    Raises ConfigError or DataError.
    """
    config = copy.deepcopy(load_model_config(spec.source))
    if not config.architectures:
        architecture = (
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
            if record_of(str(config.model_type)).images is not None
            else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        ).get(config.model_type)
        if architecture is None:
            raise ConfigError(
                f"model type {config.model_type!r} has no causal language model in transformers, and its "
                f"config names no `architectures`: {spec.engine} cannot know what to build"
            )
        config.architectures = [architecture] if isinstance(architecture, str) else list(architecture)
    config.dtype = spec.dtype
    folder = Path(tempfile.mkdtemp(prefix=f"rondo-{spec.engine}-", dir=spec.folder))
    config.save_pretrained(folder)
    if spec.source.trust_remote_code and spec.source.path:
        for file in Path(local_folder(spec.source.path, spec.source.hub)).glob("*.py"):
            shutil.copy(file, folder)
    return folder
