"""What a run is fed: prompts and conversations as tokens, or recorded rollouts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rondo.agents.external import agent_of
from rondo.agents.tools import Tool, loaded_tools
from rondo.algorithms import bind_preparation, columns_read, lookup
from rondo.chat import check_template_options, checked_continuation, split_stops, stop_token_ids
from rondo.config import Config, SourceConfig
from rondo.core.errors import ConfigError, about, named_by
from rondo.core.types import Prompt, SamplingParams
from rondo.data import SAMPLER, ConversationStream, Mixer, PromptStream, Sampler, digest_of, eval_prompts
from rondo.data.rollout_files import Recording
from rondo.data.sources import source_name
from rondo.models import load_model_config, load_tokenizer
from rondo.models.carried import sampling_defaults
from rondo.models.files import has_tokenizer
from rondo.models.source import ModelSource, TokenizerSource
from rondo.planning.roles import config_for
from rondo.platform import planned
from rondo.rewards import check_names, load_functions
from rondo.trainers.program.given import check_pictures, images_of, row_check
from rondo.trainers.program.roles import model_source, models_beside, positions_of, tokenizer_source


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run, and how responses to them are sampled."""

    train: PromptStream
    """The prompts to train on, in the order of the run."""
    eval: list[Prompt]
    """The prompts to evaluate on."""
    sampling: SamplingParams
    """How responses in training are sampled."""
    notes: tuple[str, ...] = ()
    """What agents should know of the chat template."""
    tools: Sequence[Any] = ()
    """The schemas of rollout.tools."""
    mixer: Mixer | None = None
    """Gives rows of another sampler; None: nothing does."""

    def held_out(self) -> Mapping[str, Sequence[bytes]]:
        """Returns, by source, `digests` of the prompts to evaluate on."""
        found: dict[str, list[bytes]] = {}
        for prompt in self.eval:
            found.setdefault(prompt.source, []).append(digest_of(prompt.token_ids))
        return found


def open_tokenizer(config: Config) -> Any:
    """Opens the run's tokenizer, with the configured chat template and its options. Raises ConfigError for
    options that the template does not have, and for a model that has fewer rows than the tokenizer tokens.
    """
    tokenizer = load_tokenizer(tokenizer_source(config))
    check_template_options(tokenizer)
    tokenizer.try_chat_template = True  # it may be a stranger's; `rondo.chat.trial`
    if config.cluster.backend.address is None:
        for section in _models(config):
            _check_vocabulary(tokenizer, config, section)
            if section != "model" and config.at(section).tokenizer == "compare":
                _check_tokens(tokenizer, config, section)
    return tokenizer


_TEXT = "text_config"


def _models(config: Config) -> Iterator[str]:
    """Yields the sections that name a model, as far as it is known."""
    made = config.model.config or {}
    if config.model.path is not None or "vocab_size" in made.get(_TEXT, made):
        yield "model"
    yield from models_beside(config)
    yield from (f"models.{name}" for name, model in config.models.items() if model.path is not None)


def _check_vocabulary(tokenizer: Any, config: Config, section: str) -> None:
    source = model_source(config, section)
    rows = load_model_config(source).get_text_config().vocab_size
    if len(tokenizer) <= rows:
        return
    beyond = {number: token for token, number in tokenizer.get_vocab().items() if number >= rows}
    if source.path is not None:  # whose pad token may have been added later: nothing computes with it
        beyond.pop(tokenizer.pad_token_id, None)
    if beyond:
        first = min(beyond)
        key = "model.config.vocab_size" if source.path is None else f"{section}.path"
        raise ConfigError(
            f"{key}: the model has {rows} rows (vocab_size), and the tokenizer {len(tokenizer)} tokens: "
            f"{beyond[first]!r} is number {first}; take the model's own tokenizer, or a model with more rows",
            key=key,
        )


