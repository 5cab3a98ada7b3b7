"""The ranks of a role, seen as the grids that its tensors are spread over.

    dense    pipeline × replicate × shard × tensor   all parameters but those of experts
    expert   pipeline × replicate × expert_shard × expert
                                                     the experts of a mixture, where ranks hold whole ones

An axis of one rank is left out of a grid, but for the one that shards. A rank's number counts along the last
axis first, in both: expert_shard · expert = shard · tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rondo.config.schema import ParallelConfig
from rondo.core.errors import ConfigError
from rondo.models.context import Context
from rondo.weights.layout import Spec

PIPELINE, REPLICATE, SHARD, TENSOR = "pipeline", "replicate", "shard", "tensor"
EXPERT_SHARD, EXPERT = "expert_shard", "expert"


@dataclass(frozen=True)
class Views:
    everyone: dist.ProcessGroup
    """All ranks."""
    dense: DeviceMesh
    """Of all parameters but those of experts."""
    expert: DeviceMesh | None = None
    """Of experts; None: they are spread as all else is."""
    alone: DeviceMesh | None = None
    """This rank by itself, which transformers wants for experts where no ranks have the same rows."""
    context: Context | None = None
    """The ranks that have the same rows, and divide their tokens."""

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Views:
        """Returns the views of a mesh of one axis, which shards. Raises ConfigError for one of several."""
        if mesh.ndim != 1:
            raise ConfigError(f"a mesh of axes {mesh.mesh_dim_names}: say which are for what by Views")
        group = mesh.get_group()
        return cls(group, DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=(SHARD,)))

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return self.dense.size()

    @property
    def sizes(self) -> ParallelConfig:
        """Returns the number of ranks along each axis."""
        dense = dict(zip(names_of(self.dense), self.dense.shape, strict=True))
        return ParallelConfig(
            replicate=dense.get(REPLICATE, 1),
            tensor=dense.get(TENSOR, 1),
            context=1 if self.context is None else self.context.size,
            expert=1 if self.expert is None else self.expert[EXPERT].size(),
            pipeline=dense.get(PIPELINE, 1),
        )

    @property
    def shards(self) -> DeviceMesh:
        """Returns the axes over which FSDP spreads (and copies) what is left of a tensor."""
        return _sliced(self.dense, (REPLICATE, SHARD))

    @property
    def tensor(self) -> DeviceMesh | None:
        """Returns the axis along which ranks compute parts of one product; None: there is one rank on it."""
        return self.dense[TENSOR] if TENSOR in names_of(self.dense) else None

    @property
    def expert_shards(self) -> DeviceMesh:
        """Returns the axes over which FSDP spreads (and copies) what is left of an expert."""
        assert self.expert is not None
        return _sliced(self.expert, (REPLICATE, EXPERT_SHARD))

    def vocabulary(self, size: int) -> Vocabulary | None:
        """Returns the ranks that share out the tokens of a vocabulary; None: each has all of them."""
        if self.tensor is None:
            return None
        return Vocabulary(self.tensor.get_group(), self.tensor.get_local_rank(), self.tensor.size(), size)

    def spec_of(self, tensor: DTensor) -> Spec:
        """Returns how a tensor lies on all ranks. It names some of a view's axes; along the others all ranks
        have the same.
        """
        placements = dict(zip(names_of(tensor.device_mesh), tensor.placements, strict=True))
        view = self.dense
        if not placements.keys() <= set(names_of(view)):
            assert self.expert is not None
            view = self.expert
        cuts: list[int | None] = []
        for axis, name in enumerate(names_of(view)):
            placement = placements.get(name, Replicate())
            if placement.is_replicate():
                cuts.append(None)
                continue
            assert isinstance(placement, Shard | _StridedShard), placement
            # DTensor also takes dimensions from the end, as negative numbers.
            cuts.append(placement.dim % tensor.ndim)
            # A `_StridedShard` says into how many pieces later axes cut the same dimension.
            later = [one for one in names_of(view)[axis + 1 :] if one in placements]
            made = math.prod(view[one].size() for one in later if _cuts_too(placements[one], placement))
            assert made == getattr(placement, "split_factor", 1), (tensor.placements, names_of(view))
        return Spec(tuple(view.mesh.flatten().tolist()), tuple(view.shape), tuple(cuts))


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """Returns the names of a mesh's axes."""
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names


def _sliced(mesh: DeviceMesh, wanted: Iterable[str]) -> DeviceMesh:
    names = tuple(name for name in wanted if name in names_of(mesh))
    return mesh if names == names_of(mesh) else mesh[names]


