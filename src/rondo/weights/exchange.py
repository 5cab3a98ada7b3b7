"""A transfer plan carried out by point-to-point messages of a process group: the world's, by gloo, or one of
its own, by NCCL.

    sender                                   receiver
    version, digest of the plan  ──────────▶ compares, answers yes or no
    rounds of boxes              ──────────▶ puts tensors together, hands each to the sink when it is whole
    checksum of what was sent    ──────────▶ sums up over its senders, commits

A receiver that goes away is an entry in the sender's report, not an error: the others are served. One that
hangs ends the sync for all: gloo closes every connection of a process in which a wait timed out. In a group
of its own (`own_group.py`) either ends it for all: those who are left begin again. A sink that
raises does not stop the stream (the senders would wait); its error is raised at the end. Messages of
two ranks are matched by their order alone: a group that is used for this carries nothing else meanwhile.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Literal

import torch
import torch.distributed as dist

from rondo.core.errors import RondoError, WeightSyncError, outage
from rondo.platform import platform_of
from rondo.system.activity import Activity, progress
from rondo.weights.checksum import box_sum, combine
from rondo.weights.layout import Box, Layout
from rondo.weights.own_group import OwnGroup
from rondo.weights.plan import Move, TransferPlan, plan_transfer
from rondo.weights.sync import SyncReport, WeightSink

# For one round, in which the receiver's engine may load a bucket; a death is seen at once.
TIMEOUT_SECONDS = 600.0
TakePiece = Callable[[str, Box], torch.Tensor]


@dataclass(frozen=True)
class Transfer:
    """What both sides know beforehand. Ranks are those of the world."""

    source: Layout
    """Which rank has what."""
    target_ranks: tuple[int, ...]
    """Each needs all parameters whole."""
    bucket_bytes: int
    """The most that travels at one time."""
    timeout_seconds: float = TIMEOUT_SECONDS
    """How long a sender waits for one round; receivers wait twice as long."""
    name: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)
    """The name of this transfer and its copies, for a process group of its own."""

    def __post_init__(self) -> None:
        both = sorted(set(self.source.ranks) & set(self.target_ranks))
        if both:
            raise ValueError(f"ranks {both} would send to themselves: gather instead (weights/sync.py)")

    @cached_property
    def target(self) -> Layout:
        """Says who needs what."""
        return Layout.replicated(self.source.parameters, self.target_ranks)

    @cached_property
    def plan(self) -> TransferPlan:
        """Plans the moves; they are the same on every rank."""
        return plan_transfer(self.source, self.target, self.bucket_bytes)

    @cached_property
    def digest(self) -> int:
        """Returns 63 bits of what the plan follows from, which are the same where it is."""
        text = repr((self.source, self.target_ranks, self.bucket_bytes)).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1

    def own_group(self, device: str) -> OwnGroup | None:
        """Makes this rank's end of a group of its own; None where the platform has none: the world's does."""
        if not platform_of(device).own_groups:
            return None
        return OwnGroup(self.name, (*self.source.ranks, *self.target_ranks), device, self.timeout_seconds)


@dataclass
class SendReport:
    """What became of a transfer, for the sender."""

    lost: dict[int, str] = field(default_factory=dict)
    """Receivers (ranks of the world) that went away or refused, with the reason."""


def piece_of(layout: Layout, shards: Mapping[str, torch.Tensor]) -> TakePiece:
    """Returns, for `send`, boxes of what this rank holds by `layout`, cast to the layout's dtype."""
    rank = dist.get_rank()
    dtypes = {parameter.name: getattr(torch, parameter.dtype) for parameter in layout.parameters}

    def piece(name: str, box: Box) -> torch.Tensor:
        held = layout.held(rank, name)
        assert held is not None
        return shards[name][box.slices(held)].to(dtypes[name]).contiguous()

    return piece


