"""A model's sizes, from its config.json or from the table shapes.tsv, and what follows from them: parameters
by the way in which layouts cut them, and the numbers of a token. No torch, and nothing is downloaded.
"""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rondo.config.schema import ModelPart
from rondo.core.errors import ConfigError, did_you_mean

TABLE = Path(__file__).with_name("shapes.tsv")


@dataclass(frozen=True)
class _Kind:
    """What the config.json of a model type leaves out."""

    bias: str = ""
    """Which products of attention have a bias where `attention_bias` is not there: qkv, qkvo or none."""
    head_norms: bool = False
    """Whether queries and keys have norms, where `use_qk_norm` is not there."""
    norms: int = 2
    """Norms of a block, each of the hidden size."""
    tied: bool = False
    """Whether the output head is the embeddings, where `tie_word_embeddings` is not there."""
    experts: str = ""
    """The key that counts experts; "": the model is dense."""
    expert_width: str = "moe_intermediate_size"
    """The key of an expert's width."""
    expert_bias: int = 0
    """Biases of an expert: 1 where its three products have one."""
    router_bias: bool = False
    """Whether a layer has a number for each expert that is learned by no gradient, or a bias."""
    sinks: bool = False
    """Whether each head has a number of its own."""


_KINDS: Mapping[str, _Kind] = {
    "llama": _Kind(),
    "mistral": _Kind(),
    "mixtral": _Kind(experts="num_local_experts", expert_width="intermediate_size"),
    "qwen2": _Kind(bias="qkv"),
    "qwen2_5_vl_text": _Kind(bias="qkv"),
    "qwen3": _Kind(head_norms=True),
    "qwen3_vl_text": _Kind(head_norms=True),
    "qwen3_moe": _Kind(head_norms=True, experts="num_experts"),
    "qwen3_vl_moe_text": _Kind(head_norms=True, experts="num_experts"),
    "gemma2": _Kind(norms=4, tied=True),
    "gemma3_text": _Kind(norms=4, tied=True, head_norms=True),
    "deepseek_v3": _Kind(experts="n_routed_experts", router_bias=True),
    "kimi_k2": _Kind(experts="n_routed_experts", router_bias=True),
    "glm4_moe": _Kind(experts="n_routed_experts", router_bias=True),
    "gpt_oss": _Kind(
        bias="qkvo",
        experts="num_local_experts",
        expert_width="intermediate_size",
        expert_bias=1,
        router_bias=True,
        sinks=True,
    ),
}