def _check_tokens(tokenizer: Any, config: Config, section: str) -> None:
    """Raises ConfigError where a model's own tokenizer, if its folder has one, reads other words than the
    policy's: the model would be given other text than was written.
    """
    source = model_source(config, section)
    theirs = _tokens_of(source)
    if theirs is None:
        return
    ours = {number: token for token, number in tokenizer.get_vocab().items()}
    others = [number for number in sorted(ours) if theirs.by_number.get(number) != ours[number]]
    if others:
        shown = ", ".join(
            f"{number} is {ours[number]!r} and {_shown(theirs.by_number, number)}" for number in others[:3]
        )
        key = f"{section}.tokenizer"
        raise ConfigError(
            f"{section}.path: the tokenizer of {source.path} is not the policy's: of {len(ours)} tokens "
            f"{len(others)} are others there ({shown}). Take a model with the policy's tokens; where these "
            f"are the same words by other names, or never said, set {key}=trust",
            key=key,
        )


def _shown(tokens: Mapping[int, str], number: int) -> str:
    return repr(tokens[number]) if number in tokens else "no token"


class _Tokens(NamedTuple):
    by_number: Mapping[int, str]
    """Texts of tokens, by id."""
    special: Mapping[str, Any]
    """By what they are for: eos_token, pad_token, …"""


def _tokens_of(source: ModelSource) -> _Tokens | None:
    """Returns the tokens of a model folder's own tokenizer; None where it has none."""
    if source.path is None or not has_tokenizer(source.path):
        return None
    changed = max(file.stat().st_mtime_ns for file in Path(source.path).iterdir())
    return _tokens(source.path, source.trust_remote_code, changed)


@functools.lru_cache(maxsize=8)
def _tokens(folder: str, trust_remote_code: bool, changed: int) -> _Tokens:
    """Reads a model folder's tokens. changed: when it last changed, a part of the cache's key."""
    tokenizer = load_tokenizer(TokenizerSource(folder, trust_remote_code=trust_remote_code))
    by_number = {number: token for token, number in tokenizer.get_vocab().items()}
    return _Tokens(by_number, tokenizer.special_tokens_map)


def notes_on_tokenizers(config: Config, tokenizer: Any) -> list[str]:
    """Returns a line for each model beside the policy whose tokenizer has more tokens than the policy's, or
    others for its own ends: it reads the same words, and was trained with more.
    """
    ours, notes = set(tokenizer.get_vocab().values()), []
    sections = [] if config.cluster.backend.address is not None else [*_models(config)]
    for section in sections:
        theirs = None if section == "model" else _tokens_of(model_source(config, section))
        if theirs is None:
            continue
        more = [theirs.by_number[number] for number in sorted(theirs.by_number.keys() - ours)]
        found = [f"{len(more)} tokens that the policy never says ({', '.join(more[:5])})"] if more else []
        special = tokenizer.special_tokens_map
        found += [
            f"{name} {theirs.special.get(name)!r} (the policy's: {special.get(name)!r})"
            for name in sorted({*theirs.special, *special})
            if theirs.special.get(name) != special.get(name)
        ]
        if found:
            notes.append(f"{section}.path: its tokenizer has {', '.join(found)}")
    return notes


def settled(config: Config) -> Config:
    """Returns the configuration with what it leaves to the device (`auto`). Everything that starts something,
    or compares settings with those of an earlier run, does so with this one.
    """
    found = config_for(config, planned(config.cluster.device))
    if found != config and config.cluster.backend.address is not None and config.cluster.device == "auto":
        raise ConfigError(
            "cluster.device=auto: what the nodes at cluster.backend.address have is not known here, and "
            "settings of the engines depend on it (compute_dtype=auto); set cluster.device=cuda or "
            "cluster.device=cpu"
        )
    return found


def complete_model(config: Config) -> Config:
    """Makes a model that is built from scratch fit its tokenizer: vocab_size and special token ids, where
    model.config has none.
    """
    model = config.model
    if model.config is None:
        return config
    tokenizer = open_tokenizer(config)
    found = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    known = {key: value for key, value in found.items() if value is not None}
    text = model.config.get(_TEXT)
    # Of a larger model (one with images) the language model is a part.
    full = {**known, **model.config} if text is None else {**model.config, _TEXT: {**known, **text}}
    return replace(config, model=replace(model, config=full))


def tool_schemas(config: Config) -> list[Mapping[str, Any]]:
    """Returns the schemas of rollout.tools, which prompts and demonstrations are written with. Raises
    ConfigError.
    """
    return [tool.schema for tool in _tools(config)]