def send(
    transfer: Transfer,
    version: int,
    piece: TakePiece,
    device: torch.device | str,
    own: OwnGroup | None = None,
) -> SendReport:
    """Does this rank's part of sending `version`. piece(name, box): those elements at wire dtype, contiguous.
    own: what carries the messages; None: the world's group.

    Returns when all receivers have everything, or are lost; never waits longer than transfer.timeout_seconds
    for one round.
    """
    rank, report = dist.get_rank(), SendReport()
    plan, link = transfer.plan, _Link(own, device, transfer.timeout_seconds)
    targets = plan.targets(rank)
    index = {parameter.name: i for i, parameter in enumerate(transfer.source.parameters)}
    shapes = {parameter.name: parameter.shape for parameter in transfer.source.parameters}
    # Each receiver gets the sums of what this rank sent to it, which nobody reads here; it adds up those of
    # all senders.
    sums: dict[int, list[tuple[int, torch.Tensor]]] = {target: [] for target in targets}

    def live() -> list[int]:
        return [target for target in targets if target not in report.lost]

    start = link.numbers([version, transfer.digest])
    report.lost |= link.send((target, start, "the start of a sync") for target in live())
    answers = {target: link.numbers([0]) for target in live()}
    what = "the answer to the start of a sync"
    report.lost |= link.receive((target, answer, what) for target, answer in answers.items())
    answered = live()
    for target, (answer,) in zip(answered, _read([answers[target] for target in answered]), strict=True):
        if answer != 1:
            report.lost[target] = "it refused the transfer: it expects another version or another plan"
    for moves in plan.sends(rank):
        prepared: dict[tuple[str, Box], tuple[torch.Tensor, torch.Tensor]] = {}
        for move in moves:
            # A box that goes to several receivers is cast and summed once.
            if move.target not in report.lost and (move.name, move.box) not in prepared:
                tensor = piece(move.name, move.box)
                prepared[move.name, move.box] = (tensor, box_sum(tensor, move.box.offset, shapes[move.name]))
        messages = []
        for move in moves:
            if move.target not in report.lost:
                tensor, part = prepared[move.name, move.box]
                messages.append((move.target, tensor, repr(move.name)))
                sums[move.target].append((index[move.name], part))
        report.lost |= link.send(messages)
    totals = [(target, link.sums(sums[target], len(index)), "the checksums") for target in live()]
    report.lost |= link.send(totals)
    return report


def receive(
    transfer: Transfer,
    version: int,
    sink: WeightSink,
    device: torch.device | str,
    own: OwnGroup | None = None,
) -> SyncReport:
    """Does this rank's part of receiving `version`: into the sink, which confirms the checksums at its
    commit.

    Raises WeightSyncError: a sender went away, sends another version, or the sink refused a tensor (its own
    error).
    """
    rank = dist.get_rank()
    # twice as patient as the senders: they may wait that long for another receiver, and it is they who know
    plan, link = transfer.plan, _Link(own, device, 2 * transfer.timeout_seconds)
    senders = plan.sources(rank)
    _shake_hands(transfer, version, senders, link)
    inbox = _Inbox(transfer, sink, device)
    inbox.guarded(lambda: sink.begin(version))
    for moves in plan.receives(rank):
        _raise_lost(link.receive(inbox.expect(moves)), version)
        inbox.arrived(moves)
    names = [parameter.name for parameter in transfer.source.parameters]
    parts = [link.numbers([0] * len(names)) for _ in senders]
    _raise_lost(
        link.receive((s, part, "the checksums") for s, part in zip(senders, parts, strict=True)), version
    )
    sums = {name: combine(every) for name, every in zip(names, zip(*_read(parts), strict=True), strict=True)}
    inbox.guarded(lambda: sink.commit(version, sums))
    if inbox.failure is not None:
        raise inbox.failure
    return SyncReport(
        version,
        num_tensors=len(names),
        bytes_moved=plan.bytes_moved,
        bytes_needed=plan.bytes_moved,
        peak_bytes=plan.peak_bytes,
        rounds=plan.num_rounds,
    )


def _shake_hands(transfer: Transfer, version: int, senders: list[int], link: _Link) -> None:
    headers = [link.numbers([0, 0]) for _ in senders]
    messages = zip(senders, headers, strict=True)
    _raise_lost(link.receive((s, header, "the start of a sync") for s, header in messages), version)
    expected, said = [version, transfer.digest], dict(zip(senders, _read(headers), strict=True))
    wrong = {sender: header for sender, header in said.items() if header != expected}
    lost = link.send((s, link.numbers([int(not wrong)]), "the answer to the start") for s in senders)
    if wrong:
        sender, (sent_version, _) = next(iter(wrong.items()))
        raise WeightSyncError(
            f"rank {sender} starts to send version {sent_version} by "
            f"{'another plan' if sent_version == version else 'its plan'}, version {version} was expected"
        )
    _raise_lost(lost, version)


class _Inbox:
    """Tensors that are being put together."""

    def __init__(self, transfer: Transfer, sink: WeightSink, device: torch.device | str) -> None:
        self.failure: RondoError | None = None
        self._parameters = {parameter.name: parameter for parameter in transfer.source.parameters}
        self._sink = sink
        self._device = device
        self._open: dict[str, torch.Tensor] = {}
        self._missing: dict[str, int] = {}
        self._apart: list[tuple[torch.Tensor, torch.Tensor]] = []  # (place, what arrives for it)

    def expect(self, moves: list[Move]) -> list[tuple[int, torch.Tensor, str]]:
        """Says where each message of a round goes."""
        messages = []
        for move in moves:
            parameter = self._parameters[move.name]
            if move.name not in self._open:
                dtype = getattr(torch, parameter.dtype)
                self._open[move.name] = torch.empty(parameter.shape, dtype=dtype, device=self._device)
                self._missing[move.name] = self._open[move.name].numel()
            place = self._open[move.name][move.box.slices(Box.whole(parameter.shape))]
            arriving = place
            # Messages are contiguous bytes. A box of rows is a view that they arrive in; any other arrives
            # apart, and is copied.
            if not place.is_contiguous():
                arriving = torch.empty_like(place, memory_format=torch.contiguous_format)
                self._apart.append((place, arriving))
            messages.append((move.source, arriving, repr(move.name)))
        return messages

    def arrived(self, moves: list[Move]) -> None:
        """Ends a round: whole tensors go to the sink."""
        for place, arriving in self._apart:
            place.copy_(arriving)
        self._apart = []
        for move in moves:
            # The boxes of a plan do not overlap, so that counting elements tells when a tensor is whole.
            self._missing[move.name] -= move.box.size
            if not self._missing[move.name]:
                tensor = self._open.pop(move.name)
                self.guarded(partial(self._sink.receive, move.name, tensor))

    def guarded(self, action: Callable[[], None]) -> None:
        """Keeps the sink's first error for the end; after it nothing reaches the sink."""
        if self.failure is None:
            try:
                action()
            except RondoError as error:
                self.failure = error