@dataclass(frozen=True)
class TowerShape:
    """The sizes of what reads images: blocks over their patches, and mergers of several neighbours into one
    token of the language model.
    """

    depth: int
    """Blocks."""
    hidden: int
    """Numbers of a patch between them."""
    intermediate: int
    """Numbers of a patch inside an MLP, one product of its input."""
    gated: bool
    """Whether MLPs multiply two such products (Qwen2.5), and norms are RMS norms."""
    block: int
    """Parameters of one block."""
    before: int
    """Parameters before the blocks."""
    mergers: int
    """Parameters of mergers (the `projector` of actor.freeze)."""
    merged: int
    """Patches of a token."""
    patch: int
    """Numbers of a patch before the first block: its pixels' colours."""
    pixels: int
    """Pixels of an image that are one token."""
    places: int
    """Where its features go into the language model: 1, and with Qwen3's the first blocks."""
    outputs: int
    """Numbers of a token at each of these places."""

    @property
    def parameters(self) -> int:
        """Counts all parameters."""
        return self.depth * self.block + self.before + self.mergers

    def adapted(self, parts: Collection[ModelPart]) -> int:
        """Counts the parameters of adapters of rank 1 at every linear module of these of its parts."""
        wide, products = self.hidden * self.merged, 3 if self.gated else 2
        blocks = self.depth * (6 * self.hidden + products * (self.hidden + self.intermediate))
        of_mergers = self.places * (3 * wide + self.outputs)
        return ("tower" in parts) * blocks + ("projector" in parts) * of_mergers


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a causal language model."""

    name: str
    """What messages call it."""
    layers: int
    """Blocks."""
    hidden: int
    """Width of the hidden states."""
    vocabulary: int
    """Rows of the embeddings."""
    heads: int
    """Of queries."""
    kv_heads: int
    """Of keys and values."""
    key_dim: int
    """Numbers of one head's query or key."""
    value_dim: int
    """Numbers of one head's value."""
    intermediate: int
    """Width of a dense MLP."""
    dense_layers: int
    """Blocks with a dense MLP; the others are mixtures of experts."""
    attention: int
    """Parameters of the matrices of one block's attention."""
    norms: int
    """Of one block, all that is no matrix: norms, biases of attention."""
    attention_ends: int
    """Inputs and outputs of these matrices, added up: what adapters of rank 1 have."""
    attention_inputs: int
    """Of these the inputs."""
    tied: bool = False
    """Whether the output head is the embeddings."""
    latent: int = 0
    """Numbers of a token's latent key and value (MLA); 0: the model has none."""
    experts: int = 0
    """Of a mixture's layer."""
    active_experts: int = 0
    """Experts of one token."""
    expert_width: int = 0
    """Of one expert."""
    shared_width: int = 0
    """Of the experts that all tokens go to, together."""
    expert_extras: int = 0
    """Further parameters of one expert (biases)."""
    router_extras: int = 0
    """Further numbers of one router."""
    tower: TowerShape | None = None
    """What reads images."""

    @property
    def adapted(self) -> int:
        """Counts the parameters of adapters of rank 1 at every linear module but the output head. Experts
        that tokens are sent to are no linear modules.
        """
        sparse = self.layers - self.dense_layers
        mlps = self.dense_layers * (self.hidden + self.intermediate)
        mlps += sparse * (self.hidden + self.shared_width) if self.shared_width else 0
        return self.layers * self.attention_ends + 3 * mlps

    @property
    def adapted_inputs(self) -> int:
        """Counts those of them that are of A: an input each."""
        sparse = self.layers - self.dense_layers
        mlps = self.dense_layers * (2 * self.hidden + self.intermediate)
        mlps += sparse * (2 * self.hidden + self.shared_width) if self.shared_width else 0
        return self.layers * self.attention_inputs + mlps

    @property
    def attention_width(self) -> int:
        """Counts a token's queries, keys, values and outputs in one block."""
        return (self.heads + self.kv_heads) * (self.key_dim + self.value_dim)

    @property
    def embeddings(self) -> int:
        """Counts the embeddings' parameters, which are also those of an output head."""
        return self.vocabulary * self.hidden

    @property
    def routed(self) -> int:
        """Counts the parameters of all experts that tokens are sent to."""
        one = 3 * self.hidden * self.expert_width + self.expert_extras
        return (self.layers - self.dense_layers) * self.experts * one

    @property
    def matrices(self) -> int:
        """Counts the parameters of all blocks' products but experts': what the axis `tensor` cuts."""
        sparse = self.layers - self.dense_layers
        mlps = self.dense_layers * self.intermediate + sparse * self.shared_width
        return self.layers * self.attention + 3 * self.hidden * mlps

    @property
    def seeing(self) -> int:
        """Counts the parameters of what reads images."""
        return 0 if self.tower is None else self.tower.parameters

    @property
    def whole(self) -> int:
        """Counts what the axis `tensor` cuts not: norms, biases, routers, and what reads images."""
        routers = (self.layers - self.dense_layers) * (self.experts * self.hidden + self.router_extras)
        return self.layers * self.norms + self.hidden + routers + self.seeing

    def parameters(self, *, output_head: bool = True) -> int:
        """Counts all parameters; without the output head of its own that a critic does not have."""
        heads = 2 if output_head and not self.tied else 1
        return heads * self.embeddings + self.matrices + self.whole + self.routed

    @property
    def active(self) -> int:
        """Counts the parameters that a token of text meets, the embeddings' once."""
        met = self.parameters() - self.seeing
        if not self.experts:
            return met
        return met - self.routed + self.routed * self.active_experts // self.experts

    @property
    def block(self) -> int:
        """Counts the parameters of the largest block: what FSDP gathers at one time."""
        sparse = self.layers - self.dense_layers
        dense = 3 * self.hidden * self.intermediate if self.dense_layers else 0
        mixture = 3 * self.hidden * self.shared_width + self.experts * self.hidden + self.router_extras
        mixture = mixture + self.routed // sparse if sparse else 0
        return self.attention + self.norms + max(dense, mixture)

    @property
    def mlp_numbers(self) -> int:
        """Counts the numbers of a token inside the widest MLP, one product of its input: those of all experts
        that it goes to.
        """
        mixture = self.shared_width + self.active_experts * self.expert_width
        return max(self.intermediate if self.dense_layers else 0, mixture)


