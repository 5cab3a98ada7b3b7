"""Adapters of low rank (LoRA) in a model, through peft: the one module that imports it.

    y = W x + alpha / r · B (A x)          A [r, in], B [out, r]; W stays

peft puts a layer of its own in the place of each target, with the module that was there as its `base_layer`.
Everywhere else the model's tensors keep the names that they have in checkpoints (`base_name`), and adapters
have those of peft's files (`adapter_name`).
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rondo.config.schema import LoraConfig
from rondo.core.errors import CheckpointError, ConfigError, DataError, named_by
from rondo.models.family import record_of
from rondo.models.files import json_object, tensors_in
from rondo.models.loading import model_on_meta
from rondo.models.nf4 import QuantisedLinear, quantise_linears
from rondo.models.precision import kept_in_float32
from rondo.models.source import ModelSource
from rondo.system.hub import copy_of

ALL_LINEAR = "all-linear"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_CHECKSUM = "rondo_base_checksum"  # in the file's metadata: of the model that it was trained on
_NAME = "default"  # what peft calls the one adapter in its modules' names
_PREFIX = "base_model.model."  # what names in peft's files begin with
_INSTALL = 'lora: adapters need the package peft: pip install "rondo-rl[lora]"'
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adapter:
    """What is added to one weight of the model."""

    module: str
    """The target: its weight is `<module>.weight`."""
    scaling: float
    """alpha / r."""
    transposed: bool
    """The weight is [in, out] (GPT-2's)."""

    @property
    def a(self) -> str:
        """Names A as peft's files do."""
        return f"{_PREFIX}{self.module}.lora_A.weight"

    @property
    def b(self) -> str:
        return f"{_PREFIX}{self.module}.lora_B.weight"

    def delta(
        self, a: torch.Tensor, b: torch.Tensor, rows: slice = slice(None), columns: slice = slice(None)
    ) -> torch.Tensor:
        """Returns those rows and columns of what is added to the weight, from the whole A and B."""
        product = a.t()[rows] @ b.t()[:, columns] if self.transposed else b[rows] @ a[:, columns]
        return product * self.scaling


@dataclass(frozen=True)
class AdapterSet:
    """The adapters of a model, as an engine must know them that gets A and B by themselves; needs no peft."""

    rank: int
    """The width of A and B."""
    alpha: float
    """What A and B change is multiplied by alpha / rank."""
    by_weight: Mapping[str, Adapter]
    """By the name of the weight that each changes."""
    versions: int = 1
    """Of so many, at most, requests are in flight at one time."""

    def shapes(self, weights: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all A [r, in] and B [out, r], by `adapter_name`. weights: their shapes."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, adapter in self.by_weight.items():
            rows, columns = reversed(weights[name]) if adapter.transposed else weights[name]
            shapes |= {adapter.a: (self.rank, columns), adapter.b: (rows, self.rank)}
        return shapes


def add_adapters(
    model: PreTrainedModel, lora: LoraConfig, seed: int, device: torch.device | str = "cpu"
) -> dict[str, Adapter]:
    """Puts adapters into a model, in place; returns them by the name of the weight that each changes.

    Their numbers depend on `seed` alone (or come from lora.path), not on the number of ranks; they are in
    float32 at least. The model computes what it did, bit for bit, as long as B is 0. Its parameters may be on
    `meta`. Raises ConfigError for targets that it does not have, or that cannot have an adapter.
    """
    peft = _peft()
    targets = _targets(model, lora)
    # In a module around it, which has no config: peft takes targets of some model types (gate_proj of a dense
    # layer) for the experts, whose checkpoints have parts of that name.
    around = torch.nn.ModuleDict({"model": model})
    names = [f"model.{name}" for name in targets]
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=names)
    # Without numbers at first (low_cpu_mem_usage): peft's own are of the global generator.
    peft.inject_adapter_in_model(config, around, adapter_name=_NAME, low_cpu_mem_usage=True)
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    adapters = {}
    for module in targets:
        layer: Any = model.get_submodule(module)
        adapter = Adapter(module, lora.alpha / lora.rank, isinstance(layer.base_layer, Conv1D))
        adapters[f"{module}.weight"] = adapter
        a, b = layer.lora_A[_NAME], layer.lora_B[_NAME]
        first = _first(tuple(a.weight.shape), lora.init, generator).to(device, dtype)
        a.weight = torch.nn.Parameter(first)
        b.weight = torch.nn.Parameter(torch.zeros(b.weight.shape, dtype=dtype, device=device))
        layer.forward = functools.partial(_forward, layer)
    if lora.path is not None:
        _load(model, read_adapter(lora.path, lora, shapes_of(model)))
    return adapters


def _forward(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Computes what peft's layer does, to the bit, in two tensors of the output's size instead of four: what
    is freed beside A x, which stays for the backward pass, is a hole on a CPU (`system.usage`).
    """
    out: torch.Tensor = layer.base_layer(hidden)
    if layer.disable_adapters:
        return out
    a, b = layer.lora_A[_NAME], layer.lora_B[_NAME]
    added, scaling = b(a(hidden.to(a.weight.dtype))), layer.scaling[_NAME]
    # What a hook made of it (tensor parallel) is a view, into which autograd lets nobody write.
    if out._is_view() or added._is_view():
        return (out + added * scaling).to(out.dtype)
    return out.add_(added.mul_(scaling))


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(_INSTALL, key="lora") from error
    return peft


def _first(shape: tuple[int, ...], init: str, generator: torch.Generator) -> torch.Tensor:
    """Returns A as peft starts it: uniform in ±1/√in (kaiming), or normal with a deviation of 1/r."""
    if init == "gaussian":
        return torch.randn(shape, generator=generator) / shape[0]
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])


def quantise_base(
    model: PreTrainedModel, lora: LoraConfig, device: torch.device
) -> dict[str, QuantisedLinear]:
    """Has the linear modules that could have an adapter rest as lora.base_dtype says, in place, before there
    are adapters; returns them by the names of their weights. Raises ConfigError for a model without any.
    """
    if lora.base_dtype is None:
        return {}
    if record_of(str(model.config.model_type)).images is not None:
        raise ConfigError(
            f"lora.base_dtype={lora.base_dtype}: it would take the image tower of this "
            f"{model.config.model_type} model, too, which was not run; remove the key",
            key="lora.base_dtype",
        )
    names = [name for name in _able(model) if isinstance(model.get_submodule(name), torch.nn.Linear)]
    if not names:
        kind = model.config.model_type
        raise ConfigError(
            f"lora.base_dtype={lora.base_dtype}: a {kind} model has no linear modules that it could be for",
            key="lora.base_dtype",
        )
    return quantise_linears(model, names, device)


def _able(model: PreTrainedModel) -> list[str]:
    """Returns the names of the modules that can have an adapter, in the model's order."""
    head = model.get_output_embeddings()
    precise = {name.rpartition(".")[0] for name in kept_in_float32(model, torch.float16)}  # routers
    return [
        name
        for name, module in model.named_modules()
        if _is_linear(module) and module is not head and name not in precise
    ]


def _targets(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Returns the names of the modules that get an adapter, in the model's order."""
    able, images = _able(model), record_of(str(model.config.model_type)).images
    if images is not None:
        able = [name for name in able if images.part_of(f"{name}.") in lora.parts]
    elif lora.parts != ("language",):
        raise ConfigError(
            f"lora.parts={','.join(lora.parts)}: a {model.config.model_type} model has no parts for images; "
            "remove the key",
            key="lora.parts",
        )
    chosen: set[str] = set()
    for target in lora.targets:
        found = able if target == ALL_LINEAR else [name for name in able if _ends_with(name, target)]
        if not found:
            _refuse_target(target, model, able, lora)
        chosen.update(found)
    if any(parameter.ndim > 2 for parameter in model.parameters()):
        _log.warning(
            "LoRA: the experts of this %s are one tensor, rest in param_dtype and get no adapter; the other "
            "targets do",
            model.config.model_type,
        )
    return [name for name in able if name in chosen]


def _is_linear(module: torch.nn.Module) -> bool:
    """Says whether it is a linear module and nothing besides (some routers are one that returns a choice)."""
    return type(module).forward in (torch.nn.Linear.forward, QuantisedLinear.forward, Conv1D.forward)


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def _refuse_target(target: str, model: PreTrainedModel, able: list[str], lora: LoraConfig) -> None:
    modules, head = dict(model.named_modules()), model.get_output_embeddings()
    there = [name for name in modules if _ends_with(name, target)]
    ends = sorted({name.rpartition(".")[2] for name in able})
    if any(modules[name] is head for name in there):
        why = "is the output head, whose logits are computed in chunks from its weight alone"
    elif there:
        kind = type(modules[there[0]]).__name__
        why = f"is a {kind}, and only linear modules can have an adapter here"
        if _is_linear(modules[there[0]]):
            why = f"is in none of the parts {', '.join(lora.parts)} (lora.parts)"
    else:
        why = "is the name of no module"
    raise ConfigError(
        f"lora.targets: {target!r} {why}; choose from {', '.join(ends)}, or {ALL_LINEAR}", key="lora.targets"
    )


def adapter_set(source: ModelSource, lora: LoraConfig, versions: int = 1) -> AdapterSet:
    """Returns the adapters that this model gets. Nothing of the model's weights is made or read.

    Raises ConfigError for adapters that it cannot have, or a lora.path that is not of it.
    """
    return AdapterSet(lora.rank, lora.alpha, add_adapters(model_on_meta(source), lora, 0), versions)


# ---- names


def is_adapter(name: str) -> bool:
    """Says whether this parameter belongs to an adapter."""
    return f".lora_A.{_NAME}." in name or f".lora_B.{_NAME}." in name


def base_name(name: str) -> str:
    """Returns what checkpoints call a parameter, or a module, of a module with adapters."""
    return f"{name}.".replace(".base_layer.", ".")[:-1]


def parts_of_adapted(modules: Collection[str], name: str, factor: Literal["A", "B"]) -> tuple[str, ...]:
    """Returns the names of what computes in the place of a linear module: itself, or, where it has an
    adapter, what was there before, and the factor.
    """
    base = f"{name}.base_layer"
    return (base, f"{name}.lora_{factor}.{_NAME}") if base in modules else (name,)


def adapter_name(name: str) -> str:
    """Returns what peft's files call an adapter's parameter."""
    return _PREFIX + name.replace(f".{_NAME}.weight", ".weight")


def adapted_name(name: str) -> str:
    """Returns the model's own name of what peft's files call so."""
    return name.removeprefix(_PREFIX)


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Returns those of all A and B in a model, by `adapter_name`."""
    return {adapter_name(n): tuple(p.shape) for n, p in model.named_parameters() if is_adapter(n)}


# ---- on and off


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model is the one without adapters, bit for bit.

    peft's own switch also takes `requires_grad` from the adapters; FSDP would keep that until the end, if the
    first pass of all was inside.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


# ---- peft's files


def write_adapter(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    lora: LoraConfig,
    source: ModelSource,
    base_checksum: int,
) -> None:
    """Writes a folder that peft loads. tensors: by `adapter_name`; source: the model that they are of. Raises
    ConfigError as `config_for_peft` does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    config_for_peft(source, lora, shapes).save_pretrained(str(folder))
    contents = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(contents, folder / WEIGHTS, metadata={"format": "pt", BASE_CHECKSUM: str(base_checksum)})


def config_for_peft(source: ModelSource, lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """Returns the peft.LoraConfig with which peft reads adapters of these shapes, by `adapter_name`, as they
    are. Nothing of the model's weights is made or read.

    In some mixtures peft takes any module whose name ends in `down_proj` (of a dense layer, or a shared
    expert) for the experts, which are one tensor. Such a module is named by its weight (`target_parameters`):
    peft then adds B A to that, from tensors of the same names.
    Raises ConfigError where it would read another model all the same.
    """
    modules = {_module_of(name) for name in shapes}
    make = functools.partial(
        _peft().LoraConfig,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=source.path,
    )
    config = make(target_modules=sorted(modules))
    astray = _astray(source, config, shapes)
    if not astray:
        return config
    weights = [f"{module}.weight" for module in sorted(modules.intersection(astray))]
    config = make(target_modules=sorted(modules.difference(astray)), target_parameters=weights)
    still = _astray(source, config, shapes)
    if still:
        raise ConfigError(
            f"lora.targets: peft would read an adapter of this model as another one, first at {still[0]!r}: "
            "leave out the targets that end so",
            key="lora.targets",
        )
    return config


def check_for_peft(path: str, source: ModelSource) -> None:
    """Raises CheckpointError where peft would not find each tensor of an adapter's folder in the module of
    the model that its name says, or would have other modules, too. Its numbers are not read.
    """
    shapes = {name: tensor.shape for name, tensor in tensors_in([Path(path) / WEIGHTS]).items()}
    astray = _astray(source, _peft().PeftConfig.from_pretrained(path), shapes)
    if astray:
        raise CheckpointError(
            f"{path}: peft reads the exported adapter as another one: {astray[0]!r} (and {len(astray) - 1} "
            "others) would not have its own tensors. The merged model beside it is whole; this is a fault of "
            "rondo or of peft's loading"
        )


def _astray(source: ModelSource, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Returns the modules, sorted, where `PeftModel.from_pretrained` would put other tensors than those of
    their name, or none, or would scale them otherwise.
    """
    import peft
    from peft.tuners.lora import LoraLayer

    model = model_on_meta(source)
    # Zeros without memory: what is on meta would take its adapters there.
    model._apply(lambda one: torch.zeros(()).expand(one.shape))
    numbered = {name: torch.tensor(float(i)).expand(shapes[name]) for i, name in enumerate(shapes)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what peft only warns of is returned
            read = peft.PeftModel(model, copy.deepcopy(config), low_cpu_mem_usage=True)
            peft.set_peft_model_state_dict(read, numbered, low_cpu_mem_usage=True)
    except (ValueError, RuntimeError):  # it does not take these targets, or these shapes
        return sorted({_module_of(name) for name in shapes})
    found = {
        name.replace(f".{_NAME}.weight", ".weight"): tensor
        for name, tensor in read.named_parameters()
        if is_adapter(name)
    }
    wrong = numbered.keys() ^ found.keys()
    wrong |= {
        name
        for name in numbered.keys() & found.keys()
        if found[name].is_meta or not torch.equal(found[name], numbered[name])
    }
    scaled = {
        name.removeprefix(_PREFIX)
        for name, layer in read.named_modules()
        if isinstance(layer, LoraLayer) and layer.scaling[_NAME] != config.lora_alpha / config.r
    }
    return sorted({_module_of(name) for name in wrong} | scaled)


def _module_of(name: str) -> str:
    """Returns the target of a tensor that is called as peft's files do."""
    return name.removeprefix(_PREFIX).rpartition(".lora_")[0]


def read_adapter(
    path: str, lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """Returns the tensors of an adapter's folder, by `adapter_name`.

    Raises ConfigError where it is none, is not of this rank, alpha, these targets, or this model, or is of a
    kind that is not trained here.
    """
    with named_by("lora.path"):
        folder = copy_of(path)
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise DataError(f"there is no {name} in {path}, so it is no adapter of peft's format")
        written = json_object(folder / CONFIG)
        try:
            with safe_open(folder / WEIGHTS, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (OSError, SafetensorError) as error:
            raise DataError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    _check_kind(path, written, lora)
    _check_tensors(path, tensors, shapes)
    return tensors


def _check_kind(path: str, written: Mapping[str, Any], lora: LoraConfig) -> None:
    def wrong(key: str, message: str) -> None:
        raise ConfigError(f"lora.path: the adapter in {path} {message}", key=key)

    if written.get("peft_type") != "LORA":
        wrong("lora.path", f"is of the kind {written.get('peft_type')}, not LORA")
    starts = written.get("init_lora_weights", True)
    if starts not in (True, False, "gaussian", "kaiming", "orthogonal", "eva"):
        wrong(
            "lora.path",
            f"started with {starts!r}, which changes the model's own weights too, and those are not in it: "
            "have peft convert it (save_pretrained with path_initial_model_for_weight_conversion)",
        )
    plain = {
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "bias": "none",
        "rank_pattern": None,
        "alpha_pattern": None,
        "lora_bias": False,
        "trainable_token_indices": None,
    }
    for key, value in plain.items():
        if written.get(key, value) not in (value, {}, []):
            wrong("lora.path", f"has {key}={written[key]!r}; only plain LoRA is trained here")
    named = written.get("target_parameters") or ()  # as of `config_for_peft`; its tensors' names are compared
    if any(not name.endswith(".weight") for name in named):
        wrong("lora.path", f"is for {', '.join(named)} too; only linear modules have one here")
    for key, mine in (("r", lora.rank), ("lora_alpha", lora.alpha)):
        if written.get(key) != mine:
            ours = "lora.rank" if key == "r" else "lora.alpha"
            wrong(ours, f"has {key}={written.get(key)}, and {ours} is {mine}: set it to that of the adapter")


def _check_tensors(
    path: str, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    differ = sorted(tensors.keys() ^ shapes.keys())
    if differ:
        who = "lacks" if differ[0] in shapes else "has"
        raise ConfigError(
            f"lora.path: the adapter in {path} {who} {differ[0]!r} (and {len(differ) - 1} others): it is for "
            "other targets, or another model; set lora.targets to the adapter's, and the model to its base",
            key="lora.targets",
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ConfigError(
                f"lora.path: the adapter in {path} is for another model: {name!r} has shape "
                f"{tuple(tensors[name].shape)}, and this model's would be {shape}",
                key="lora.path",
            )


def _load(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(tensors[adapter_name(name)])


def base_checksum_of(path: str) -> int | None:
    """Returns the checksum of the model that an adapter was trained on, where rondo wrote it."""
    with safe_open(copy_of(path) / WEIGHTS, framework="pt") as file:
        written = (file.metadata() or {}).get(BASE_CHECKSUM)
    return None if written is None else int(written)
