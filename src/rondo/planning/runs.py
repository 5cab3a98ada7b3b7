"""From a configuration to the models and engines of a run as the formulas of `planning.memory` and
`planning.time` take them. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from rondo.config.schema import (
    Config,
    EngineConfig,
    FrozenEngineConfig,
    MegatronBackendConfig,
    ModelPart,
    TorchBackendConfig,
)
from rondo.core.errors import ConfigError
from rondo.core.roles import ROLES, ROLLOUT
from rondo.planning.engine_memory import EngineRun
from rondo.planning.model_run import ModelRun, Spread
from rondo.planning.placement import Placement
from rondo.planning.roles import engine_of, parallel_of, placement_of
from rondo.planning.shapes import ModelShape, find_shape
from rondo.planning.time import StepRows
from rondo.planning.weights import adapters_of, plan_weights, rollout_dtype, runs_in_own_process

ITEMSIZE: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
SHORT_ROW = 128  # tokens; `models.attention.SHORT`, which imports torch
_KEEPS_BASE = ("native", "transformers")  # engines that merge adapters, and keep the base beside
_MOST_LENGTHS = 1000  # that a plan looks at
_SHARES = ("gpu_memory_utilization", "mem_fraction_static")  # vLLM's and SGLang's names for it


@dataclass(frozen=True)
class Lengths:
    """How long rows are taken to be."""

    prompt: int
    """Tokens of a prompt."""
    response: int
    """Tokens of a response."""
    said: str
    """Where that is from, for the reader of a plan."""
    responses: tuple[int, ...] = ()
    """How long responses are, each as often as any other; none: all as long as `response`."""
    images: int = 0
    """Of a prompt's tokens those that stand for images."""

    @property
    def row(self) -> int:
        """Returns the tokens of a row."""
        return self.prompt + self.response


def lengths_of(config: Config, given: str | None, *, rows_of_pairs: bool = False) -> Lengths:
    """Returns the lengths that a plan is for. given: `PROMPT,RESPONSE`; None: the most that a recipe allows.
    rows_of_pairs: of SFT and preference, where data.max_tokens bounds both together. Raises ConfigError.
    """
    if given is not None:
        numbers = given.split(",")
        if len(numbers) != 2 or not all(one.strip().isdigit() and int(one) for one in numbers):
            raise ConfigError(
                f"--lengths {given}: give two numbers of tokens, PROMPT,RESPONSE (512,2048), or the folder "
                "of a run; there is no such folder"
            )
        prompt, response = map(int, numbers)
        return Lengths(prompt, response, f"--lengths: each row has {prompt} + {response} tokens")
    if rows_of_pairs:
        most = config.data.max_tokens or config.actor.token_budget
        key = "data.max_tokens" if config.data.max_tokens else "actor.token_budget"
        return Lengths(1, most - 1, f"nobody said how long rows are: each has {most} tokens ({key})")
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_tokens
    return Lengths(
        prompt,
        response,
        f"nobody said how long rows are: each has the most that the recipe allows, {prompt} + {response} "
        "tokens (data.max_prompt_tokens, rollout.max_tokens); --lengths PROMPT,RESPONSE says others",
    )