def shape_of(fields: Mapping[str, Any], name: str) -> ModelShape:
    """Returns the shape that a config.json describes: of a model with images that of its language model, and
    where its tower is one of Qwen's the sizes of what reads them.

    Raises ConfigError for a model type whose sizes are not known, and for a size that is not there.
    """
    text = fields.get("text_config") or fields.get("llm_config") or fields
    model_type = str(text.get("model_type", fields.get("model_type")))
    # A text_config need not repeat what it is of: qwen3_vl's is qwen3_vl_text.
    kind = _KINDS.get(model_type) or _KINDS.get(f"{model_type}_text")
    if kind is None:
        near = did_you_mean(model_type, _KINDS)
        raise ConfigError(
            f"{name}: the sizes of a model of type {model_type} are not known{near} There are: "
            f"{', '.join(_KINDS)}; name a model of `rondo plan --shapes` that is like it"
        )
    sizes = _Sizes(text, name)
    hidden, heads, layers = (
        sizes("hidden_size"),
        sizes("num_attention_heads"),
        sizes("num_hidden_layers"),
    )
    experts = sizes(kind.experts) if kind.experts else 0
    # Of Qwen's mixtures `mlp_only_layers` are dense, of DeepSeek's the first ones, of the others none.
    dense = layers
    if experts:
        dense = int(text.get("first_k_dense_replace") or 0) + len(text.get("mlp_only_layers") or ())
    latent = int(text.get("kv_lora_rank") or 0)
    rope = sizes("qk_rope_head_dim") if latent else 0
    key_dim = sizes("qk_nope_head_dim") + rope if latent else int(text.get("head_dim") or hidden // heads)
    value_dim = sizes("v_head_dim") if latent else key_dim
    kv_heads = heads if latent else int(text.get("num_key_value_heads") or heads)
    attention, beside, inputs, outputs = _attention(text, kind, hidden, heads, kv_heads, key_dim, value_dim)
    width = sizes(kind.expert_width) if experts else 0
    return ModelShape(
        name,
        layers=layers,
        hidden=hidden,
        vocabulary=sizes("vocab_size"),
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        intermediate=sizes("intermediate_size") if dense else 0,
        dense_layers=dense,
        attention=attention,
        norms=beside + kind.norms * hidden,
        attention_ends=inputs + outputs,
        attention_inputs=inputs,
        tied=bool(fields.get("tie_word_embeddings", text.get("tie_word_embeddings", kind.tied))),
        latent=latent + rope,
        experts=experts,
        active_experts=sizes("num_experts_per_tok") if experts else 0,
        expert_width=width,
        shared_width=int(text.get("n_shared_experts") or 0) * width,
        expert_extras=kind.expert_bias * (2 * width + hidden),
        router_extras=experts if kind.router_bias else 0,
        tower=_tower(str(fields.get("model_type")), fields.get("vision_config") or {}, name),
    )


def _tower(model_type: str, fields: Mapping[str, Any], name: str) -> TowerShape | None:
    """Returns the sizes of the tower of Qwen's models with images: patches become vectors, blocks, and a
    merger of several neighbours into one vector of the language model (Qwen3: of some blocks' outputs, too).
    """
    if model_type not in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe") or not fields:
        return None
    sizes, third = _Sizes(fields, f"{name}: vision_config"), model_type != "qwen2_5_vl"
    depth, hidden, inner = sizes("depth"), sizes("hidden_size"), sizes("intermediate_size")
    colours = int(fields.get("in_channels") or fields.get("in_chans") or 3)
    side, merged = sizes("patch_size"), int(fields.get("spatial_merge_size") or 2) ** 2
    patch = colours * int(fields.get("temporal_patch_size") or 2) * side**2
    out, wide = sizes("out_hidden_size"), hidden * merged
    merger = wide * (wide + 1) + (wide + 1) * out
    mlp = (hidden + 1) * inner + (inner + 1) * hidden
    block = 4 * hidden * (hidden + 1) + mlp + 4 * hidden
    deep = len(fields.get("deepstack_visual_indexes") or ()) if third else 0
    before, mergers = patch * hidden, merger + hidden
    if third:
        before += (1 + sizes("num_position_embeddings")) * hidden
        mergers += hidden + deep * (merger + 2 * wide)
    else:  # gated, and norms without a bias
        block += (hidden + 1) * inner - 2 * hidden
    counts = (block, before, mergers, merged, patch, side**2 * merged, 1 + deep, out)
    return TowerShape(depth, hidden, inner, not third, *counts)


class _Sizes:
    """Reads sizes that must be there."""

    def __init__(self, fields: Mapping[str, Any], name: str) -> None:
        self._fields = fields
        self._name = name

    def __call__(self, key: str) -> int:
        value = self._fields.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            there = ", ".join(sorted(name for name, one in self._fields.items() if type(one) is int))
            said = "is not there" if value is None else f"is {value!r}, no size"
            raise ConfigError(
                f"{self._name}: {key} {said}, and the model's sizes cannot be told without it "
                f"(model.override can say it); there are: {there or 'no sizes'}"
            )
        return value


def _attention(
    text: Mapping[str, Any],
    kind: _Kind,
    hidden: int,
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
) -> tuple[int, int, int, int]:
    """Counts the parameters of one attention's matrices, those beside them (biases, norms of heads), the
    inputs of the matrices and their outputs.
    """
    latent = int(text.get("kv_lora_rank") or 0)
    if latent:
        queries, rope = int(text.get("q_lora_rank") or 0), int(text["qk_rope_head_dim"])
        own, expanded = heads * key_dim, heads * (key_dim - rope + value_dim)
        pairs = [(hidden, queries), (queries, own)] if queries else [(hidden, own)]
        pairs += [(hidden, latent + rope), (latent, expanded), (heads * value_dim, hidden)]
        inputs, outputs = (sum(ends) for ends in zip(*pairs, strict=True))
        return sum(a * b for a, b in pairs), latent + queries, inputs, outputs
    columns = heads * key_dim + kv_heads * (key_dim + value_dim)
    bias = kind.bias
    if "attention_bias" in text and bias != "qkvo":
        # Llama's key is about all four products, that of GLM about three.
        every = "qkv" if kind.router_bias else "qkvo"
        bias = every if text["attention_bias"] else bias
    beside = {"": 0, "qkv": columns, "qkvo": columns + hidden}[bias]
    if text.get("use_qk_norm", kind.head_norms):
        beside += 2 * key_dim
    beside += heads if kind.sinks else 0
    matrices = hidden * columns + heads * value_dim * hidden
    return matrices, beside, 3 * hidden + heads * value_dim, columns + hidden


@functools.cache
def _known() -> Mapping[str, Mapping[str, Any]]:
    with TABLE.open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader(
            (line for line in lines if not line.startswith("#")), delimiter="\t", quoting=csv.QUOTE_NONE
        )
        return {row["name"]: {**row, "config": json.loads(row["config"])} for row in rows}


@functools.cache
def known_shapes() -> Mapping[str, tuple[ModelShape, int, str]]:
    """Returns the table: name → shape, published number of parameters, source."""
    return {
        name: (shape_of(row["config"], name), int(row["parameters"]), row["source"])
        for name, row in _known().items()
    }


def find_shape(
    path: str | None, config: Mapping[str, Any] | None = None, override: Mapping[str, Any] | None = None
) -> ModelShape:
    """Returns the shape of a model: of `config`, of a folder or a config.json, or of a name in the table with
    or without its owner (Qwen/Qwen3-8B), or in the cache of the hub. Raises ConfigError.
    """
    if config is not None or path is None:
        return shape_of(_overridden(config or {}, override), "model.config")
    place = Path(path).expanduser()
    file = place / "config.json" if place.is_dir() else place
    if not (place.is_dir() or place.suffix == ".json"):
        found = _named(path)
        if found is None:
            near = did_you_mean(path.rpartition("/")[2], known_shapes())
            raise ConfigError(
                f"{path}: no folder, no config.json, and no model of the table{near} "
                f"There are: {', '.join(known_shapes())}; or give the folder of the model"
            )
        if not override:
            return known_shapes()[found][0]
        return shape_of(_overridden(_known()[found]["config"], override), found)
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as a config.json: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{file}: is no mapping of names to sizes")
    return shape_of(_overridden(fields, override), str(file))


def _overridden(fields: Mapping[str, Any], override: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns fields with other values; what is a mapping in both is merged, as where the model is made."""
    found = dict(fields)
    for name, value in (override or {}).items():
        both = isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
        found[name] = {**found[name], **value} if both else value
    return found


def _named(path: str) -> str | None:
    return next((name for plain, name in _by_likeness(path) if plain), None)


def _by_likeness(path: str) -> list[tuple[bool, str]]:
    """Returns the names of the table, each with whether `path` is the model: its own name, or one that only
    adds how it was trained on (Qwen2.5-7B-Instruct).
    """
    asked = path.rstrip("/").rpartition("/")[2].lower()
    found = [(asked == name.lower() or asked.startswith(f"{name.lower()}-"), name) for name in known_shapes()]
    return sorted(found, key=lambda pair: -len(pair[1]))


def only_counted(parameters: int, name: str) -> ModelShape:
    """Returns a model of which nothing is known but how many parameters it has: what it computes takes
    nothing.
    """
    return ModelShape(
        name,
        layers=1,
        hidden=0,
        vocabulary=0,
        heads=0,
        kv_heads=0,
        key_dim=0,
        value_dim=0,
        intermediate=0,
        dense_layers=1,
        attention=parameters,
        norms=0,
        attention_ends=0,
        attention_inputs=0,
        tied=True,
    )
