"""Folders that all ranks write and read: each its own files, each its own rows."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM

from rondo.checkpoint.checked import faults_in, read_manifest
from rondo.core.errors import StorageError
from rondo.models import ModelSource
from rondo.models.loading import build_empty, build_model
from rondo.training import ModelSpec, export, make_engine
from tests.ranks import run_ranks
from tests.training.helpers import SHAPE, one_rank_mesh, source, tiny_engine


def _mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))


def _exported(rank: int, world: int, path: str, name: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    """The files that this rank has written, and all tensors."""
    engine, opened = tiny_engine(_mesh(world), source(name)), []
    write = export._write_file

    def noted(file: Path, *rest: Any) -> Any:
        opened.append(file.name)
        return write(file, *rest)

    export._write_file = noted
    export.export_folder.__defaults__ = (20_000,)
    engine.export(path)
    return opened, {name: one.full_tensor() for name, one in engine.backend.shards.items()}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_all_ranks_write_what_transformers_loads(tmp_path: Path, name: str) -> None:
    """One with tied embeddings, one whose experts are one tensor here and one file entry each there."""
    results = run_ranks(3, _exported, str(tmp_path), name)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    for rank, (opened, _) in enumerate(results):
        assert opened == files[rank::3]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    sizes = 0
    for file in files:
        tensors = load_file(tmp_path / file)
        assert {index["weight_map"][one] for one in tensors} == {file}
        size = sum(one.nbytes for one in tensors.values())
        assert size <= 20_000 or len(tensors) == 1
        sizes += size
    assert index["metadata"]["total_size"] == sizes
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert loaded.keys() == results[0][1].keys()
    assert all(torch.equal(loaded[one], tensor) for one, tensor in results[0][1].items())
    _, listed = read_manifest(tmp_path)
    assert sorted(listed) == files
    assert faults_in(tmp_path, listed) == []


def _disk_full(rank: int, world: int, path: str) -> str:
    engine = tiny_engine(_mesh(world))
    write = export._write_file

    def refused(file: Path, entries: Any, arrived: Any) -> Any:
        if rank == 1:
            next(arrived)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return write(file, entries, arrived)

    export._write_file = refused
    export.export_folder.__defaults__ = (20_000,)
    try:
        engine.export(path)
    except StorageError as error:
        return str(error)
    return ""


def test_every_rank_is_told_that_the_disk_of_one_is_full(tmp_path: Path) -> None:
    first, second = run_ranks(2, _disk_full, str(tmp_path))
    assert first == second
    assert "cannot be written: No space left on device" in first
    assert not (tmp_path / "manifest.json").exists()


DEEPSEEK = {
    "model_type": "deepseek_v3",
    **{name: size for name, size in SHAPE.items() if name != "num_key_value_heads"},
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
PRECISE = "e_score_correction_bias"


def _rounded(rank: int, world: int, path: str, model: ModelSource) -> dict[str, torch.Tensor]:
    engine = tiny_engine(_mesh(world), model)
    for name, one in engine.backend.shards.items():
        if PRECISE in name:
            one.to_local().normal_()
    engine.export(path, "bfloat16")
    return {name: one.full_tensor() for name, one in engine.backend.shards.items()}


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_exported_weights_are_rounded_but_for_the_precise_ones(tmp_path: Path, world: int) -> None:
    trained = run_ranks(world, _rounded, str(tmp_path), ModelSource(config=DEEPSEEK, seed=3))[0]
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    found = {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}
    precise = [name for name in trained if PRECISE in name]
    assert precise
    for name, tensor in trained.items():
        assert torch.equal(found[name], tensor if name in precise else tensor.bfloat16()), name


def test_a_value_head_is_exported_as_precise_as_it_was_trained(tmp_path: Path) -> None:
    engine = tiny_engine(one_rank_mesh(), head="value")
    torch.nn.init.normal_(engine.backend.by_name["value_head.weight"])
    engine.export(str(tmp_path), "bfloat16")
    head = load_file(tmp_path / "value_head.safetensors")
    assert torch.equal(head["weight"], engine.backend.by_name["value_head.weight"].data)
    assert {one.dtype for one in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


def test_an_export_replaces_an_earlier_one(tmp_path: Path) -> None:
    """Also one of more files: nothing of it stays behind."""
    for name in (
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "value_head.safetensors",
    ):
        (tmp_path / name).write_text("old")
    tiny_engine(one_rank_mesh()).export(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_model(source("qwen3"), torch.float32).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _checksums(rank: int, world: int, path: str) -> tuple[bool, dict[str, int]]:
    """Whether the folder was read by parts, and the checksums of an engine made from it."""
    _, stored = build_empty(ModelSource(path=path), torch.float32)
    spec = ModelSpec(ModelSource(path=path), tiny_engine(_mesh(world)).config)
    return stored is not None, make_engine(spec, mesh=_mesh(world)).parameters().checksums()


@pytest.mark.slow
def test_files_of_another_form_are_read_whole_by_every_rank(folder: Path) -> None:
    """Each converted as transformers does: a base model's names, tied tensors that are there twice."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    ((by_parts, expected),) = run_ranks(1, _checksums, str(folder))
    assert by_parts
    save_file({"another.format": torch.ones(1)}, folder / "consolidated.safetensors")
    assert run_ranks(2, _checksums, str(folder)) == [(True, expected)] * 2
    (folder / "consolidated.safetensors").unlink()
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    for other in (tensors | head, {name.removeprefix("model."): one for name, one in tensors.items()}):
        save_file(other, file, metadata={"format": "pt"})
        assert run_ranks(2, _checksums, str(folder)) == [(False, expected)] * 2


def test_the_random_numbers_of_a_program_stay_as_they_are(folder: Path) -> None:
    mesh = one_rank_mesh()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    tiny_engine(mesh, ModelSource(path=str(folder)))
    tiny_engine(mesh, ModelSource(path=str(folder)), head="value")
    assert torch.equal(torch.get_rng_state(), before)


def test_one_rank_that_casts_nothing_has_no_second_copy(folder: Path) -> None:
    """Its gradients are the parameters' own; under FSDP they are made anew and copied."""
    engine = tiny_engine(one_rank_mesh(), ModelSource(path=str(folder)))
    assert engine.backend._units == []
    assert {type(one) for one in engine.backend.by_name.values()} == {torch.nn.Parameter}
    casts = tiny_engine(one_rank_mesh(), config={"compute_dtype": "bfloat16"})
    assert len(casts.backend._units) == 3  # each block, and the rest