def lengths_like(prompts: Sequence[int], responses: Sequence[int], run: str) -> Lengths:
    """Returns the lengths of a run's rows, which are not none: memory is for the longest, and time for all of
    them. run: whose they were.
    """
    ordered = sorted(responses)
    number = min(len(ordered), _MOST_LENGTHS)
    # Evenly spaced, the longest among them.
    kept = tuple(ordered[-(-(i + 1) * len(ordered) // number) - 1] for i in range(number))
    mean, most = sum(ordered) / len(ordered), ordered[-(-95 * len(ordered) // 100) - 1]
    said = (
        f"as {len(ordered)} rows of {run}: prompts of at most {max(prompts)} tokens, responses of {mean:.0f} "
        f"in the mean, 95 % of them of at most {most}, the longest of {ordered[-1]}"
    )
    return Lengths(max(prompts), ordered[-1], said, kept)


def shapes_of(config: Config) -> Callable[[str], ModelShape]:
    """Returns what finds a role's sizes: in the folder, the config or by the name that its section has."""

    def find(role: str) -> ModelShape:
        section = config.model
        if role in config.models:
            section = config.models[role]  # type: ignore[assignment]
        elif role in ROLES:
            weights = ROLES[role].weights
            own = getattr(config, weights) if weights is not None else None
            section = section if own is None or own.path is None else own
        elif role != ROLLOUT:
            section = next(model for model in config.reward.models if model.name == role)  # type: ignore[assignment]
        if section.path is None and getattr(section, "config", None) is None:
            raise ConfigError(
                f"the {role} has no model yet, so that its sizes are not known: set model.path to a folder, "
                "a config.json or a name of `rondo plan --shapes`",
                key="model.path",
            )
        return find_shape(section.path, getattr(section, "config", None), section.override)

    return find


@dataclass(frozen=True)
class Runs:
    """The models and engines of a run."""

    config: Config
    """Without `auto`."""
    roles: tuple[str, ...]
    """All of the run."""
    models: Mapping[str, ModelRun]
    """Role → its model, of all roles but the rollout."""
    tokens: Mapping[str, int]
    """Role → tokens of a pass of one group of ranks with the same rows."""
    engine: EngineRun | None
    """One generation engine on one of its devices; None: nothing generates."""
    placement: Placement
    """Role → devices."""
    lengths: Lengths
    """How long rows are taken to be."""
    on_host: bool = False
    """Whether the devices are the machine itself."""

    @property
    def engines(self) -> int:
        """Counts the generation engines."""
        return len(self.placement.devices(ROLLOUT)) * self.config.rollout.replicas

    @property
    def rows(self) -> StepRows:
        """Returns the rows of a step."""
        data, rollout, lengths = self.config.data, self.config.rollout, self.lengths
        n = 1 if self.engine is None else rollout.n
        # The kernel for short rows (`models.attention.choose_kernel`) takes shared prompts.
        responses = lengths.responses or (lengths.response,)
        shared = self.on_host and n > 1 and lengths.prompt + max(responses) - 1 <= SHORT_ROW
        return StepRows(data.batch_size * n, lengths.prompt, responses, n, shared)


def runs_of(
    config: Config,
    roles: Sequence[str],
    trained: Collection[str],
    shape: Callable[[str], ModelShape],
    lengths: Lengths,
    *,
    on_host: bool = False,
) -> Runs:
    """Returns the models and engines of a run. config: without `auto` (`config_for`). trained: those of the
    roles that learn. on_host: the devices are the machine itself.
    """
    placement = placement_of(config)
    models = {
        role: model_run(config, role, shape(role), placement, trains=role in trained, on_host=on_host)
        for role in roles
        if role != ROLLOUT
    }
    for role, run in models.items():
        _check_spread(role, run.layout, config)
    lengths = _with_images(lengths, config, models.values())
    tokens = {role: _tokens(config, role, models[role], lengths) for role in models}
    for role, run in models.items():
        models[role] = replace(run, patches=_patches(config, role, run, lengths, tokens[role]))
    engine = engine_run(config, shape("actor"), lengths, placement) if ROLLOUT in roles else None
    return Runs(config, tuple(roles), models, tokens, engine, placement, lengths, on_host)


def _with_images(lengths: Lengths, config: Config, models: Iterable[ModelRun]) -> Lengths:
    """Returns lengths with what images have of a prompt: as much as the recipe allows."""
    towers = [run.shape.tower for run in models if run.shape.tower is not None]
    if not towers:
        return lengths
    given, tokens = config.model.images, lengths.prompt
    if given.max_pixels is not None and given.per_prompt is not None:
        tokens = min(tokens, given.per_prompt * max(1, given.max_pixels // towers[0].pixels))
    allowed = "as many as model.images.max_pixels and per_prompt allow"
    if tokens == lengths.prompt:
        allowed = "the most that there can be; model.images.max_pixels and per_prompt say how many there are"
    said = f"{lengths.said}; of a prompt {tokens} tokens are images', {allowed}"
    return replace(lengths, images=tokens, said=said)


def _check_spread(role: str, layout: Spread, config: Config) -> None:
    """Raises ConfigError for axes that do not divide a model's ranks."""
    section = parallel_of(role, config)[0]
    rows = "tensor × context" + (" × pipeline" if layout.pipeline > 1 else "")
    axes = {rows: layout.together, "expert": layout.expert}
    for name, size in ({"replicate": layout.replicate} | axes).items():
        ranks = layout.ranks if name == "replicate" else layout.copy
        if ranks % size:
            copy = "a copy of " if layout.replicate > 1 else ""
            raise ConfigError(
                f"{section}.parallel: {name} = {size} does not divide the {ranks} devices of {copy}the "
                f"{role}'s model; `rondo plan --auto` looks for what does",
                key=f"{section}.parallel",
            )


def model_run(
    config: Config,
    role: str,
    shape: ModelShape,
    placement: Placement,
    *,
    trains: bool,
    on_host: bool = False,
) -> ModelRun:
    """Returns a role's model as the formulas take it."""
    section, engine = engine_of(role, config)
    sizes, backend = parallel_of(role, config)[1], config.actor.backend
    torch = backend if isinstance(backend, TorchBackendConfig) else TorchBackendConfig()
    megatron = backend if isinstance(backend, MegatronBackendConfig) else MegatronBackendConfig("megatron")
    lora = engine.lora if isinstance(engine, EngineConfig) else None
    row, moments = ROLES.get(role), "full"
    if trains:
        moments = config.at(section).optimizer.moments
    recompute: Any = engine.gradient_checkpointing if isinstance(engine, EngineConfig) else False
    parts = get_args(ModelPart) if lora is None else lora.parts
    frozen = engine.freeze if isinstance(engine, EngineConfig) else ()
    ranks = len(placement.devices(role))
    axes = (sizes.replicate, sizes.tensor, sizes.context, sizes.expert, sizes.pipeline)
    return ModelRun(
        shape,
        Spread(ranks, *axes, megatron.virtual),
        ITEMSIZE[engine.param_dtype],
        ITEMSIZE[engine.compute_dtype],
        "value" if row is None or row.value_head else "lm",
        trains,
        None if lora is None else lora.rank,
        lora is not None and lora.base_dtype is not None,
        moments,  # type: ignore[arg-type]
        # What rests in host memory is there already where the device is the host.
        engine.offload_params and not on_host,
        getattr(engine, "offload_optimizer", False) and not on_host,
        torch.offload == "streamed",
        recompute,
        torch.reshard,
        torch.mlp_chunk,
        engine.logits_bytes,
        fused=torch.kernels == "liger" or (on_host and ranks == 1 and torch.kernels == "auto"),
        on_host=on_host,
        megatron=backend.name == "megatron",
        ends=(megatron.first_stage_layers, megatron.last_stage_layers),
        parts=tuple(part for part in parts if part not in frozen),
        targeted=lora is not None and lora.targets != ("all-linear",),
    )


def engine_run(config: Config, shape: ModelShape, lengths: Lengths, placement: Placement) -> EngineRun:
    """Returns a generation engine as the formulas take it."""
    rollout, engine = config.rollout, config.rollout.engine
    weights = plan_weights(config, placement.devices("actor"), placement.devices(ROLLOUT))
    keeps_base = adapters_of(config) == "alone" and not weights.shares_base and engine.name in _KEEPS_BASE
    options = engine.options
    share = next((float(options[name]) for name in _SHARES if name in options), None)
    cache = options.get("cache_bytes", options.get("kv_cache_memory_bytes"))
    return EngineRun(
        shape,
        engine.name,  # type: ignore[arg-type]
        ITEMSIZE[rollout_dtype(config)],
        engine.tensor_parallel,
        rollout.max_concurrent * lengths.row,
        cache,
        share,
        lengths.row,
        weights.route == "shared",
        2 if keeps_base else 1,
        runs_in_own_process(rollout),
    )


def _patches(config: Config, role: str, run: ModelRun, lengths: Lengths, tokens: int) -> float:
    """Returns the patches that a tower reads for a token of a pass of so many: of each image once in a pass,
    however many of its rows show it. How many do is chance, so that each row may have a prompt of its own.
    """
    tower = run.shape.tower
    if tower is None:
        return 0.0
    prompts = min(tokens // lengths.row, _groups(config, role))
    return prompts * lengths.images * tower.merged / tokens


def _groups(config: Config, role: str) -> int:
    """Counts the prompts whose rows are computed before weights change."""
    engine: FrozenEngineConfig = engine_of(role, config)[1]
    if isinstance(engine, EngineConfig) and engine.mini_batch_size is not None:
        return engine.mini_batch_size
    return config.data.batch_size


def _tokens(config: Config, role: str, run: ModelRun, lengths: Lengths) -> int:
    """Returns the tokens of a pass of one group of ranks with the same rows: whole rows, as many as the
    budget has room for and a rank gets.
    """
    engine: FrozenEngineConfig = engine_of(role, config)[1]
    layout = run.layout
    rows = -(-_groups(config, role) * config.rollout.n * layout.together // layout.ranks)
    fitting = max(1, engine.token_budget // lengths.row)
    return min(max(1, rows), fitting) * lengths.row
