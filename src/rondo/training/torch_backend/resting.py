"""What of a model and its optimizer is in host memory between phases, and how it comes and goes.

streamed   in pinned buffers of at most 1 GiB that are made once, each copied as one, beside what the device
           computes: of moments the next buffer comes while this one's are updated
plain      tensor by tensor, one after another
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from rondo.platform import platform_of
from rondo.training.offload import HostMemory, blocks_of, cut, in_blocks, is_there, like, room_for
from rondo.training.views import in_place_of, local_of

Way = Literal["streamed", "plain"]
Moments = Mapping[str, Mapping[str, torch.Tensor]]  # by name of a parameter, and of the moment


class RestingMoments(ABC):
    """Moments, at 0 in the beginning. shapes: tensors without memory."""

    at_rest: Moments
    """All of them, in host memory."""
    passes: int
    """The most bytes of them that are on the device at one time."""

    def __init__(self, shapes: Moments, device: torch.device) -> None:
        self._shapes = shapes
        self._device = device
        sizes = [room_for([one.nbytes for one in own.values()]) for own in shapes.values()]
        names, blocks = list(shapes), blocks_of(sizes)
        self._blocks = [[names[place] for place in block] for block in blocks]
        self._sizes = [sum(sizes[place] for place in block) for block in blocks]
        self._most = 0

    @abstractmethod
    def passing(self, wanted: Collection[str]) -> Iterator[Moments]:
        """Yields those of all parameters on the device, some at a time; what has become of them is in
        `at_rest` at the end. wanted: names of parameters; some others may come beside them.
        """

    def passed(self) -> int:
        """Returns the most bytes that were on the device since the last call."""
        most, self._most = self._most, 0
        return most


class PlainMoments(RestingMoments):
    """See the head of this file."""

    def __init__(self, shapes: Moments, device: torch.device) -> None:
        super().__init__(shapes, device)
        pins = platform_of(device).pins
        self.at_rest = {
            name: {
                entry: torch.zeros(one.shape, dtype=one.dtype, pin_memory=pins) for entry, one in own.items()
            }
            for name, own in shapes.items()
        }
        self.passes = max(self._sizes, default=0)

    def passing(self, wanted: Collection[str]) -> Iterator[Moments]:
        """See RestingMoments.passing."""
        for block in self._blocks:
            names = [name for name in block if name in wanted]
            there = {
                name: {entry: one.to(self._device) for entry, one in self.at_rest[name].items()}
                for name in names
            }
            held = sum(one.nbytes for own in there.values() for one in own.values())
            self._most = max(self._most, held)
            yield there
            for name in names:
                for entry, host in self.at_rest[name].items():
                    host.copy_(there[name][entry])
            del there  # else the next ones would come beside them


class StreamedMoments(RestingMoments):
    """See the head of this file."""

    def __init__(self, shapes: Moments, device: torch.device) -> None:
        super().__init__(shapes, device)
        self._stream = platform_of(device).stream(device)
        self._host = HostMemory(device).buffers(self._sizes)
        at_rest: dict[str, Mapping[str, torch.Tensor]] = {}
        for block, buffer in zip(self._blocks, self._host, strict=True):
            at_rest |= self._in(buffer, block)
        self.at_rest = at_rest
        self.passes = max(self._sizes, default=0) * min(2, len(self._sizes))

    def passing(self, wanted: Collection[str]) -> Iterator[Moments]:
        """See RestingMoments.passing."""
        blocks = [
            (names, host)
            for names, host in zip(self._blocks, self._host, strict=True)
            if not set(names).isdisjoint(wanted)
        ]
        largest = max((host.nbytes for _, host in blocks), default=0)
        slots = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in blocks[:2]]
        self._most = max(self._most, sum(slot.nbytes for slot in slots))
        there = [slots[place % 2][: host.nbytes] for place, (_, host) in enumerate(blocks)]
        # Each slot is filled anew behind the copy of what was in it, in the stream's own order.
        marks = [self._stream.copy([(one, host)]) for one, (_, host) in zip(there[:1], blocks, strict=False)]
        try:
            for place, (names, host) in enumerate(blocks):
                if place + 1 < len(blocks):
                    marks.append(self._stream.copy([(there[place + 1], blocks[place + 1][1])]))
                self._stream.wait(marks[place])
                yield self._in(there[place], names)
                self._stream.copy([(host, there[place])])
        finally:
            self._stream.finish()  # the slots are freed, and what rests may be read

    def _in(self, buffer: torch.Tensor, names: Collection[str]) -> Moments:
        """Returns the moments of some parameters as parts of a buffer."""
        every = [(name, entry, one) for name in names for entry, one in self._shapes[name].items()]
        found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names}
        for (name, entry, one), part in zip(
            every, cut(buffer, [each[2].nbytes for each in every]), strict=True
        ):
            found[name][entry] = like(one, part)
        return found


def resting_moments(way: Way, shapes: Moments, device: torch.device) -> RestingMoments:
    """Returns moments at 0 that rest in host memory. device: where the parameters are."""
    return StreamedMoments(shapes, device) if way == "streamed" else PlainMoments(shapes, device)


# ---- parameters, and the gradients that are there when a phase ends ----

# Has everybody see the parameters anew, each as what a function makes of the one on the device. The flag says
# whether they lie at another place of the device than before.
Bind = Callable[[Callable[[torch.Tensor], torch.Tensor], bool], None]


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class PlainModel:
    """A `platform.Resting`, see the head of this file."""

    def __init__(self, model: torch.nn.Module, device: torch.device, bind: Bind) -> None:
        self._model = model
        self._device = device
        self._bind = bind

    def bring(self) -> None:
        """See Resting.bring."""
        gradients = [(one, one.grad) for one in self._model.parameters()]
        try:
            self._model.to(self._device)
        except BaseException:  # there is no room: some are there, of one without its gradient
            for one, _ in gradients:
                one.grad = None
            self.rest(changed=False)
            for one, gradient in gradients:
                one.grad = None if gradient is None else gradient.to("cpu")
            raise
        self._bind(_itself, True)

    def rest(self, *, changed: bool) -> None:
        """See Resting.rest."""
        self._model.to("cpu")
        self._bind(_itself, True)


@dataclass(frozen=True)
class _Held:
    """Memory of the device that is given up and taken again; tensors in it stay what they are."""

    there: torch.Tensor
    """All of its bytes."""
    host: tuple[torch.Tensor, ...]
    """The same, in host memory, one part behind the other."""
    learns: bool = True
    """Whether an update changes it."""

    def leave(self) -> None:
        """Gives it up."""
        self.there.untyped_storage().resize_(0)

    def take(self) -> None:
        """Takes it again; nothing is in it."""
        self.there.untyped_storage().resize_(self.there.nbytes)

    def parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields its parts: on the device, and in host memory."""
        there = self.there.split([part.nbytes for part in self.host])
        return zip(there, self.host, strict=True)


