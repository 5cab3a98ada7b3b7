"""A call's prompt: the key of its conversation, the earlier call that it goes on from, and its tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rondo.chat import Continuation, Message, check_written, encode_piece, render, tokenise_up_to
from rondo.core.errors import ConfigError, DataError, StorageError
from rondo.core.images import MARK, NAME, EpisodeImages, ImageRef, name_of, of_data_url, with_images
from rondo.core.types import InsertedKind, Prompt
from rondo.serving.pictures import MOST_IMAGES, NONE_SENT, SentImages, check_sent
from rondo.serving.problems import ApiError, refuse
from rondo.serving.requests import ApiRequest, ChatRequest, TextRequest, message_key, message_keys
from rondo.serving.sessions import EndpointSession, Key, ModelCall


@dataclass(frozen=True)
class CallPlace:
    """Where a call stands in its session, and the tokens of its prompt."""

    prompt_ids: np.ndarray
    """int32 [P]; of a conversation that is much too long only some (see `tokenise_up_to`)."""
    parent: int | None = None
    """As `ModelCall` has it."""
    inserted: InsertedKind = "environment"
    """As `ModelCall` has it."""
    reencoded: int = 0
    """As `ModelCall` has it."""
    written: int = 0
    """As many messages of the beginning the template has written with what they say."""
    images: tuple[ImageRef, ...] = ()
    """Those that the prompt shows, in the order of their tokens."""


def prompt_key(prompt: Prompt, text: str) -> Key:
    """Returns the key of the conversation that a prompt's token ids stand for: its messages, with the tools
    of its row, or the `text` of a prompt without messages.
    """
    if not prompt.messages:
        return Key.of("text", text)
    tools = prompt.fields.get("tools") or None
    tools = json.loads(tools) if isinstance(tools, str) else tools
    return Key.of("chat", chat_head(tools), *message_keys(prompt.messages))


def conversation_key(asked: ApiRequest, sent: SentImages = NONE_SENT) -> Key:
    """Returns the key of a request's conversation, with its images."""
    if isinstance(asked, ChatRequest):
        keys = list(map(message_key, asked.messages))
        for image in sent.images:
            keys[image.turn] += image.sha256
        return Key.of("chat", chat_head(asked.tools), *keys)
    assert isinstance(asked, TextRequest)
    return Key.of("text", asked.prompt) if isinstance(asked.prompt, str) else Key.of("ids")


def find_place(
    asked: ApiRequest,
    key: Key,
    session: EndpointSession,
    continuation: Continuation,
    limit: int,
    written: int = 0,
    sent: SentImages = NONE_SENT,
) -> Callable[[], CallPlace]:
    """Finds a request's place. key: of its conversation. limit: tokens that a prompt can have. written: as
    many messages of its beginning were rendered in an earlier call, with what they say. sent: its images.

    What is returned makes the tokens, reads nothing of the session, and may run on any thread. It raises
    DataError, ConfigError.
    """
    if isinstance(asked, ChatRequest):
        return _chat_place(asked, key, session, continuation, limit, written, sent)
    assert isinstance(asked, TextRequest)
    prompt, rules, tokenizer = asked.prompt, session.rules, continuation.tokenizer
    if isinstance(prompt, np.ndarray):
        place = CallPlace(prompt, session.extended_ids(prompt))
        return lambda: place
    found = session.extended_text(prompt)
    if found is not None:
        parent, call, new = found
        return lambda: CallPlace(_behind(call, encode_piece(tokenizer, new, limit=limit)), parent)
    if rules is not None and key.says_the_same(rules.key):
        return lambda: CallPlace(rules.prompt_ids, images=rules.images)
    return lambda: CallPlace(tokenise_up_to(tokenizer, prompt, limit, special=True))


def _chat_place(
    asked: ChatRequest,
    key: Key,
    session: EndpointSession,
    continuation: Continuation,
    limit: int,
    written: int,
    sent: SentImages,
) -> Callable[[], CallPlace]:
    tools, rules, tokenizer = asked.tools or None, session.rules, continuation.tokenizer
    if sent.images:
        messages, images = list(asked.said.for_template()), sent.images
    else:
        messages, images = _with_images(asked.messages, session.images)
    shows = sent if sent.images else rules and rules.shows
    token, ids_of = (shows.token, shows.ids) if shows else (-1, None)
    messages = _with_plain_texts(messages, tokenizer, token)

    def expanded(ids: np.ndarray, images: Sequence[ImageRef]) -> np.ndarray:
        if not images or len(ids) > limit:  # what is too long is refused, and only some of it is there
            return ids
        places = int(np.count_nonzero(ids == token))
        if places != len(images):
            roles = ", ".join(dict.fromkeys(str(messages[one.turn]["role"]) for one in images))
            raise DataError(
                f"the chat template wrote {places} places for images where messages of {roles} have "
                f"{len(images)}: set model.chat_template to one that writes them all, where they stand"
            )
        assert ids_of is not None
        return with_images([ids], [ids_of(one.grid) for one in images], token)[0]

    def opening(reencoded: int = 0) -> CallPlace:
        check_written(tokenizer, messages, tools)
        text = render(tokenizer, messages, tools=tools, generation=True)
        prompt_ids = expanded(tokenise_up_to(tokenizer, text, limit, special=False), images)
        return CallPlace(prompt_ids, reencoded=reencoded, written=len(messages), images=images)

    found = session.extended_call(key)
    if found is None:
        if rules is not None and key.says_the_same(rules.key):
            return partial(CallPlace, rules.prompt_ids, written=len(messages), images=rules.images)
        return opening
    parent, call = found
    turn = call.key_length - (len(key) - len(messages)) - 1  # of the answer; a key begins with the tools
    before = [one.grid for one in sent.images if one.turn <= turn]
    if sent.images and before != [one.grid for one in call.completion.images]:
        return opening  # an image that was its conversation's only one has other tokens, in some families
    added, behind = messages[turn + 1 :], tuple(one for one in images if one.turn > turn)
    made = call.completion.token_ids
    last = int(made[-1]) if len(made) else None

    def going_on() -> CallPlace:
        check_written(tokenizer, messages, tools, first=turn + 1)
        new = continuation.encode(
            messages,
            turn,
            tools,
            last_token=last,
            limit=limit,
            written=written,
            is_sample=is_sample(key, len(messages)),
        )
        if new is None:  # then the conversation is a context of its own: exact, in more rows
            return opening(reencoded=len(made))
        # The files of an earlier request's images are gone, and this one has sent them all again.
        shown = sent.images or (*call.completion.images, *behind)
        return CallPlace(
            _behind(call, expanded(new, behind)), parent, _kind_of(added), written=turn, images=shown
        )

    return going_on


