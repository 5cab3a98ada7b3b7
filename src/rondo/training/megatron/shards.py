"""A stage's parameters as checkpoints name them: which tensors each consists of, where every rank's part is,
and the parts that this rank updates.

    flat buffers    Megatron lays parameters out one after another, those of experts apart, and each of the
                    ranks that have the same has an equal run of them to update: it holds moments, and weights
                    in float32, of that run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from rondo.config.schema import ParallelConfig
from rondo.core.errors import ConfigError
from rondo.platform import Residency
from rondo.training.gathering import checksums_of, gather_buckets
from rondo.training.megatron.families import TensorPiece
from rondo.training.megatron.stage import ModelStage
from rondo.training.telling import told_by_all
from rondo.weights.layout import Box, Layout, Parameter, Spec

# Of a checkpoint's tensor: its name, what is to be read, where that is in the whole, and the whole's shape.
Place = tuple[str, torch.Tensor, Box, tuple[int, ...]]


@dataclass(frozen=True)
class FlatRun:
    """A part of a parameter, in the flat order of its elements, that this rank updates."""

    start: int
    """Where it begins in the parameter."""
    weights: torch.Tensor
    """Its weights as they compute."""
    gradients: torch.Tensor
    """Its gradients, in float32."""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the same part of a tensor of the parameter's shape."""
        return whole.view(-1)[self.start : self.start + self.weights.numel()]


def runs_of(stage: ModelStage) -> dict[str, FlatRun]:
    """Returns what this rank updates, by parameter; nothing of those in others' runs."""
    names = {one: name for name, one in stage.tensors().items()}
    runs = {}
    for weights, gradients, starts in stage.buckets():
        group = stage.same(next(iter(starts)))
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        each = len(weights) // ranks
        low, high = rank * each, (rank + 1) * each
        for parameter, at in starts.items():
            begin, end = max(low, at), min(high, at + parameter.numel())
            if begin < end:
                runs[names[parameter]] = FlatRun(begin - at, weights[begin:end], gradients[begin:end])
    return runs


