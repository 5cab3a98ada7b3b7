"""What is asked of a third-party engine before it is imported: installation, version, options, abilities."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from rondo.core.errors import ConfigError, did_you_mean
from rondo.models.lora import AdapterSet
from rondo.platform import on_host, platform_of
from rondo.rollout.interpreter import interpreter
from rondo.rollout.protocol import Capabilities, EngineSpec

MERGE = "set actor.lora.send=merged"


@dataclass(frozen=True)
class Hook:
    """Something of an engine's package that is not public, and that rondo replaces or calls."""

    owner: Any
    """The class or module that has it."""
    name: str
    """Its name there."""
    takes: str = ""
    """Names of parameters that it has, among others."""


class ThirdParty:
    """One such engine. Nothing here imports it: that takes seconds, and changes the process.

    The options of `rollout.engine` are the engine's own arguments; their names are read from its source.
    python: the interpreter of the environment in which it is looked for; None: this one.
    """

    # The value of rollout.engine.name, which is also the engine's package; and how it writes itself.
    name: ClassVar[str]
    title: ClassVar[str]
    # Names that it is distributed by.
    distributions: ClassVar[tuple[str, ...]]
    # Versions that will do: from the first on, before the second.
    oldest: ClassVar[tuple[int, ...]]
    newer: ClassVar[tuple[int, ...]]
    # Files with the classes whose fields are its arguments (in its package), and a pattern of their names.
    arguments_in: ClassVar[str]
    arguments_class: ClassVar[str]
    # The option without which a GPU's memory is not given back.
    sleep_option: ClassVar[str]
    # Arguments that rondo sets, and the key of its own that governs each.
    governed: ClassVar[Mapping[str, str]]
    # Model types that were seen to be the same model there: weights were sent, and log-probs compared with
    # transformers' (docs/models.md).
    models: ClassVar[frozenset[str]]
    # Those that its CPU build does not serve, so that they were not tried.
    gpu_models: ClassVar[frozenset[str]] = frozenset()
    # Of these it is given images (rows of text it answers for all).
    seeing_models: ClassVar[frozenset[str]] = frozenset()
    # Of these it was seen to serve adapters by themselves, at these modules, up to a rank (None: any).
    adapter_models: ClassVar[frozenset[str]]
    adapter_targets: ClassVar[frozenset[str]] = frozenset(
        "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    )
    largest_rank: ClassVar[int | None] = None
    # Settings of a model that it leaves out, and what that is.
    left_out: ClassVar[Mapping[str, str]] = {}
    # Patterns of arguments whose effect on weights, versions or log-probs is not known to be right, and why.
    refused: ClassVar[Mapping[str, str]]

    def __init__(self, python: str | None = None) -> None:
        self.python = python

    def installed(self) -> tuple[str, str]:
        """Returns the distribution and its version. Raises ConfigError that says what to install."""
        paths = sys.path if self.python is None else list(interpreter(self.python).paths)
        for name in self.distributions:
            for found in importlib.metadata.distributions(name=name, path=paths):
                return name, found.version
        environment = "this environment" if self.python is None else f"the environment of {self.python}"
        raise ConfigError(
            f"rollout.engine={self.name} needs {self.title}, which is not installed in {environment}. "
            "Without a GPU: `make test-engines` makes .venv-engines, which has it; with a GPU: pip install "
            f"{self.name} in an environment of its own, and name its interpreter in rollout.engine.python; "
            "see docs/engines.md"
        )

    def folder(self) -> Path:
        """Returns the folder of the installed package."""
        folders = self.folders(self.name)
        if not folders:
            raise ConfigError(f"the installed {self.title} has no package {self.name!r}; reinstall it")
        return Path(folders[0])

    def folders(self, package: str) -> Sequence[str] | None:
        """Returns the folders of a package in the engine's environment; None: it is not there."""
        if self.python is not None:
            return interpreter(self.python, package).folders[package]
        found = importlib.util.find_spec(package)
        return None if found is None else [*(found.submodule_search_locations or ())]

    @cached_property
    def arguments(self) -> frozenset[str]:
        """Returns the names of its arguments. Raises ConfigError where they cannot be read."""
        names = {
            field.target.id
            for path in sorted(self.folder().glob(self.arguments_in))
            for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body
            if isinstance(node, ast.ClassDef) and fnmatchcase(node.name, self.arguments_class)
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        }
        if not names:
            raise ConfigError(
                f"the arguments of {self.title} cannot be read from {self.folder() / self.arguments_in}: "
                "this version is not supported"
            )
        return frozenset(name for name in names if not name.startswith("_"))

    def check(self, options: Mapping[str, Any], device: str = "cpu", *, sleep: bool = False) -> None:
        """Raises ConfigError where the engine cannot be built like this: not installed, another version or
        build, an option that must not be passed on, or no sleep where that is asked for.
        """
        if self.name not in platform_of(device).engines:
            raise ConfigError(
                f"rollout.engine={self.name}: nobody has seen {self.title} run with rondo on {device}; use "
                "rollout.engine=native, or name it in the platform's `engines`"
            )
        distribution, version = self.installed()
        numbers = tuple(int(piece) for piece in re.findall(r"\d+", version.split("+")[0])[:3])
        if not self.oldest <= numbers < self.newer:
            wanted = [".".join(map(str, bound)) for bound in (self.oldest, self.newer)]
            raise ConfigError(
                f"{self.title} {version} is installed; rondo needs {wanted[0]} or newer, before {wanted[1]} "
                "(docs/engines.md)"
            )
        self.check_build(distribution, version, device)
        for name in options:
            where = f"rollout.engine.{name}"
            if name in self.governed:
                raise ConfigError(f"{where}: rondo sets this; it is governed by {self.governed[name]}")
            for pattern, reason in self.refused.items():
                if fnmatchcase(name, pattern):
                    raise ConfigError(f"{where} is not supported with rondo: {reason}")
            if name not in self.arguments:
                near = did_you_mean(name, sorted(self.arguments))
                raise ConfigError(f"{where}: {self.title} {version} has no engine argument {name!r}{near}")
        if sleep and not self.sleeps(options, device):
            raise ConfigError(f"rollout.sleep: {self.why_no_sleep(device)}", key="rollout.sleep")

    def check_hooks(self, hooks: Iterable[Hook]) -> None:
        """Raises ConfigError where the installed version lacks one, or has another one of that name: what
        rondo puts in its place would never be called, and nobody would know. Called where it is imported.
        """
        for hook in hooks:
            found, takes = getattr(hook.owner, hook.name, None), hook.takes.split()
            if found is None or (takes and not {*takes} <= {*inspect.signature(found).parameters}):
                raise ConfigError(
                    f"{self.title} {self.installed()[1]} has no {hook.owner.__name__}.{hook.name}"
                    f"({', '.join(takes)}), which rondo replaces or calls; install another version "
                    "(docs/engines.md), or use rollout.engine=native"
                )

    def check_model(self, config: Any, device: str) -> None:
        """Raises ConfigError for a model that is not known to be the same one there. config: the model's."""
        key, kind, remedy = "rollout.engine", config.model_type, "use rollout.engine=native or transformers"
        for name, what in self.left_out.items():
            if getattr(config, name, None):
                why = f"{self.title} leaves out {what} of this {kind} model ({name}); {remedy}"
                raise ConfigError(why, key=key)
        if kind in self.models or (kind in self.gpu_models and not on_host(device)):
            return
        if kind in self.gpu_models:
            why = f"the CPU build of {self.title} does not serve a {kind} model; {remedy}"
            raise ConfigError(why, key=key)
        raise ConfigError(
            f"a {kind} model has not been seen to be the same model in {self.title} as in transformers, as "
            f"{', '.join(sorted(self.models))} have; {remedy}",
            key=key,
        )

    def why_blind(self, config: Any) -> str:
        """Returns why it is given no images of requests to a model; "": it is. config: the model's."""
        if str(config.model_type) in self.seeing_models:
            return ""
        return (
            f"rondo gives none to {self.name} for a {config.model_type} model; set rollout.engine=native or "
            "transformers"
        )

    def check_adapters(self, adapters: AdapterSet, config: Any) -> None:
        """Raises ConfigError for adapters that it cannot serve by themselves (actor.lora.send). config: the
        model's.
        """
        rank = adapters.rank
        if self.largest_rank is not None and rank > self.largest_rank:
            raise ConfigError(
                f"actor.lora.rank={rank}: {self.title} serves adapters of rank {self.largest_rank} at most; "
                f"lower it, or {MERGE}",
                key="actor.lora.rank",
            )
        if config.model_type not in self.adapter_models:
            raise ConfigError(
                f"actor.lora.send=adapters: {self.title} has not been seen to serve the adapters of a "
                f"{config.model_type} model, as it has those of {', '.join(sorted(self.adapter_models))}; "
                f"{MERGE}",
                key="actor.lora.send",
            )
        ends = {one.module.rpartition(".")[2] for one in adapters.by_weight.values()}
        other, known = sorted(ends - self.adapter_targets), ", ".join(sorted(self.adapter_targets))
        if other:
            raise ConfigError(
                f"actor.lora.targets: {self.title} serves adapters of {known} here, not of "
                f"{', '.join(other)}; name others, or {MERGE}",
                key="actor.lora.targets",
            )

    def check_build(self, distribution: str, version: str, device: str) -> None:
        """Raises ConfigError where what is installed was not built for the device."""
        raise NotImplementedError

    def sleeps(self, options: Mapping[str, Any], device: str) -> bool:
        """Says whether its sleep gives memory back."""
        return not on_host(device) and bool(options.get(self.sleep_option))

    def why_no_sleep(self, device: str) -> str:
        """Says what makes sleep possible, or that nothing does."""
        if not on_host(device):
            return f"add rollout.engine.{self.sleep_option}=true"
        return f"{self.title} gives no memory back on a CPU; set rollout.sleep=false"

    def capabilities(self, options: Mapping[str, Any], device: str = "cpu") -> Capabilities:
        """Returns what it can do with these options on this device. It fuses and packs its matrices, so it
        does not read them back.
        """
        _, version = self.installed()
        return Capabilities(self.name, version, sleep=self.sleeps(options, device), reads_back=False)

    def environment(self, spec: EngineSpec) -> dict[str, str]:
        """Returns variables of the engine's process and of its children; to be set before it starts."""
        raise NotImplementedError
