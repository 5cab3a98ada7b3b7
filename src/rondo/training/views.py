"""The ranks of a role, seen as the grids that its tensors are spread over.

    dense    replicate × shard × tensor            all parameters but those of experts
    expert   replicate × expert_shard × expert     the experts of a mixture, where ranks hold whole ones

An axis of one rank is left out of a grid, but for the one that shards. A rank's number counts along the last
axis first, in both: expert_shard · expert = shard · tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rondo.config.schema import ParallelConfig
from rondo.core.errors import ConfigError
from rondo.models.context import Context
from rondo.training.vocabulary import Vocabulary
from rondo.weights.layout import Spec

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"
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
