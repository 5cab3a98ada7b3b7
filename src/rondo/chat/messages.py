"""The one reader of conversations: of requests, prompts, demonstrations and pairs, in the form that OpenAI's
clients write. What has no meaning in them is refused by name.

A message that was read has a role, a content that is text, and what else the role knows: calls of tools with
their arguments as objects, which is what chat templates print.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rondo.chat.strict_json import JsonError, read_json
from rondo.chat.template_keys import TemplateKeys
from rondo.core.errors import DataError
from rondo.core.images import MARK

Message = Mapping[str, Any]
Messages = tuple[Message, ...]

FLAGS = ("weight", "loss_mask", "trainable")
"""What other programs call it whether a message is learnt: 0, 1, false or true."""
_OF_ALL = ("role", "content", "name")
_OF_ROLE = {"assistant": ("tool_calls",), "tool": ("tool_call_id",)}
_SHOWN = ("image", "image_url", "url", "path", "bytes")
"""The keys under which a part that is an image says which one, in everybody's data."""
_CALL = "must be {id, type: function, function: {name, arguments}}"


class MessageError(DataError):
    """What is wrong with a message, and where in the list: path is ("0", "content", "1", "type")."""

    def __init__(self, path: Sequence[str | int], problem: str, code: str = "invalid_type") -> None:
        where = f"message {'.'.join(map(str, path))} " if path else ""
        super().__init__(where + problem)
        self.path = tuple(path)
        self.problem = problem
        self.code = code
        """OpenAI's word for it."""


class ImagePart(NamedTuple):
    """An image of a conversation."""

    place: int
    """The message that it is in, from 0."""
    value: Any
    """What says which one it is: a path, a URL, bytes, a mapping; None: the row's column of images."""


class Conversation(NamedTuple):
    """Messages, and which of the assistant's are not to be learnt, by their places."""

    messages: Messages
    """The messages, oldest first."""
    unlearnt: frozenset[int] = frozenset()
    """The places of the assistant's messages that are not to be learnt."""
    images: tuple[ImagePart, ...] = ()
    """What MARK stands for in the texts, in their order."""

    def behind(self, system: str | None) -> Conversation:
        """Puts `system` in front of a conversation that has no system message of its own."""
        messages = as_messages(self.messages, system)
        added = len(messages) - len(self.messages)
        return Conversation(
            messages,
            frozenset(place + added for place in self.unlearnt),
            tuple(image._replace(place=image.place + added) for image in self.images),
        )

    def for_template(self) -> Messages:
        """Returns the messages as templates of models that read images want them: a text with images is a
        list of parts.
        """
        if not self.images:  # most
            return self.messages
        shown = {image.place for image in self.images}
        return tuple(
            {**message, "content": _parts(message["content"])} if place in shown else message
            for place, message in enumerate(self.messages)
        )