def _held(storages: Collection[torch.Tensor], memory: HostMemory) -> list[_Held]:
    """Returns storages with room for them in host memory."""
    parts = [in_blocks(one) for one in storages]
    hosts = iter(memory.views([part for own in parts for part in own]))
    return [
        _Held(one, tuple(itertools.islice(hosts, len(own)))) for one, own in zip(storages, parts, strict=True)
    ]


class StreamedStorages:
    """A `platform.Resting`, see the head of this file: memory of the device is given up whole, and taken
    again; tensors in it stay what they are.
    """

    def __init__(
        self,
        device: torch.device,
        # What rests; asked once, when it first does.
        tensors: Callable[[], Collection[torch.Tensor]],
        # Gradients, of which those that are there go and come once.
        gradients: Callable[[], Collection[torch.Tensor]],
    ) -> None:
        self._stream = platform_of(device).stream(device)
        self._device = device
        self._tensors = tensors
        self._gradients_of = gradients
        self._held: list[_Held] = []
        self._memory, self._for_gradients = HostMemory(device), HostMemory(device)
        self._gradients: list[_Held] = []

    def bring(self) -> None:
        """See Resting.bring."""
        # What is still there (to rest has failed, for want of host memory) is newer than its copy.
        held = [one for one in (*self._held, *self._gradients) if not is_there(one.there)]
        try:
            for one in held:
                one.take()
        except BaseException:  # there is no room: some are there
            for one in held:
                one.leave()
            raise
        self._stream.wait(self._stream.copy(pair for one in held for pair in one.parts()))
        self._gradients = []

    def rest(self, *, changed: bool) -> None:
        """See Resting.rest."""
        if not self._held:
            self._held = self._hold()
        learnt = [one for one in self._held if changed and one.learns]
        self._gradients = _held(list(_storages(self._gradients_of()).values()), self._for_gradients)
        self._copy_to_host((*learnt, *self._gradients))
        for one in (*self._held, *self._gradients):
            one.leave()

    def _hold(self) -> list[_Held]:
        """Returns what rests from now on, with its copy."""
        held = _held(list(_storages(self._tensors()).values()), self._memory)
        self._copy_to_host(held)
        return held

    def _copy_to_host(self, held: Collection[_Held]) -> None:
        self._stream.copy((host, there) for one in held for there, host in one.parts())
        self._stream.finish()


