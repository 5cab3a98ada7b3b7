"""What travels between an engine's process and its host: pickled lists of small records, length in front.

Both ends are ours and the socket has no name, so nobody else can speak here.

    host → engine   Call: one operation; generate, drop and the rest (`child.Server`)
    engine → host   Ready | Answer (of one Call) | Tokens (of many generate calls) | Done (of one)
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rondo.errors import ConfigError, RolloutError, WeightSyncError
from rondo.rollout.protocol import Capabilities
from rondo.types import Completion, FinishReason

LENGTH = struct.Struct("<Q")
_ERRORS = {error.__name__: error for error in (ConfigError, WeightSyncError, RolloutError)}


@dataclass(frozen=True)
class Call:
    """number: of the call, its answers carry it. operation: a method of `child.Server`."""

    number: int
    operation: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Ready:
    """The engine is built. pid: of its process."""

    pid: int
    description: str
    capabilities: Capabilities
    version: int


@dataclass(frozen=True)
class Answer:
    """What a call gave, or why it gave nothing (error: class name and message)."""

    number: int
    value: Any = None
    error: tuple[str, str] | None = None


@dataclass(frozen=True)
class Tokens:
    """New tokens of several generate calls, one after the other. numbers: of the calls; lengths int64 [R];
    token_ids int32 [T], log_probs float32 [T], policy_versions int32 [T].
    """

    numbers: tuple[int, ...]
    lengths: np.ndarray
    token_ids: np.ndarray
    log_probs: np.ndarray
    policy_versions: np.ndarray

    @staticmethod
    def of(parts: Mapping[int, Sequence[Completion]]) -> Tokens:
        """parts: what each call has got, in order."""
        flat = [part for mine in parts.values() for part in mine]
        return Tokens(
            tuple(parts),
            np.array([sum(len(part.token_ids) for part in mine) for mine in parts.values()], np.int64),
            np.concatenate([part.token_ids for part in flat]),
            np.concatenate([part.log_probs for part in flat]),
            np.concatenate([part.policy_versions for part in flat]),
        )

    def parts(self) -> Iterator[tuple[int, Completion]]:
        """(number of the call, its new tokens; nothing else of the completions is said)."""
        nothing = np.empty(0, np.int32)
        every = Completion("", nothing, self.token_ids, self.log_probs, self.policy_versions, "length")
        start = 0
        for number, length in zip(self.numbers, self.lengths.tolist(), strict=True):
            yield number, every.part(start, start + length)
            start += length


@dataclass(frozen=True)
class Done:
    """A generate call has all its tokens (they have been sent). num_tokens: of the response, for a check."""

    number: int
    prompt_ids: np.ndarray
    finish_reason: FinishReason
    num_tokens: int
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)


def frame(records: Sequence[Any]) -> bytes:
    """One frame: 8 bytes of length, little endian, and the pickle."""
    data = pickle.dumps(list(records), protocol=5)
    return LENGTH.pack(len(data)) + data


def read(connection: socket.socket) -> list[Any]:
    """The next frame's records; blocks. Raises EOFError when the other side is gone."""
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    records: list[Any] = pickle.loads(_exactly(connection, length))
    return records


def _exactly(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view, start = memoryview(data), 0
    while start < length:
        try:
            count = connection.recv_into(view[start:])
        except OSError as error:
            raise EOFError from error
        if count == 0:
            raise EOFError
        start += count
    return data


def error_record(error: BaseException) -> tuple[str, str]:
    """Class and message, for `error_of` on the other side."""
    if type(error).__name__ in _ERRORS:
        return type(error).__name__, str(error)
    return RolloutError.__name__, f"the engine raised {type(error).__name__}: {error}"


def error_of(record: tuple[str, str]) -> Exception:
    return _ERRORS[record[0]](record[1])