def named(messages: Sequence[Message], images: Sequence[ImageRef]) -> tuple[Message, ...]:
    """Returns a prompt's messages with the name of an image in the place of each MARK."""
    told = [dict(message) for message in messages]
    for image in images:
        message = told[image.turn]
        message["content"] = message["content"].replace(MARK, name_of(image), 1)
    return tuple(told)


async def with_names(asked: ChatRequest, session: EndpointSession, shows: EpisodeImages) -> ChatRequest:
    """Keeps the images of an agent's messages, in which their names stand then. Raises ApiError."""
    parts, most = asked.said.images, shows.per_prompt
    check_sent(parts, MOST_IMAGES if most is None else most, fetches=False)
    images = []
    try:
        for number, (place, value) in enumerate(parts):
            content = of_data_url(value, f"image {number}")
            images.append(replace(await asyncio.to_thread(shows.keep, content), turn=place))
    except (ConfigError, DataError) as error:
        raise refuse("messages", str(error), "invalid_image") from error
    except StorageError as error:  # the run's folder is full or gone: no agent can mend that
        session.error = error
        raise ApiError(str(error), code="storage_failed", status=500) from error
    for image in images:
        session.images.setdefault(name_of(image), image)
    messages = list(named(asked.messages, images))
    shown = len(_with_images(messages, session.images)[1])
    if most is not None and shown > most:  # the agent may send fewer: the run does not end
        raise refuse("messages", f"shows {shown} images, and model.images.per_prompt is {most}")
    return asked.model_copy(update={"messages": messages})


def _with_images(
    messages: list[Any], known: Mapping[str, ImageRef]
) -> tuple[list[Any], tuple[ImageRef, ...]]:
    """Returns messages as templates want them, those with images in parts, and the images in their order.
    known: by name; other names are text, and so are those in an answer.
    """
    if not known:  # most
        return messages, ()
    told, images = [], list[ImageRef]()
    for place, message in enumerate(messages):
        parts: list[Mapping[str, str]] = []
        text = ""
        for number, piece in enumerate(NAME.split(message["content"])):
            image = known.get(f"<image:{piece}>") if number % 2 and message["role"] != "assistant" else None
            if image is None:
                text += f"<image:{piece}>" if number % 2 else piece
                continue
            parts += [{"type": "text", "text": text}] * bool(text) + [{"type": "image"}]
            images.append(replace(image, turn=place))
            text = ""
        if parts:
            message = {**message, "content": parts + [{"type": "text", "text": text}] * bool(text)}
        told.append(message)
    return told, tuple(images)


def _with_plain_texts(messages: list[Any], tokenizer: Any, token: int) -> list[Any]:
    """Returns messages in whose texts nothing is read as an image's token: a space stands behind the first
    character of its name. Tools and environments write again what a policy wrote, and pages of the web have
    everything. token: stands for images; -1: the model is given none.
    """
    if token < 0:
        return messages
    words = [str(tokenizer.convert_ids_to_tokens(token)), *(getattr(tokenizer, "image_text", None) or ())[:1]]

    def plain(said: Any) -> Any:
        if isinstance(said, Mapping):  # names and values of a tool call's arguments, too
            return {plain(key): plain(value) for key, value in said.items()}
        if isinstance(said, list):
            return list(map(plain, said))
        if isinstance(said, str):
            for word in words:
                said = said.replace(word, f"{word[0]} {word[1:]}")
        return said

    return [plain(message) for message in messages]


def _behind(call: ModelCall, new: np.ndarray) -> np.ndarray:
    return np.concatenate([call.token_ids, new])


def is_sample(key: Key, num_messages: int) -> bool:
    """Says whether a conversation that could be rendered without its beginning is rendered whole, too. Of
    conversations with n messages 2 in n are, drawn by their digests: any conversation may be one, every run
    has the same ones, and a call costs about two messages more on average.
    """
    return int.from_bytes(key.digests[-1]) % num_messages < 2


def chat_head(tools: Any) -> str:
    """Returns what stands for the tools in a conversation's key."""
    return json.dumps(list(tools or ()) or None, sort_keys=True)


def _kind_of(added: list[Any]) -> InsertedKind:
    """Says who wrote these messages: tool, user or (mixed, anything else) environment."""
    role, *others = {message["role"] for message in added}
    return role if role in ("tool", "user") and not others else "environment"