def _tools(config: Config) -> tuple[Tool, ...]:
    """Returns what rollout.tools are; nothing of them runs any more."""
    with about("rollout.tools"), loaded_tools(config.rollout.tools) as loaded:
        return loaded


def load_prompts(config: Config) -> Prompts:
    """Opens the sources, and reads what is read before the start (see `rondo.data.stream`). Raises DataError
    or ConfigError naming file, row and column.
    """
    tokenizer, data = open_tokenizer(config), config.data
    images = images_of(config, tokenizer)
    loaded, also = _tools(config), row_check(config)
    check_pictures(config, loaded)
    tools = [tool.schema for tool in loaded]
    train = PromptStream(
        data.train,
        tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompts,
        shuffle=data.shuffle,
        seed=config.trainer.seed,
        tools=tools,
        also=also,
        images=images,
    )
    keys = {source_name(source): source.prompt_key for source in data.train}
    check_names(load_functions(config.reward.functions), train.columns, keys)
    mixer = checked_mixer(config)
    if mixer is not None:
        mixer.call("check_columns", columns=train.columns)
    sampler = checked_sampler(config, mixer)
    if sampler is not None:
        train.choose_by(
            sampler,
            n=config.rollout.n,
            batch_size=data.batch_size,
            seed=config.trainer.seed,
            least=_least_answers(config),
        )
    held_out = eval_prompts(
        data.eval,
        tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompts,
        limit=config.trainer.evaluation.limit,
        tools=tools,
        also=also,
        images=images,
    )
    has_turns = agent_of(config.rollout) is not None
    notes = checked_continuation(tokenizer).notes() if has_turns else []
    notes += [*_note_of_sampling(config), *notes_on_tokenizers(config, tokenizer)]
    return Prompts(train, held_out, sampling_params(config, tokenizer), tuple(notes), tools, mixer)


def checked_mixer(config: Config) -> Mixer | None:
    """Makes what algorithm.mix names, where it is set. Raises ConfigError for what cannot be asked."""
    chosen, algorithm = config.algorithm.mix, config.algorithm
    if chosen is None:
        return None
    with about(Mixer.key):
        return Mixer(chosen, algorithm.coefficients)


def checked_sampler(config: Config, mixer: Mixer | None) -> Sampler | None:
    """Returns what chooses the prompts: what data.sampler names, or a mix that chooses prompts; None where
    nothing does. Raises ConfigError for one that cannot choose among data.train, would be told wrong, or
    leaves nobody to read what is set beside it.
    """
    data = config.data
    if mixer is not None and not mixer.chooses:
        mixer = None
    if data.sampler is None and mixer is None:
        return None
    if data.sampler is not None and mixer is not None:
        raise ConfigError(
            f"{SAMPLER} is set, and {Mixer.key} chooses the prompts, too ({mixer.name}); remove one",
            key=SAMPLER,
        )
    key = SAMPLER if mixer is None else Mixer.key
    with about(key):
        sampler = Sampler(data.sampler) if mixer is None else mixer  # type: ignore[arg-type]
        sources = [source_name(source) for source in data.train]
        sampler.call("check", sources=sources, n=config.rollout.n, least=_least_answers(config))
        if config.reward.models and sampler.reads("heard", "rewards"):
            raise ConfigError(
                f"{key}={sampler.name} reads rewards, which are without the scores of reward.models when "
                "it hears them: use reward functions, or a sampler that reads accuracy"
            )
    unread = [] if data.shuffle or data.pretrain else ["data.shuffle"]
    unread += [f"data.train.{i}.weight" for i, source in enumerate(data.train) if source.weight != 1]
    if unread and not sampler.reads("choose", "order"):
        raise ConfigError(
            f"{unread[0]} is set, and nothing reads it: {key}={sampler.name} chooses rows by itself; "
            "remove it, or have `choose` take `order`, which gives the rows in that order",
            key=unread[0],
        )
    return sampler


def _least_answers(config: Config) -> int:
    """Returns how many answers a prompt must have."""
    return 2 if comparing(config) else 1


