"""What the sections share: how strict they are, kinds of numbers, and a function chosen by name.

No file of this folder imports annotations from __future__: pydantic would look for the names in them in
the module that makes a section first, and a program's own `Path` is not ours.
"""

import dataclasses
import os
import re
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import CoreSchema, core_schema

from rondo.core.errors import did_you_mean

# Types are strict ("4" is no integer), unknown keys are errors. Validators are built when they are needed.
# `keys.meaning` reads the texts under the fields: pydantic's reader would cost a fifth of a load, and forgets
# what is inherited.
STRICT = ConfigDict(strict=True, extra="forbid", defer_build=True)


def whole(value: Any) -> Any:
    """Takes 1e3 for a number of steps: as good as 1000."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _no_number(value: Any) -> Any:
    """Refuses 1, which is equal to True."""
    if type(value) in (int, float):
        raise ValueError("must be auto, true, false or offload")
    return value


def _function(value: Any, as_text: Callable[[Any], str]) -> Any:
    """Takes the function itself for its name, in a program."""
    return value if callable(value) else as_text(value)


def _nameable(value: str) -> str:
    """Returns a path with the home folder in the place of `~`. Refuses what no file can be called (a hub id
    is shorter), and variables of a shell, which would be names of folders.
    """
    size = len(value.encode())
    if "\0" in value or size > 4095 or any(len(part.encode()) > 255 for part in value.split("/")):
        raise ValueError("must be a name that a file can have: at most 255 bytes between two slashes, no NUL")
    if re.search(r"\$(\{|[A-Za-z_])", value):
        raise ValueError(
            "must be a path as it is: no variable ($HOME, ${HOME}) is looked up here; begin with ~ for the "
            'home folder, or let the shell write it out (key="$HOME/…")'
        )
    path = os.path.expanduser(value)  # here, for all that open it
    if path.startswith("~"):
        raise ValueError("must be a path, and no user of this machine is called so (a name itself: ./~…)")
    return path


def _device(value: str) -> str:
    """Takes a kind of rondo's own, and names of others."""
    own = ("auto", "cpu", "cuda")
    if value not in own and not re.search(r"[.:]", value):
        near = did_you_mean(value, own)
        raise ValueError(f"must be {', '.join(own)}, or path.py:Class{near}")
    return value


def _here(value: str) -> str:
    """Refuses a URL, of which a folder of this machine would be made: `s3:`."""
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", value):
        raise ValueError("must be a path on this machine, and is a URL")
    return value


def _paths(value: Any, _: Any) -> str | tuple[str, ...]:
    """Takes a path, or a list of paths; pydantic's errors would name what it tries one after the other."""
    several = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not several or not all(isinstance(path, str) and path for path in several):
        raise ValueError("must be a path, or a list of paths")
    paths = tuple(map(_nameable, several))
    return paths[0] if isinstance(value, str) else paths


Path = Annotated[str, AfterValidator(_nameable)]
LocalPath = Annotated[Path, AfterValidator(_here)]
Paths = Annotated[Annotated[str, Field(min_length=1)] | tuple[str, ...], WrapValidator(_paths)]
Name = Annotated[str, WrapValidator(_function)]
Device = Annotated[
    str,
    AfterValidator(_device),
    WithJsonSchema({"anyOf": [{"enum": ["auto", "cpu", "cuda"]}, {"type": "string", "pattern": "[.:]"}]}),
]
# Every number has two bounds. The upper one is no recommendation: it is beyond what anybody means, and below
# what does not end, is no number of the machine's, or has no memory to lie in.
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), BeforeValidator(whole)]  # torch's generators take these
Count = Annotated[int, Field(ge=1, le=10**9), BeforeValidator(whole)]  # steps
Natural = Annotated[int, Field(ge=0, le=10**9), BeforeValidator(whole)]
Rows = Annotated[int, Field(ge=1, le=10**8), BeforeValidator(whole)]
Batch = Annotated[int, Field(ge=1, le=2**20), BeforeValidator(whole)]  # prompt groups, or rows, of a step
Threads = Annotated[int, Field(ge=1, le=1024), BeforeValidator(whole)]
Few = Annotated[int, Field(ge=1, le=2**16), BeforeValidator(whole)]  # samples, sequences, devices
FewOrNone = Annotated[int, Field(ge=0, le=2**16), BeforeValidator(whole)]
# What is packed is counted in 32 bits.
Tokens = Annotated[int, Field(ge=1, lt=2**31), BeforeValidator(whole)]
# Of a bucket (shared memory, in whole pages), a cache or logits: less than a page saves nothing, and costs a
# round per element.
Buffer = Annotated[int, Field(ge=4096, le=2**50), BeforeValidator(whole)]
Number = Annotated[float, Field(ge=-1e12, le=1e12)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
NonNegative = Annotated[float, Field(ge=0, le=1e12)]
Rate = Annotated[float, Field(gt=0, le=100)]  # of learning
Passes = Annotated[float, Field(gt=0, le=1e6)]  # over all rows
Seconds = Annotated[float, Field(gt=0, le=1e8)]  # three years; threads cannot wait for 300
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Mass = Annotated[float, Field(gt=0, le=1)]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Checkpointing = Annotated[Literal["auto", True, False, "offload"], BeforeValidator(_no_number)]


@cache
def fields_of(section: type) -> Mapping[str, Any]:
    """Returns the resolved type of each field by its name, without the bounds."""
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def choices_of(section: type) -> tuple[Any, ...]:
    """Returns the values of the first key that choose a section; none where that is any function's name."""
    return typing.get_args(next(iter(fields_of(section).values())))


class Chosen:
    """Marks a section, or sections that exclude each other, for which the value of the first key may stand.

    `ClusterConfig(backend="ray")` is what `backend: ray` is in a recipe, where `keys.SchemaPlace.named`
    says so.
    """

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        sections = [one for one in typing.get_args(kind) or (kind,) if one is not type(None)]
        if len(sections) > 1:
            kind = Annotated[kind, Field(discriminator=next(iter(fields_of(sections[0]))))]

        def section(value: Any) -> Any:
            if not isinstance(value, str) and not callable(value):
                return value
            choices = {choice: one for one in sections for choice in choices_of(one)}
            if choices and value not in choices:
                raise ValueError(f"must be one of {', '.join(choices)}")
            return choices.get(value, sections[0])(value)

        # Behind a function of ours JSON would be checked as Python is, where a list is no tuple.
        schema = handler.generate_schema(kind)
        python = core_schema.no_info_before_validator_function(section, schema)
        return core_schema.json_or_python_schema(json_schema=schema, python_schema=python)


@dataclass(frozen=True, config=STRICT)
class FunctionConfig:
    """A function chosen by name; further keys are its options.

    Written as `advantage: grpo` or `advantage: {name: grpo, normalize_std: false}`.
    """

    name: Name
    """A built-in (`grpo`), `path.py:name` or dotted name."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function; in a recipe they stand beside its name."""


Function = Annotated[FunctionConfig, Chosen()]
