"""Mesh arithmetic against tables computed by hand."""

from __future__ import annotations

import pytest

from rondo.controller import Mesh
from rondo.core.errors import ConfigError


def test_eight_ranks_of_pipeline_data_and_tensor_parallel() -> None:
    mesh = Mesh((("pp", 2), ("dp", 2), ("tp", 2)))
    #                              rank:  0  1  2  3  4  5  6  7
    assert [mesh.coords(r)["pp"] for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [mesh.coords(r)["dp"] for r in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [mesh.coords(r)["tp"] for r in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert mesh.dp_shards == (0, 0, 1, 1, 0, 0, 1, 1)
    assert mesh.collect_ranks == (4, 6)  # last stage, first of its tp group
    assert (mesh.size, mesh.axis_size("dp"), mesh.axis_size("cp")) == (8, 2, 1)


def test_axes_in_another_order() -> None:
    mesh = Mesh((("dp", 2), ("pp", 2), ("cp", 2)))
    assert mesh.dp_shards == (0, 0, 0, 0, 1, 1, 1, 1)
    assert mesh.collect_ranks == (2, 6)
    assert mesh.coords(5) == {"dp": 1, "pp": 0, "cp": 1}


def test_data_parallel_only_collects_from_every_rank() -> None:
    mesh = Mesh.data_parallel(3)
    assert mesh.dp_shards == mesh.collect_ranks == (0, 1, 2)


def test_without_a_dp_axis_there_is_one_shard() -> None:
    mesh = Mesh((("pp", 2), ("tp", 2)))
    assert mesh.dp_shards == (0, 0, 0, 0)
    assert mesh.collect_ranks == (2,)


@pytest.mark.parametrize("axes", [(("data", 2),), (("dp", 2), ("dp", 2)), (("dp", 0),), ()])
def test_impossible_meshes(axes: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(ConfigError, match="mesh"):
        Mesh(axes)


def test_a_rank_beyond_the_mesh() -> None:
    with pytest.raises(ConfigError, match="rank 2"):
        Mesh.data_parallel(2).coords(2)
