"""What is known of a run before it begins. Its data, read as it will read them, where a warm start comes
first: an error in them is not to be found hours later. And what a recipe and its chat template say of how the
run will go: each is worth a warning, and may be meant (`tracking.checks`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from rondo.agents.external import agent_of
from rondo.chat import (
    drops_thoughts,
    has_clock,
    learns_to_end,
    opening_of,
    template_variables,
    tool_format,
)
from rondo.config import Config, LoadedConfig, starting_model
from rondo.config.printing import plain
from rondo.core.errors import ConfigError
from rondo.core.roles import ROLES
from rondo.data import ConversationStream, PromptStream, looking
from rondo.rewards import RewardFunction, load_functions, score_names
from rondo.rewards.builtin import format_tags, overlong
from rondo.system.usage import counted_checks
from rondo.tracking import AHEAD, Found, Kind
from rondo.trainers.commands.open_run import open_console
from rondo.trainers.commands.recipe import located
from rondo.trainers.program import (
    Program,
    Prompts,
    Schedule,
    complete_model,
    conversations,
    load_prompts,
    open_tokenizer,
    plan_schedule,
)
from rondo.trainers.supervised import RowStream, Task

_OPENED = re.compile(r"<([\w:-]+)>\s*\Z")


def before_warm_start(loaded: LoadedConfig) -> Config | None:
    """Returns the configuration with the model, and so the tokenizer, that its warm start begins with; None:
    its recipe names no tokenizer.
    """
    first = starting_model(loaded)
    return replace(loaded.config, model=first) if first.tokenizer or first.path else None


def check_data(loaded: LoadedConfig, task: Task | None = None) -> list[str]:
    """Reads and tokenises every row as `rondo train` does, or the supervised `task`, and keeps in the cache
    that it did. Returns a line for each source, and for each warning. Raises DataError naming file and row.
    """
    config = complete_model(before_warm_start(loaded) or loaded.config)
    with located(loaded), open_console(config) as console:
        with console.phase("reading data") as tell, looking(tell):
            streams: list[PromptStream | RowStream]
            if task is None:
                prompts = load_prompts(config)
                streams, held_out = [prompts.train], prompts.held_out()
            else:
                trained, evaluated = task.streams(config)
                streams, held_out = [trained], evaluated.digests() if evaluated else {}
            if task is None and config.data.pretrain:
                streams.append(conversations(config, config.data.pretrain, shuffle=False))
            for stream in streams:
                stream.look_at_rest()
    found = [one for stream in streams for one in found_in_data(config, stream, {}, held_out)]
    warnings = [f"warning: {one.warning()}" for one in found]
    return [*(line for stream in streams for line in stream.describe()), *warnings]


def read_prompts(program: Program, config: Config) -> tuple[Prompts, tuple[str, ...], Schedule]:
    """Returns the prompts, the names of the scores of answers to them, and how long the run is."""
    prompts = load_prompts(config)
    names = score_names(config.reward, prompts.train.source_names, reads_accuracy=program.reads_accuracy)
    return prompts, names, plan_schedule(config, prompts.train.rows_per_epoch, program.learners)


def known_ahead(loaded: LoadedConfig, kind: Kind) -> list[Found]:
    """Returns what a run of this kind is to be warned of, as far as its tokenizer is known. Raises
    ConfigError as `found_ahead`.
    """
    with located(loaded):
        config = before_warm_start(loaded)
        return [] if config is None else found_ahead(config, open_tokenizer(config), kind)


@counted_checks()
def found_ahead(config: Config, tokenizer: Any, kind: Kind) -> list[Found]:
    """Returns what a run of this kind is to be warned of. tokenizer: the run's. Raises ConfigError where
    `tracking.checks` says stop, and where calls of its tools could not be told from text.
    """
    agent = agent_of(config.rollout) if kind == "rl" and config.rollout.tools else None
    if agent is not None and agent.name == "tools":  # one of a program reads answers as it likes
        tool_format(tokenizer)
    return _judged(config, {name: look(config, tokenizer, kind) for name, look in _LOOKS.items()})


def _judged(config: Config, told: Mapping[str, Iterable[str]]) -> list[Found]:
    """Returns what was found, by check what is told of each, less what is off."""
    modes, found = plain(config.tracking.checks), []
    for name, texts in told.items():
        if modes[name] != "off":
            found += [AHEAD[name].found(text) for text in texts]
    for one in found:
        if modes[one.check] == "stop":
            key = f"tracking.checks.{one.check}"
            raise ConfigError(f"{one.line()}. {key}=warn goes on", key=key)
    return found


@counted_checks()
def found_in_data(
    config: Config,
    stream: PromptStream | RowStream,
    updates: Mapping[str, int],
    held_out: Mapping[str, Sequence[bytes]],
) -> list[Found]:
    """Returns what a run over these rows is to be warned of. updates: how many optimizer steps each role
    takes. held_out: `digests` of what it is evaluated on. Raises ConfigError where `tracking.checks` says
    stop.
    """
    rollout, trained = config.rollout, set(chain.from_iterable(stream.digests().values()))
    # There a prompt may be the same instructions for all rows, and other columns say what each is about.
    plays = isinstance(stream, PromptStream) and bool(rollout.environments or rollout.agent)
    return _judged(
        config,
        {
            "repeated_rows": [
                f"{name}: {repeats} of {rows} rows"
                for name, (repeats, rows) in ({} if plays else stream.repeats()).items()
                if repeats > rows / 2
            ],
            "held_out_trained": [
                f"{name}: {seen} of {len(rows)} rows"
                for name, rows in ({} if plays else held_out).items()
                if (seen := sum(row in trained for row in rows))
            ],
            "template_thoughts": [
                f"{name}: in {lost} of the first {rows} rows an answer is learnt without the thought that it "
                "has, because another one follows"
                for name, (lost, rows) in (
                    stream.lost_thoughts() if isinstance(stream, ConversationStream) else {}
                ).items()
                if lost
            ],
            "warm_up": [
                f"{section}.optimizer.schedule.warmup_steps is {warmup}, and {role} takes {steps} "
                "optimizer steps"
                for role, steps in updates.items()
                for section in (ROLES[role].engine or role,)
                if (warmup := getattr(config, section).optimizer.schedule.warmup_steps) > steps
            ],
        },
    )


def _endless(config: Config, tokenizer: Any, kind: Kind) -> Iterator[str]:
    if kind == "reward_model" or learns_to_end(tokenizer, config.data.turns):
        return
    if kind != "rl":
        yield "the model does not learn to stop"
    elif config.rollout.recorded is None and not config.rollout.stop and not tokenizer.end_token_ids:
        yield f"answers end only at {tokenizer.eos_token!r}, where the model says that by itself"


def _clock(config: Config, tokenizer: Any, kind: Kind) -> Iterator[str]:
    if has_clock(tokenizer):
        dates = sorted(name for name in template_variables(tokenizer) if "date" in name)
        yield f" (the template reads {', '.join(dates)})" if dates else ""


def _forgetful(config: Config, tokenizer: Any, kind: Kind) -> Iterator[str]:
    agent = agent_of(config.rollout) if kind == "rl" and config.rollout.recorded is None else None
    # Each step of the loop `steps` has a prompt of its own.
    if agent is None or agent.name == "steps":
        return
    if drops_thoughts(tokenizer, "calls" if agent.name == "tools" else "text"):
        yield (
            "an episode that goes on behind an answer has them in its context, as the policy said them; what "
            "serves the model through the template will not"
        )


def _foreign_end(config: Config, tokenizer: Any, kind: Kind) -> Iterator[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    for token in sorted(set(tokenizer.end_token_ids) - {*tokenizer.all_special_ids, *added}):
        text = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
        yield f"{token}, {'no token there' if text is None else repr(text)}"


def _unreached(config: Config, tokenizer: Any, kind: Kind) -> Iterator[str]:
    # The tokens of an episode are those of several answers.
    if kind == "rl" and agent_of(config.rollout) is None:
        for function in _scoring(config, overlong):
            start = function.options["max_tokens"] - function.options["buffer"]
            if start >= config.rollout.max_tokens:
                yield f"it begins above {start} tokens, and rollout.max_tokens is {config.rollout.max_tokens}"


def _opened(config: Config, tokenizer: Any, kind: Kind) -> Iterator[str]:
    opened = _OPENED.search(opening_of(tokenizer)) if kind == "rl" else None
    if opened is not None:
        for function in _scoring(config, format_tags):
            first = function.options["tags"][0]
            if first != opened[1]:
                yield f"the chat template opens <{opened[1]}>, and tags begins with {first}"


def _scoring(config: Config, which: Callable[..., Any]) -> Iterator[RewardFunction]:
    """Yields the reward functions of a run that are this built-in one."""
    if config.rollout.recorded is None:
        yield from (f for f in load_functions(config.reward.functions) if f.function is which)


_LOOKS = {
    "template_end": _endless,
    "template_clock": _clock,
    "template_thoughts": _forgetful,
    "foreign_end": _foreign_end,
    "overlong_unreached": _unreached,
    "format_opened": _opened,
}