class _Link:
    """Messages of one group, and who went away."""

    def __init__(self, own: OwnGroup | None, device: torch.device | str, seconds: float) -> None:
        self._own = own
        self._device = device
        self._timeout = timedelta(seconds=seconds)

    def numbers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def sums(self, parts: Sequence[tuple[int, torch.Tensor]], count: int) -> torch.Tensor:
        """Returns int64 [count]: at each place the sum of its parts (place, int64 []), which wraps around."""
        total = torch.zeros(count, dtype=torch.int64, device=self._device)
        if parts:
            places = self.numbers([place for place, _ in parts])
            total.index_add_(0, places, torch.stack([part for _, part in parts]).to(total.device))
        return total

    def send(self, messages: Iterable[tuple[int, torch.Tensor, str]]) -> dict[int, str]:
        """Sends messages: (peer, tensor, what it is) each. Returns the peers that cannot be reached, with the
        reason.
        """
        return self._exchange("send", messages, "while it was sent")

    def receive(self, messages: Iterable[tuple[int, torch.Tensor, str]]) -> dict[int, str]:
        """Receives into the tensors; otherwise as `send`."""
        return self._exchange("recv", messages, "while it was to send")

    def _exchange(
        self,
        verb: Literal["send", "recv"],
        messages: Iterable[tuple[int, torch.Tensor, str]],
        doing: str,
    ) -> dict[int, str]:
        if self._own is not None:
            # Neither side sends tensors without elements: both leave them out by the same plan.
            batch = [message for message in messages if message[1].numel()]
            return self._in_one_batch(self._own, verb, batch, doing)
        lost: dict[int, str] = {}
        works: list[tuple[int, str, dist.Work | None, torch.Tensor]] = []
        start = {"send": dist.isend, "recv": dist.irecv}[verb]
        for peer, tensor, what in messages:
            if peer not in lost and tensor.numel():
                with _watch(lost, peer, f"{doing} {what}"):
                    works.append((peer, what, start(_raw(tensor), peer), tensor))
        for peer, what, work, tensor in works:
            if work is not None and peer not in lost:
                with _watch(lost, peer, f"{doing} {what}"), Activity(f"{what}, with rank {peer}", bound=True):
                    work.wait(self._timeout)
                progress(tensor.nbytes)
        return lost

    def _in_one_batch(
        self,
        own: OwnGroup,
        verb: Literal["send", "recv"],
        batch: list[tuple[int, torch.Tensor, str]],
        doing: str,
    ) -> dict[int, str]:
        """Carries all messages at once. An error is one of all peers, because nobody knows which one caused
        it.
        """
        peers = sorted({peer for peer, _, _ in batch})
        what = ", ".join(dict.fromkeys(what for _, _, what in batch[:3])) + (" …" if len(batch) > 3 else "")
        with Activity(f"{what}, with ranks {peers}", bound=True):
            broken = own.exchange(verb, [(peer, _raw(tensor)) for peer, tensor, _ in batch], self._timeout)
        if broken:
            reason = f"it, or another rank of the transfer, went away or hung {doing} {what}: {broken}"
            return dict.fromkeys(peers, reason)
        progress(sum(tensor.nbytes for _, tensor, _ in batch))
        return {}


@contextmanager
def _watch(lost: dict[int, str], peer: int, doing: str) -> Iterator[None]:
    """Makes what torch.distributed raises about a peer an entry of `lost`."""
    try:
        yield
    except RuntimeError as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        lost[peer] = f"it went away or hung {doing}: {first}"


def _read(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Returns what tensors of one length have, for one look at the device."""
    return torch.stack(list(tensors)).tolist() if tensors else []


def _raise_lost(lost: Mapping[int, str], version: int) -> None:
    for rank, reason in lost.items():
        message = f"version {version} did not arrive from rank {rank} of the trainer: {reason}"
        raise outage(WeightSyncError(message))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor: every dtype travels alike."""
    assert tensor.is_contiguous()
    return tensor.detach().reshape(-1).view(torch.uint8)
