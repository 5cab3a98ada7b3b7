"""What rows hold beside their tokens (images, environments); and prompts and responses that a program or a
mix brings, as stream and engines would have made them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rondo.agents.tools import Tool
from rondo.chat import (
    Conversation,
    ImagePart,
    MessageReader,
    as_messages,
    encode_conversations,
    encode_prompt,
    opening_of,
    template_keys,
)
from rondo.config import Config
from rondo.config.schema import ImagesConfig
from rondo.core.errors import ConfigError, DataError
from rondo.core.images import ImageRef, with_images
from rondo.core.types import Completion, FinishReason, Prompt
from rondo.data.encoding import RowCheck
from rondo.data.images import ImageFolder, Images
from rondo.data.prompts import PromptStream
from rondo.data.sources import Source
from rondo.environments.registry import load_environments
from rondo.environments.rows import start_of
from rondo.models.loading import load_model_config
from rondo.models.pixels import ImageReader, image_family, image_reader
from rondo.rewards import RewardFunction, load_functions
from rondo.trainers.program.roles import image_folder, model_source, models_beside

_NO_TOKENS = np.empty(0, np.int32)
# Images by which models are compared: within limits of pixels, and beyond.
_TRIED = ((16, 16), (224, 224), (640, 480), (1920, 1080))


def images_of(config: Config, tokenizer: Any) -> Images | None:
    """Returns how the images of rows are found and counted; those that are no files are kept in the run's
    folder. None: the model reads none, or is on other machines and nothing is said of images. The tokenizer
    is told what is to stand for an image in texts. Raises ConfigError where images are configured for a model
    that reads none, DataError (`settings_of`).
    """
    source, given = model_source(config), config.model.images
    sources = (*config.data.train, *config.data.eval, *config.data.pretrain)
    said = given != ImagesConfig() or any(one.image_key or one.image_dir for one in sources)
    if config.cluster.backend.address is not None and not said:
        return None
    reader = image_reader(source)
    if reader is None:
        if said:
            image_family(load_model_config(source), key="model.images")
        return None
    reader.tell(tokenizer)
    return Images(reader, image_folder(config), given.per_prompt, _without_eyes(config, reader))


def check_pictures(config: Config, tools: Sequence[Tool]) -> None:
    """Raises ConfigError where an environment is to show pictures (its option `observe`), or one of the tools
    works on images, and the model reads none.
    """
    shows = [
        f"rollout.environments.{place}: observe: {one.options['observe']} shows pictures"
        for place, one in enumerate(config.rollout.environments)
        if one.options.get("observe", "text") != "text"
    ]
    shows += [f"rollout.tools: {tool.name} works on images" for tool in tools if tool.images]
    if not shows or config.cluster.backend.address is not None or image_reader(model_source(config)):
        return
    raise ConfigError(
        f"{shows[0]}, and rondo gives the model none: take one that reads images (docs/images.md), or leave "
        "them out (observe: text; another tool)"
    )


def _without_eyes(config: Config, reader: ImageReader) -> str:
    """Says of a model beside the policy that it would not see what the policy sees; "": of none."""
    if config.cluster.backend.address is not None:
        return ""
    for section in models_beside(config):
        theirs = image_reader(model_source(config, section))
        if theirs is None:
            return f"{section}.path is a model that reads none: name one that sees"
        for width, height in _TRIED:
            its, own = (one.tokens(one.grid(width, height)) for one in (theirs, reader))
            if (theirs.family, theirs.token, its) != (reader.family, reader.token, own):
                return (
                    f"for {section}.path an image of {width} × {height} is other tokens ({its}; the "
                    f"policy: {own}): set model.images.min_pixels and max_pixels, or name a model of the "
                    "policy's family"
                )
    return ""


def row_check(config: Config) -> RowCheck | None:
    """Returns what must be right about rows beside their tokens: each is about one of the environments, where
    there are some, and has what the reward functions read. None: nothing.
    """
    names = [one.name for one in load_environments(config.rollout.environments)]
    functions = [f for f in load_functions(config.reward.functions) if f.columns or f.marks.row]
    if not names and not functions:
        return None
    read = [(f.spec, f.columns, dict(f.options), f.config.sources, f.stamp) for f in functions]
    return RowCheck(functools.partial(_check_row, names, functions), repr([names, read]))


def _check_row(names: Sequence[str], functions: Sequence[RewardFunction], source: Source, row: int) -> None:
    """Raises DataError for a row that is about none of the environments, or that cannot be scored."""
    with source.about(row):
        if names:
            start_of(source.rows[row], names)
        prompt = Prompt(0, f"{source.name}/0/{row}", source.name, _NO_TOKENS, source.fields(row))
        for function in functions:
            if function.applies(source.name):
                function.check_row(prompt)


def prompt_of(
    asked: str | Sequence[Mapping[str, Any]] | Sequence[int] | np.ndarray,
    tokenizer: Any,
    number: int,
    fields: Mapping[str, Any],
    *,
    source: str,
    tools: Sequence[Mapping[str, Any]],
    reads: Images | None = None,
    images: Sequence[Any] | None = None,
) -> Prompt:
    """Makes the prompt with this sequence number; see `Session.prompt`. reads: how images are read; None: the
    model reads none.
    """
    said = Conversation(())
    shown: tuple[ImageRef, ...] = ()
    has_template, schemas = tokenizer.chat_template is not None, list(tools)
    is_listed = isinstance(asked, Sequence) and len(asked) > 0
    is_ids = isinstance(asked, np.ndarray) or (is_listed and all(isinstance(one, int) for one in asked))
    if images is not None and (reads is None or is_ids or not has_template):
        why = "token ids, or text without a chat template, show none" if reads else "the model reads none"
        raise DataError(f"session.prompt(…, images=…): {why}; leave them out")
    if is_ids:
        token_ids = np.asarray(asked)
    elif isinstance(asked, str) and not has_template:
        token_ids = encode_prompt(tokenizer, asked)
    else:
        reader = MessageReader(template_keys(tokenizer), takes_images=reads is not None)
        said = reader.read(as_messages(asked) if isinstance(asked, str) else asked)
        if reads is not None:
            said = reads.of_row(said, None if images is None else list(images))
        token_ids = encode_prompt(tokenizer, said.for_template(), tools=schemas or None)
        if reads is not None and said.images:
            (token_ids,) = reads.expanded([token_ids], said.images, ImageFolder.anywhere())
            shown = reads.references(said.images, ImageFolder.anywhere())
    if token_ids.ndim != 1 or not len(token_ids) or token_ids.dtype.kind not in "iu" or token_ids.min() < 0:
        raise DataError(f"session.prompt: no row of one token id or more: {token_ids!r:.80}")
    fields = {**fields, "tools": schemas} if schemas else dict(fields)
    opening = opening_of(tokenizer) if said.messages else ""
    name = f"own:{source}/{number}"
    token_ids, text = token_ids.astype(np.int32), asked if isinstance(asked, str) else ""
    return Prompt(number, name, source, token_ids, fields, said.messages, opening, shown, text)


def prompts_that_show(
    config: Config, tokenizer: Any, texts: Sequence[str], system: str | None, files: Sequence[str]
) -> list[Prompt]:
    """Makes prompts of texts, each of which shows the same images. Raises ConfigError for files that are not
    there, and for a model that cannot be shown any.
    """
    if not files:
        encoded = [encode_prompt(tokenizer, text, system=system) for text in texts]
        return [Prompt(i, f"prompt/0/{i}", "prompt", ids) for i, ids in enumerate(encoded)]
    gone = next((name for name in files if not Path(name).is_file()), None)
    if gone is not None:
        raise ConfigError(f"--image {gone}: there is no such file")
    reads = images_of(config, tokenizer)
    if reads is None or tokenizer.chat_template is None:
        why = "it has no chat template" if reads else "it reads none"
        raise ConfigError(f"--image: {config.model.path} cannot be shown images: {why}; leave it out")
    given: dict[str, Any] = {"source": "prompt", "tools": (), "reads": reads, "images": files}
    asked = [as_messages(text, system) for text in texts]
    return [prompt_of(messages, tokenizer, i, {}, **given) for i, messages in enumerate(asked)]


def completion_of(
    prompt: Prompt,
    response: np.ndarray | str,
    stream: PromptStream,
    ends: Collection[int],
    *,
    log_probs: np.ndarray | float,
    versions: np.ndarray | int,
    who: str = "session.rows",
) -> Completion:
    """Makes a response as an engine answers; see `Session.rows`. stream: the run's prompts. ends: the tokens
    that stop one. who: gives it, for messages.
    """
    ids = _answer(prompt, response, stream, who) if isinstance(response, str) else np.asarray(response)
    who = f"{who}: a response to {prompt.prompt_id!r}"
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise DataError(f"{who} is no row of one token id or more: {ids!r:.80}")
    for name, column in (("log_probs", log_probs), ("versions", versions)):
        if np.shape(column) not in ((), ids.shape):
            raise DataError(f"{who} has {len(ids)} tokens, and its {name} the shape {np.shape(column)}")
    if ids.min() < 0:
        raise DataError(f"{who} has the token id {ids.min()}; ids are 0 and above")
    said = np.asarray(log_probs)
    if (
        said.ndim and not (said <= 1e-4).all()
    ):  # NaN is not, either; rounding may leave a log-prob just above 0
        raise DataError(f"{who} has log-probs above 0, or that are no numbers")
    finish: FinishReason = "stop" if int(ids[-1]) in ends else "length"
    return Completion(
        request_id=f"given/{prompt.prompt_id}",
        prompt_ids=prompt.token_ids,
        token_ids=ids.astype(np.int32),
        log_probs=np.full(ids.shape, log_probs, np.float32),
        policy_versions=np.full(ids.shape, versions, np.int32),
        finish_reason=finish,
        images=prompt.images,
    )


def _answer(prompt: Prompt, text: str, stream: PromptStream, who: str) -> np.ndarray:
    """Returns the tokens of an answer that is text, up to the end of the assistant's turn."""
    ids, start = np.empty(0, np.int32), len(prompt.token_ids)
    if prompt.messages:
        shown = tuple(ImagePart(image.turn, None) for image in prompt.images)
        answered = Conversation((*prompt.messages, {"role": "assistant", "content": text}), images=shown)
        answered = answered._replace(messages=answered.for_template())
        ((ids, _),) = encode_conversations(stream.tokenizer, [answered], [prompt.fields.get("tools")])
        if prompt.images and stream.images is not None:
            reads = stream.images.reads
            (ids,) = with_images([ids], [reads.ids(image.grid) for image in prompt.images], reads.token)
    if not np.array_equal(ids[:start], prompt.token_ids):
        raise DataError(
            f"{who}: prompt {prompt.prompt_id!r}: an answer as text needs a prompt of messages, "
            "before which the chat template writes the same with an answer and without; give its token ids"
        )
    return ids[start:]