def comparing(config: Config) -> str:
    """Names what compares the answers to a prompt, for messages: an estimator, or the preparation of a policy
    loss; "" where nothing does.
    """
    algorithm = config.algorithm
    if "group_id" in columns_read(lookup("advantage", algorithm.advantage.name)):
        return f"algorithm.advantage = {algorithm.advantage.name}"
    prepare = bind_preparation(algorithm.policy_loss)
    is_read = prepare is not None and "group_id" in columns_read(prepare)
    return f"algorithm.policy_loss = {algorithm.policy_loss.name}" if is_read else ""


def _note_of_sampling(config: Config) -> list[str]:
    """Says that the model folder would have answers sampled otherwise than rollouts are."""
    folder = tokenizer_source(config).model
    said = {} if folder is None or not Path(folder).is_dir() else sampling_defaults(Path(folder))
    if not said:
        return []
    values = ", ".join(f"{name}={value}" for name, value in said.items())
    return [
        f"generation_config.json of {config.model.path}: {values}; the export has it, too, and rollouts are "
        "sampled as the keys of rollout say"
    ]


def sampling_params(config: Config, tokenizer: object) -> SamplingParams:
    rollout = config.rollout
    with named_by("rollout.stop"):
        ids, texts = stops_of(tokenizer, rollout.stop)
    return SamplingParams(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_token_ids=ids,
        stop=texts,
    )


def stops_of(tokenizer: Any, stops: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the tokens and the texts that end a response: the tokenizer's own ends, and `stops`. Raises
    DataError.
    """
    ids, texts = split_stops(tokenizer, stops)
    return tuple(sorted({*stop_token_ids(tokenizer), *ids})), texts


def longest_row(config: Config, budget: int, roles: Sequence[str] = ("actor",)) -> int:
    """Returns the most tokens that a row of training may have: what fits into `budget` tokens, and what the
    models of all `roles` have positions for.
    """
    return min([budget, *filter(None, (positions_of(role, config) for role in roles))])


def conversations(
    config: Config,
    sources: tuple[SourceConfig, ...],
    *,
    shuffle: bool,
    whole: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> ConversationStream:
    """Returns rows of `sources` as token sequences with a loss mask; a whole conversation has at most
    actor.token_budget tokens, and no more than the model has positions. whole: all rows are read now. tools:
    schemas that all are written with.
    """
    tokenizer = open_tokenizer(config)
    most = longest_row(config, config.actor.token_budget)
    if config.data.max_tokens is not None:
        most = min(most, config.data.max_tokens)
    return ConversationStream(
        sources,
        tokenizer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_tokens=most,
        overlong=config.data.overlong_prompts,
        shuffle=shuffle,
        seed=config.trainer.seed,
        whole=whole,
        tools=tools,
        images=images_of(config, tokenizer),
        turns=config.data.turns,
    )


IN_SHORT = "no engine runs: nothing is generated, scored by reward.functions, published or evaluated"


@dataclass(frozen=True)
class Recorded:
    """What a configuration trains on, where it generates nothing."""

    recording: Recording
    """The recorded rollouts."""
    sizes: tuple[int, ...]
    """Prompt groups of each step of the run."""
    changed: tuple[str, ...]
    """Why these may be the samples of another policy than the one that is trained, such as settings that
    differ from those of the recorded run; (): they are this very policy's."""

    def scored_by(self, config: Config) -> tuple[str, ...]:
        """Returns the reward.models that still have to score: those whose scores are not in the recording."""
        names = (model.name for model in config.reward.models)
        return tuple(name for name in names if name not in self.recording.scores)

    def describe(self) -> str:
        """Writes what it is, in one line."""
        recording, largest = self.recording, max(self.sizes)
        what = f"{len(self.sizes)} steps of {largest} prompt groups" if len(self.sizes) > 1 else "1 step"
        found = f"{recording.path} ({recording.num_groups} groups, {recording.num_rows} rows)"
        return f"recorded rollouts: {what} from {found}; {IN_SHORT}"

    def describe_policy(self) -> str:
        """Writes, in one line, whose samples they are."""
        if not self.changed:
            return "the settings are the recorded run's: the samples are this policy's own"
        return "the samples are another policy's: " + "; ".join(self.changed)