def _cuts_too(one: Placement, other: Shard | _StridedShard) -> bool:
    return isinstance(one, Shard | _StridedShard) and one.dim == other.dim


# ---- the vocabulary, shared out by ranks that compute the same rows (tensor parallel) ----


@dataclass(frozen=True)
class Vocabulary:
    """The ranks that share out the vocabulary. A rank has the tokens of its part of the output weight, as
    DTensor cuts rows.
    """

    group: dist.ProcessGroup
    """Their process group."""
    rank: int
    """This one's number among `ranks`."""
    ranks: int
    """How many they are."""
    size: int
    """Tokens of all ranks."""

    @property
    def own(self) -> slice:
        """Returns this rank's tokens."""
        # Rounded up, as DTensor does: the last ranks may have fewer rows, or none.
        each = -(-self.size // self.ranks)
        return slice(min(self.rank * each, self.size), min((self.rank + 1) * each, self.size))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Adds up what each rank has of the sums over all tokens, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Takes the largest of what each rank has, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns log p of own tokens, [M, own], p being the softmax over all of them."""
        largest = self.largest(logits.max(-1, keepdim=True).values)
        logits = logits - largest
        return logits.sub_(self.sum(logits.exp().sum(-1, keepdim=True)).log_())

    def pick(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Gathers [M, K] out of [M, own] of each rank, by the tokens' ids."""
        here, at = self._located(ids)
        # One rank has each token; the others add 0.
        return self.sum(values.gather(1, at).masked_fill_(~here, 0))

    def add(self, values: torch.Tensor, ids: torch.Tensor, addends: torch.Tensor) -> None:
        """Adds [M, K] to [M, own] of each rank, by the tokens' ids."""
        here, at = self._located(ids)
        values.scatter_add_(1, at, addends.masked_fill(~here, 0))

    def likeliest(self, log_probs: torch.Tensor, k: int) -> torch.Tensor:
        """Returns the ids [M, k] of the largest of all ranks' [M, own], in descending order."""
        width = min(k, -(-self.size // self.ranks))
        # As wide on every rank, which `all_gather` needs; what a rank with fewer tokens lacks is never among
        # the best.
        most = log_probs.new_full((len(log_probs), width), -torch.inf)
        ids = torch.zeros(most.shape, dtype=torch.int64, device=most.device)
        found = log_probs.topk(min(width, log_probs.shape[1]), -1)
        most[:, : found.values.shape[1]] = found.values
        ids[:, : found.values.shape[1]] = found.indices + self.own.start
        every = [torch.empty_like(most) for _ in range(self.ranks)]
        every_id = [torch.empty_like(ids) for _ in range(self.ranks)]
        dist.all_gather(every, most, group=self.group)
        dist.all_gather(every_id, ids, group=self.group)
        best = torch.cat(every, -1).topk(k, -1).indices
        return torch.cat(every_id, -1).gather(1, best)

    def _located(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns which ids are own tokens, and where these are among them (the others anywhere)."""
        own = self.own
        return (ids >= own.start) & (ids < own.stop), (ids - own.start).clamp(0, own.stop - own.start - 1)


# ---- tensors that are spread over ranks, and this rank's part of each ----


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor, or the tensor where it is not sharded; shares its storage."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def as_shard(
    like: torch.Tensor, local: torch.Tensor, mesh: DeviceMesh, shape: tuple[int, ...] | None = None
) -> DTensor:
    """Returns `local`, wherever it rests, as this rank's part of a tensor that is spread as `like` is; every
    rank of the mesh has all of one that is not. The result shares the storage of `local`.

    shape: of the whole, where that is another than `like` has.
    """
    if isinstance(like, DTensor):
        mesh, placements = like.device_mesh, like.placements
    else:
        placements = (Replicate(),) * mesh.ndim
    where = _mesh_at(local, mesh)
    whole = like if shape is None else torch.empty(shape, device="meta")
    tensor = DTensor.from_local(
        local, where, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    # Else an update of one would not be seen in the other.
    assert tensor.to_local().data_ptr() == local.data_ptr()
    return tensor


def in_place_of(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Returns `local` as this rank's part, where the tensor is sharded; else itself."""
    return as_shard(tensor, local, tensor.device_mesh) if isinstance(tensor, DTensor) else local


def _mesh_at(local: torch.Tensor, mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh where the tensor rests: from_local would copy it to the device of another one."""
    kind = local.device.type
    if mesh.device_type == kind:
        return mesh
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return DeviceMesh.from_group(mesh.get_group(), kind, mesh_dim_names=names)
    return DeviceMesh.from_group(mesh.get_all_groups(), kind, mesh=mesh.mesh, mesh_dim_names=names)