@dataclass(frozen=True)
class MessageReader:
    """How messages are read."""

    template: TemplateKeys = field(default_factory=TemplateKeys)
    """Keys that the chat template reads beside those that a role knows."""
    ignored: frozenset[str] = frozenset()
    """Keys that are left out."""
    takes_flags: bool = False
    """Whether the assistant's messages may say that they are not learnt."""
    takes_broken_arguments: bool = False
    """Whether arguments may be text that is no JSON, which the template prints as it is."""
    takes_images: bool = False
    """Whether messages of others than the assistant may have images: parts, and MARK in a text."""

    def read(self, given: Any) -> Conversation:
        """Reads a list of messages. Raises MessageError."""
        if not isinstance(given, Sequence) or isinstance(given, str | bytes):
            raise MessageError(
                (), f"messages must be a list of mappings, got {type(given).__name__}: {given!r:.80}"
            )
        messages = []
        unlearnt = set()
        images: list[ImagePart] = []
        for place, message in enumerate(given):
            read, is_learnt = self._message(message, place, images)
            messages.append(read)
            if not is_learnt:
                unlearnt.add(place)
        return Conversation(tuple(messages), frozenset(unlearnt), tuple(images))

    def _message(self, given: Any, place: int, images: list[ImagePart]) -> tuple[Message, bool]:
        """Reads a message; its images are added to those of the messages before it."""
        if not isinstance(given, Mapping):
            raise MessageError(
                (place,), f"must be a valid dictionary with role and content, got {type(given).__name__}"
            )
        if len(given) == 2 and type(given.get("role")) is str and type(given.get("content")) is str:
            if self.takes_images and given["role"] != "assistant":
                images += [ImagePart(place, None)] * given["content"].count(MARK)
            return given, True  # most are no more
        # Null and empty fields (a client's `refusal`, `annotations`; those that Arrow adds) say nothing.
        said = {
            key: value
            for key, value in given.items()
            if key not in self.ignored
            and value is not None
            and not (isinstance(value, list | dict) and not value)
        }
        role = said.get("role")
        if role is None:
            there = f"(system, user, assistant, tool); there is {', '.join(map(str, said))}"
            raise MessageError((place, "role"), f"is missing {there}", "missing")
        if not isinstance(role, str):
            raise MessageError((place, "role"), f"must be a valid string, got {role!r:.40}")
        is_learnt = self._flag(said, role, place)
        self._check_keys(said, role, place)
        if "tool_calls" in said:
            calls, path = said["tool_calls"], (place, "tool_calls")
            if not isinstance(calls, list):
                raise MessageError(path, f"must be a valid list, got {calls!r:.40}")
            said["tool_calls"] = [self._call(call, (*path, i)) for i, call in enumerate(calls)]
            said.setdefault("content", "")
        if "content" not in said:
            raise MessageError((place, "content"), "is missing", "missing")
        takes_images = self.takes_images and role != "assistant"
        said["content"], shown = _text(said["content"], (place, "content"), takes_images=takes_images)
        images += [ImagePart(place, value) for value in shown]
        for key in ("name", "tool_call_id"):
            if not isinstance(said.get(key, ""), str):
                raise MessageError((place, key), f"must be a valid string, got {said[key]!r:.40}")
        return said, is_learnt

    def _check_keys(self, said: Mapping[str, Any], role: str, place: int) -> None:
        known = (*_OF_ALL, *_OF_ROLE.get(role, ()))
        for key in said:
            if not isinstance(key, str) or (key not in known and not self.template.reads(key)):
                raise MessageError(
                    (place, str(key)),
                    f"has no meaning in a message of role {role!r}, and the chat template does not read it",
                    "unknown_parameter",
                )

    def _flag(self, said: dict[str, Any], role: str, place: int) -> bool:
        """Takes the flags out of a message; says whether it is learnt."""
        found = {key: said.pop(key) for key in FLAGS if key in said and not self.template.reads(key)}
        for key, value in found.items():
            if value not in (0, 1):  # True and 1.0 are 1
                raise MessageError(
                    (place, key), f"must be 0 or 1 (or false, true), got {value!r:.40}", "invalid_value"
                )
        if len(set(map(bool, found.values()))) > 1:
            words = ", ".join(f"{key}: {value}" for key, value in found.items())
            raise MessageError(
                (place,), f"says both that it is learnt and that it is not ({words})", "invalid_value"
            )
        for key, value in found.items():
            if not self.takes_flags:
                problem = "says whether a message is learnt, and nothing of it is learnt here"
                raise MessageError((place, key), problem, "unknown_parameter")
            if value and role != "assistant":
                problem = f"asks to learn a message of the role {role!r}; only the assistant's are learnt"
                raise MessageError((place, key), problem, "invalid_value")
        return all(found.values())

    def _call(self, given: Any, path: tuple[str | int, ...]) -> Message:
        """Reads a tool call; its arguments become an object. {name, arguments} alone is read, too."""
        if not isinstance(given, Mapping):
            raise MessageError(path, _CALL)
        call = {key: value for key, value in given.items() if value is not None}
        inner = call.get("function", call)
        name = inner.get("name") if isinstance(inner, Mapping) else None
        arguments = inner.get("arguments") if isinstance(inner, Mapping) else None
        if (
            not isinstance(name, str)
            or not isinstance(arguments, str | Mapping | None)
            or not isinstance(call.get("id", ""), str)
            or call.get("type", "function") != "function"
        ):
            raise MessageError(path, _CALL)
        read = {"type": "function", "function": {"name": name, "arguments": self._arguments(arguments, path)}}
        return {**read, "id": call["id"]} if "id" in call else read

    def _arguments(self, given: str | Mapping[str, Any] | None, path: tuple[str | int, ...]) -> Any:
        if given is None or isinstance(given, Mapping):
            return dict(given or {})
        try:
            read = read_json(given or "{}")
            if isinstance(read, dict) or self.takes_broken_arguments:
                return read
            problem = f"a {type(read).__name__}"
        except JsonError as error:
            if self.takes_broken_arguments:
                return given
            problem = f"no JSON ({error})"
        raise MessageError(
            (*path, "function", "arguments"),
            f"must be an object or its JSON text, and is {problem}: {given!r:.80}",
        )