def layout_of(
    own: Mapping[str, tuple[TensorPiece, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    everyone: dist.ProcessGroup,
    sizes: ParallelConfig,
) -> Layout:
    """Says which rank of the world holds what, by the checkpoint's names. own: this rank's parameters.
    shapes: of the model's tensors, each once. Collective.

    Raises ConfigError naming a tensor that is in no parameter of any stage, or in more than one, and one of
    a stage that the model does not have.
    """
    mine = {piece.name: (piece.cut, piece.along) for pieces in own.values() for piece in pieces}
    said = told_by_all(mine, everyone)
    ranks = dist.get_process_group_ranks(everyone)
    each = len(ranks) // sizes.pipeline
    specs: dict[str, Spec] = {}
    # Stage after stage: the pipeline is the outermost axis.
    for first in range(0, len(ranks), each):
        for name, (cut, along) in said[first].items():
            if name in specs or name not in shapes:
                why = "is in the parameters of two stages" if name in specs else "is not one of the model"
                raise ConfigError(f"actor.backend=megatron: {name} {why}", key="actor.backend")
            sharing = getattr(sizes, along)
            of_stage = tuple(ranks[first : first + each])
            specs[name] = Spec(of_stage, (each // sharing, sharing), (None, cut))
    missing = sorted(shapes.keys() - specs.keys())
    if missing:
        raise ConfigError(
            f"actor.backend=megatron: {missing[0]} (and {len(missing) - 1} more) of the model is in no "
            "parameter of megatron-core's: there is no place for it in the table of its family",
            key="actor.backend",
        )
    return Layout(tuple(Parameter(name, shape, dtypes[name]) for name, shape in shapes.items()), specs)


class StageRows(Mapping[str, torch.Tensor]):
    """This rank's parts of a checkpoint's tensors: the storage itself, or a copy where it is interleaved."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], pieces: Mapping[str, tuple[TensorPiece, ...]]):
        self._at = {
            piece.name: (parameters[name].detach(), piece) for name, own in pieces.items() for piece in own
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        parameter, piece = self._at[name]
        return read(piece, parameter)

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)


class StageWeights:
    """A `weights.sync.WeightSource`: what syncs and exports read of a stage.

    exact: names of tensors that are sent as they are, whatever the others are rounded to.
    """

    def __init__(
        self,
        # Of this rank, asked for in a phase. Collective.
        rows: Callable[[], Mapping[str, torch.Tensor]],
        layout: Layout,
        exact: Collection[str],
        residency: Residency,
        group: dist.ProcessGroup,
    ) -> None:
        self.rows, self._layout, self._exact = rows, layout, exact
        self._residency, self._group = residency, group

    def part(
        self, names: Callable[[str], bool], rows: Callable[[], Mapping[str, torch.Tensor]] | None = None
    ) -> StageWeights:
        """Returns those of the tensors with such names, or others in their place."""
        kept = tuple(one for one in self._layout.parameters if names(one.name))
        specs = {one.name: self._layout.specs[one.name] for one in kept}
        layout = replace(self._layout, parameters=kept, specs=specs)
        return StageWeights(rows or self.rows, layout, self._exact, self._residency, self._group)

    def layout(self, dtype: str | None = None) -> Layout:
        """See `WeightSource.layout`."""
        if dtype is None:
            return self._layout
        sent = tuple(
            one if one.name in self._exact else replace(one, dtype=dtype) for one in self._layout.parameters
        )
        return replace(self._layout, parameters=sent)

    @contextmanager
    def local(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """See `WeightSource.local`."""
        with self._residency.during("gather"):
            yield self.rows()

    def gathered(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSource.gathered`."""
        with self.local() as rows:
            yield from gather_buckets(self.layout(dtype), rows, self._group, bucket_bytes)
        self._residency.give_back()

    def release_memory(self) -> None:
        """See `WeightSource.release_memory`."""
        self._residency.make_room(self._group)

    def checksums(self, dtype: str | None = None) -> dict[str, int]:
        """See `WeightSource.checksums`."""
        with self.local() as rows:
            return checksums_of(self.layout(dtype), rows, self._group)


def read(piece: TensorPiece, parameter: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a checkpoint's tensor, in its shape."""
    seen = piece.view(parameter)
    return seen.reshape(-1, *parameter.shape[1:])


def write(piece: TensorPiece, parameter: torch.Tensor, part: torch.Tensor) -> None:
    """Puts this rank's part of a checkpoint's tensor into a parameter."""
    seen = piece.view(parameter)
    seen.copy_(part.view(seen.shape))


def assembled(
    pieces: Iterable[TensorPiece], like: torch.Tensor, parts: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Returns a parameter, in float32, out of this rank's parts of a checkpoint's tensors."""
    whole = torch.empty_like(like, dtype=torch.float32)
    for piece in pieces:
        write(piece, whole, parts[piece.name])
    return whole


def filling(
    parameters: Mapping[str, torch.Tensor],
    pieces: Mapping[str, tuple[TensorPiece, ...]],
    layout: Layout,
    put: Callable[[str, torch.Tensor], None],
) -> Iterator[Place]:
    """Yields what is to be read of a checkpoint. When all of a parameter is read, and the next is asked for,
    `put` gets it, in float32.
    """
    for name, own in pieces.items():
        whole = torch.empty_like(parameters[name], dtype=torch.float32)
        for piece in own:
            part = read(piece, whole).clone()
            box = layout.held(dist.get_rank(), piece.name)
            if box is None:  # the last stage's copy of the first one's embeddings
                box = _box_of_copy(layout, piece.name)
            yield piece.name, part, box, layout.shapes[piece.name]
            write(piece, whole, part)
        put(name, whole)


def places_left(places: Iterable[Place], there: Mapping[str, torch.Tensor]) -> Iterator[Place]:
    """Copies what is `there`, and yields the other places."""
    for name, part, box, shape in places:
        if name in there:
            part.copy_(there[name].detach()[box.slices(Box.whole(shape))])
        else:
            yield name, part, box, shape


def _box_of_copy(layout: Layout, name: str) -> Box:
    """Returns this rank's box of a tensor of the first stage of which the last one has a copy: that of the
    first stage's rank with the same place on the axis `tensor`.
    """
    spec = layout.specs[name]
    tensor = spec.sizes[-1]
    return spec.box(layout.shapes[name], spec.ranks[dist.get_rank() % tensor])


class Turns:
    """The ranks with the same parameters put the runs of each together, and take turns in having it whole:
    each writes its share of a checkpoint. Collective, in the order of the stage's parameters.
    """

    def __init__(self, stage: ModelStage, parameters: Mapping[str, torch.Tensor]) -> None:
        self._groups = {name: stage.same(one) for name, one in parameters.items()}
        self._turns = {
            name: number % dist.get_world_size(group)
            for number, (name, group) in enumerate(self._groups.items())
        }

    def mine(self, name: str) -> bool:
        """Says whether this rank has the parameter whole."""
        return self._turns[name] == dist.get_rank(self._groups[name])

    def _whose(self, name: str) -> int:
        """Returns the rank whose turn it is, among all."""
        return dist.get_global_rank(self._groups[name], self._turns[name])

    def joined(
        self, name: str, like: torch.Tensor, run: FlatRun | None, part: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns what belongs to a parameter, in float32: whole where it is this rank's turn. part: that of
        this rank's run; None, as the run: it has none.
        """
        whole = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        if run is not None and part is not None:
            run.of(whole).copy_(part)
        # As integers: bits are added to what is 0 elsewhere, and those of -0.0 stay.
        dist.reduce(whole.view(torch.int32), self._whose(name), group=self._groups[name])
        return whole

    def told(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Gives every rank what the one whose turn it is has."""
        dist.broadcast(whole, self._whose(name), group=self._groups[name])
        return whole


def as_part(piece: TensorPiece, part: torch.Tensor, sharing: DeviceMesh) -> DTensor:
    """Returns this rank's part of a checkpoint's tensor as a checkpoint is written: on the ranks alone that
    share it out. It shares the storage of `part`.
    """
    placement = Replicate() if piece.cut is None else Shard(piece.cut)
    return DTensor.from_local(part, sharing, [placement], run_check=False)
