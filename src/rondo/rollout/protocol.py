"""What the rest of the house sees of an engine that generates tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rondo.core.types import Completion, GenerateRequest, StepStats
from rondo.models.lora import AdapterSet
from rondo.models.source import ModelSource, TokenizerSource

WASTED_TOKENS = "rollout/wasted_tokens"  # in an engine's statistics: of generate calls that were cancelled

# New tokens of a request since the last call; from the event loop's thread, before `generate` returns.
OnTokens = Callable[[Completion], None]


@dataclass(frozen=True)
class EngineSpec:
    """How to build an engine, in this process or another; picklable."""

    engine: str
    """native, transformers, vllm or sglang."""
    source: ModelSource
    """The model that it serves; its weights come later."""
    dtype: str
    """Of the weights, and of what is computed with them: torch's name."""
    device: str
    """"cpu", "cuda:i" or, with tensor_parallel > 1, the first of them."""
    max_context: int
    """Most prompt and response tokens of one request together."""
    max_concurrent: int
    """Requests that are decoded at one time; others wait."""
    threads: int
    """That one engine computes with on a CPU."""
    tensor_parallel: int = 1
    """Devices of one engine."""
    seed: int = 0
    """Of what a third-party engine draws itself; requests bring their own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The engine's own arguments (rollout.engine.options)."""
    tokenizer: TokenizerSource | None = None
    """Whose text stop strings are found in; None: requests cannot have any."""
    folder: str | None = None
    """For files that go with the engine's process; None: the machine's temporary folder."""
    python: str | None = None
    """The interpreter of the environment in which the engine is installed; None: this one's."""
    image_sample: str = ""
    """What images become where it was started, in another environment (`ImageReader.sample`); "": it is the
    same one, or there are none.
    """
    adapters: AdapterSet | None = None
    """Those that come by themselves, beside the model's own weights; None: weights come as they are computed
    with."""
    routes: bool = False
    """Completions have a mixture's routes."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do here. An option that it cannot honour is a ConfigError when it is built."""

    engine: str
    """The engine's name: native, transformers, vllm or sglang."""
    engine_version: str
    """The version of its package."""
    sleep: bool
    """`sleep` gives memory back."""
    reads_back: bool
    """`parameter(name)` returns what it received and computes with."""


class RolloutEngine(Protocol):
    """One replica. Tokens in, tokens out; every token carries the policy version that made it.

    Requests and life are asynchronous, on one event loop. Weights are synchronous, from any one thread:
    `begin(version)`, `receive(name, tensor)` for every checkpoint name, `commit(version, checksums)`; the
    engine must be paused or idle meanwhile, and serves nothing until a complete set is committed. What is in
    flight goes on under the new weights: its tokens are kept, its keys and values are computed anew.

    With `EngineSpec.adapters` the first set is the model's own weights with A and B of the adapters, and
    later ones may be A and B alone. An engine that can serve several versions of them at one time lets what
    is in flight come to its end under those that it began with.
    """

    @property
    def version(self) -> int:
        """Returns the version of the weights that it serves; -1: none yet."""
        ...

    def capabilities(self) -> Capabilities: ...

    def describe(self) -> str:
        """Writes one line for the log: engine, version, and what is worth knowing of how it runs here."""
        ...

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Returns the completion of one request. Cancelling the task frees its place. Raises RolloutError;
        ReplicaLostError, with the tokens so far, where the engine's process is gone.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """Has the pending `generate` call return what it has ("cancelled"). Unknown ids are ignored."""
        ...

    async def pause(self) -> None:
        """Stops at a token boundary; requests keep their place, new ones wait."""
        ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Gives the key/value cache back; paused or idle. An engine may give up its weights as well, and then
        serves nothing until the next update. Raises RolloutError where `capabilities` says no.
        """
        ...

    async def wake(self) -> None: ...

    def begin(self, version: int) -> None: ...

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        """One in a process of its own may have `receive_bucket(bucket)` instead, for many tensors at once."""
        ...

    def commit(self, version: int, checksums: Mapping[str, int] | None = None) -> None:
        """Serves `version`. checksums: by checkpoint name (`rondo.weights.checksum`); raises WeightSyncError
        naming the first tensor that is missing or differs.
        """
        ...

    async def stats(self) -> StepStats:
        """Returns counters since the last call."""
        ...

    def close(self) -> None:
        """Frees everything and ends its processes. May be called twice."""
        ...