def _text(content: Any, path: tuple[str | int, ...], *, takes_images: bool) -> tuple[str, list[Any]]:
    """Returns a content as text: parts are joined, and MARK stands for one that is an image; and what says
    which image each MARK is, None where nothing does.
    """
    if isinstance(content, str):
        return content, [None] * (content.count(MARK) * takes_images)
    if not isinstance(content, list):
        raise MessageError(path, f"must be a string or a list of parts, got {content!r:.40}")
    texts, images = [], []
    for i, part in enumerate(content):
        said = (
            {key: value for key, value in part.items() if value is not None}
            if isinstance(part, Mapping)
            else {}
        )
        kind = said.pop("type", None)
        if takes_images and kind in ("image", "image_url"):
            texts.append(MARK)
            images.append(_image_of(said, (*path, i)))
            continue
        if kind != "text":
            others = "sound, films and files" if takes_images else "pictures, sound and files"
            raise MessageError(
                (*path, i, "type"),
                f"must be 'text', got {kind!r:.40}: {others} are not read",
                "unsupported_value",
            )
        if not isinstance(said.get("text"), str):
            raise MessageError((*path, i, "text"), f"must be a valid string, got {said.get('text')!r:.40}")
        for key in said.keys() - {"text"}:
            raise MessageError(
                (*path, i, str(key)), "has no meaning in a part that is text", "unknown_parameter"
            )
        texts.append(said["text"])
        images += [None] * (said["text"].count(MARK) * takes_images)
    return "".join(texts), images


def _image_of(said: Mapping[str, Any], path: tuple[str | int, ...]) -> Any:
    """Returns what a part says of its image; None where it is the row's next one. said: without its type."""
    for key in said:
        if key not in _SHOWN:
            raise MessageError(
                (*path, str(key)), "has no meaning in a part that is an image", "unknown_parameter"
            )
    if len(said) > 1 and said.keys() != {"bytes", "path"}:
        raise MessageError(path, f"says twice which image it is: {', '.join(said)}", "invalid_value")
    if "bytes" in said or not said:
        return dict(said) or None
    (value,) = said.values()
    if isinstance(value, Mapping) and "url" in value:  # OpenAI's form
        for key, one in value.items():
            if key != "url" and (key, one) != ("detail", "auto") and one is not None:
                raise MessageError(
                    (*path, "image_url", str(key)),
                    f"is {one!r:.40}: model.images says how large images are",
                    "unsupported_value",
                )
        return value["url"]
    return value


def _parts(text: str) -> list[Mapping[str, str]]:
    """Returns a text with images as parts."""
    parts: list[Mapping[str, str]] = []
    for i, between in enumerate(text.split(MARK)):
        parts += [{"type": "image"}] * (i > 0)
        parts += [{"type": "text", "text": between}] * bool(between)
    return parts


def as_messages(prompt: str | Messages, system: str | None = None) -> Messages:
    """Makes a string one user message; messages are those that were read. `system` goes in front of messages
    that have no system message of their own.
    """
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
    if system is None or any(message["role"] == "system" for message in messages):
        return messages
    return ({"role": "system", "content": system}, *messages)
