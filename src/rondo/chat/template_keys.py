"""Which keys of a message a chat template reads: what it does not read, the model does not see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jinja2.nodes as nodes

from rondo.chat.options import in_templates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WHOLE = ("items", "keys", "values")
"""Methods of a mapping that read all its keys."""
_PRINTING = ("tojson", "string", "pprint", "join")
"""Filters that print what they are given."""
_READING_NOTHING = (
    nodes.Test,
    nodes.Compare,
    nodes.Operand,
    nodes.Assign,
    nodes.Keyword,
    nodes.If,
    nodes.Not,
)


@dataclass(frozen=True)
class TemplateKeys:
    """What a template names as keys of anything, which may be a message."""

    names: frozenset[str] = frozenset()
    """The names that it reads as keys."""
    reads_all: bool = False
    """Whether it prints whole messages, or computes which key it reads."""

    def reads(self, key: str) -> bool:
        """Says whether the template may read a key of this name."""
        return self.reads_all or key in self.names


def template_keys(tokenizer: PreTrainedTokenizerBase) -> TemplateKeys:
    """Finds the keys in the tokenizer's chat template (several: in any of them); none without a template.

    Raises ConfigError for a template that cannot be parsed.
    """
    names: set[str] = set()
    reads_all = False
    for found in in_templates(tokenizer, _Keys):
        names |= found.names
        reads_all |= found.reads_all
    return TemplateKeys(frozenset(names), reads_all)


class _Keys:
    """Walks through one template."""

    def __init__(self, template: nodes.Template) -> None:
        self.names: set[str] = set()
        self.reads_all = False
        self._messages = _stand_for_messages(template)
        self._walk(template)

    def _walk(self, node: nodes.Node) -> None:
        for child in node.iter_child_nodes():
            if self._is_message(child):
                self.reads_all |= not self._reads_by_name(child, node)
            elif _is_list(child) and isinstance(node, nodes.Output | nodes.Filter):
                self.reads_all |= not isinstance(node, nodes.Filter) or node.name in _PRINTING
            self._walk(child)
        if isinstance(node, nodes.Getattr):
            self.names.add(node.attr)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            self.names.add(node.value)  # message['key'], 'key' in message, message.get('key')

    def _is_message(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.ctx == "load" and node.name in self._messages
        return _is_item(node)

    def _reads_by_name(self, message: nodes.Node, user: nodes.Node) -> bool:
        """Says whether what a message stands in reads keys that stand in the template, or none."""
        if isinstance(user, nodes.Getattr):
            return user.attr not in _WHOLE
        if isinstance(user, nodes.Getitem):
            return user.node is not message or isinstance(user.arg, nodes.Const)
        if isinstance(user, nodes.Call):  # of a macro, which is walked through itself
            return user.node is not message and isinstance(user.node, nodes.Name)
        return isinstance(user, _READING_NOTHING)


def _is_list(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name.endswith("messages")


def _is_item(node: nodes.Node) -> bool:
    """Says whether an expression is one item of a list (messages[0]), and no slice."""
    return isinstance(node, nodes.Getitem) and _is_list(node.node) and not isinstance(node.arg, nodes.Slice)


def _stand_for_messages(template: nodes.Template) -> frozenset[str]:
    """Returns the names that loops and assignments give to a message."""
    return frozenset({"message", *_loop_names(template), *_other_names(template)})


def _loop_names(template: nodes.Template) -> Iterator[str]:
    for loop in template.find_all(nodes.For):
        of_messages = any(_is_list(name) for name in loop.iter.find_all(nodes.Name)) or _is_list(loop.iter)
        if of_messages and isinstance(loop.target, nodes.Name):
            yield loop.target.name


def _other_names(template: nodes.Template) -> Iterator[str]:
    for assigned in template.find_all(nodes.Assign):
        if isinstance(assigned.target, nodes.Name) and _is_item(assigned.node):
            yield assigned.target.name