class StreamedModel(StreamedStorages):
    """Of a model whose parameters are put into a few buffers of the device when they first rest; small
    buffers of the model (of positions, say) stay where they are.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, bind: Bind) -> None:
        def gradients() -> list[torch.Tensor]:
            return [local_of(one.grad) for one in model.parameters() if one.grad is not None]

        super().__init__(device, list, gradients)
        self._model = model
        self._bind = bind
        self._host_of: dict[int, torch.Tensor] = {}  # by the storage that it is the copy of

    def bring(self) -> None:
        """See Resting.bring."""
        super().bring()
        self._bind(_itself, False)

    def rest(self, *, changed: bool) -> None:
        """See Resting.rest."""
        super().rest(changed=changed)
        self._bind(self._at_rest, False)

    def _at_rest(self, local: torch.Tensor) -> torch.Tensor:
        host = self._host_of.get(local.untyped_storage()._cdata)
        if host is None:
            return local
        return host.view(local.dtype).as_strided(local.shape, local.stride(), local.storage_offset())

    def _hold(self) -> list[_Held]:
        """Puts parameters into buffers of the device, by way of host memory: there is no second copy on the
        device. What is a part of a storage (FSDP pads rows that ranks do not share evenly) keeps that.
        """
        held = list[_Held]()
        every = list(self._model.parameters())
        whole = [one for one in every if _is_whole(local_of(one))]
        whole.sort(key=lambda one: not one.requires_grad)  # what learns is not beside what does not
        learns = sum(one.requires_grad for one in whole)
        locals_ = [local_of(one) for one in whole]
        blocks = [
            [start + place for place in block]
            for start, part in ((0, locals_[:learns]), (learns, locals_[learns:]))
            for block in blocks_of([one.nbytes for one in part])
        ]
        sizes = [[locals_[place].nbytes for place in block] for block in blocks]
        others = _storages([one for one in map(local_of, every) if not _is_whole(one)])
        hosts = self._memory.buffers([*map(room_for, sizes), *(one.nbytes for one in others.values())])
        joined, apart = hosts[: len(blocks)], hosts[len(blocks) :]
        places = [
            (locals_[place], part)
            for host, block, own in zip(joined, blocks, sizes, strict=True)
            for place, part in zip(block, cut(host, own), strict=True)
        ]
        self._stream.copy((like(one, part), one) for one, part in places)
        self._stream.copy(zip(apart, others.values(), strict=True))
        self._stream.finish()
        for one in locals_:
            one.untyped_storage().resize_(0)
        at: dict[int, torch.Tensor] = {}
        for host, block, own in zip(joined, blocks, sizes, strict=True):
            there = host.to(self._device)
            held.append(_Held(there, (host,), whole[block[0]].requires_grad))
            for place, part in zip(block, cut(there, own), strict=True):
                at[id(whole[place])] = like(locals_[place], part)
        held += [_Held(one, (host,)) for one, host in zip(others.values(), apart, strict=True)]

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            local = at.get(id(tensor))
            return tensor if local is None else in_place_of(tensor, local)

        self._model._apply(moved)
        self._host_of = {one.there.untyped_storage()._cdata: one.host[0] for one in held}
        self._bind(_itself, True)
        return held


def _is_whole(local: torch.Tensor) -> bool:
    return local.is_contiguous() and 0 < local.nbytes == local.untyped_storage().nbytes()


def _storages(tensors: Collection[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Returns the storages that tensors are in, each once, as bytes."""
    found = {}
    for one in tensors:
        storage = one.untyped_storage()
        if storage.nbytes() and storage._cdata not in found:
            bytes_ = torch.empty(0, dtype=torch.uint8, device=one.device)
            found[storage._cdata] = bytes_.set_(storage, 0, (storage.nbytes(),), (1,))
    return found
