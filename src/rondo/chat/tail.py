"""Renders the end of a conversation without its beginning, for templates in which that is the same text.

A template goes through the messages in a loop. Here the loop passes over those that are not wanted; all else
of the template runs as it is written, with all messages. What follows is then what the whole text ends with:

- An iteration leaves nothing behind but its text: Jinja keeps names that are set in a loop inside of it, and
  templates whose loop writes into a namespace, ends itself (`break`) or remembers (`loop.cycle`,
  `loop.changed`, cyclers) are rendered whole, as are those that catch the loop's text (`set`, `filter`,
  `macro`) and may make something else of it.
- What the loop knows of its place (`loop.index0`, `loop.first`, …) counts those that were passed over.
- The text has a mark where the loop was passed over: what was left out stood there, before all that is
  behind the mark. The loop must go through the very messages, up to the last one, or nothing is passed over.

Not proven is that the iterations left out would have raised nothing, and written nothing that is looked for
behind them. `continuation` leaves out what has been written before, and renders a sample whole all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.nodes as nodes
import jinja2.visitor

from rondo.chat.encode import as_template_reads, with_image_text
from rondo.chat.messages import Message
from rondo.chat.options import template_options
from rondo.core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAIL = "rondo_tail"
"""The name by which a changed template knows its `_Tail`."""
_NOT_NAMED = ("cycler", "joiner", _TAIL)
_ELSEWHERE = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block, nodes.ExprStmt)
# Attributes of `loop` that count from the end, and those that are right from the second iteration on.
_SAME = ("last", "revindex", "revindex0", "nextitem", "previtem")


class _Tail:
    """What a rendering passes over."""

    def __init__(self, messages: Sequence[Message], first: int, mark: str) -> None:
        self._messages = messages
        self._first = first
        self._mark = mark
        self.rest: Any = ()
        self.skipped = 0
        self.loops = 0

    def begin(self, items: Any) -> str:
        """Takes what a loop goes through. Returns the mark where some of it is passed over."""
        kept = len(self._messages) - self._first
        self.skipped = len(items) - kept if isinstance(items, list) else 0
        if self.skipped <= 0 or any(
            a is not b for a, b in zip(items[-kept:], self._messages[-kept:], strict=True)
        ):
            self.rest, self.skipped = items, 0
            return ""
        self.rest = items[-kept:]
        self.loops += 1
        return self._mark


class TailTemplate:
    """A template whose loop can pass over messages: see `tail_template`."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: jinja2.Template, variables: Mapping[str, Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._variables = variables

    def render(self, messages: list[Message], tools: Any, *, first: int, marker: str) -> str | None:
        """Returns what stands behind the marker in the rendered conversation, ready for an answer, without
        what the messages before `first` write. None: that cannot be told, or the marker is not there exactly
        once. Raises DataError where the template raises, which with a whole conversation it may not.

        marker: a text that one of the messages from `first` on has.
        """
        passed = f"before {marker}"
        read = as_template_reads(self._tokenizer, messages, tools)
        tail = _Tail(read, first, passed)
        try:
            text = self._template.render({**self._variables, "messages": read, "tools": tools, _TAIL: tail})
        except Exception as error:  # a template is code, and may raise anything at what it does not expect
            raise DataError(f"the chat template refuses the end of a conversation: {error}") from error
        before, _, end = text.partition(passed)
        if tail.loops != 1 or marker in before or end.count(marker) != 1:
            return None
        return with_image_text(self._tokenizer, end.partition(marker)[2], messages)


def tail_template(tokenizer: PreTrainedTokenizerBase, tools: Any) -> TailTemplate | None:
    """Returns the tokenizer's template for a conversation with these tools; None where conversations have to
    be rendered whole.
    """
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    if (
        compile_template is None  # of another version of transformers
        or type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
    ):
        return None
    text = tokenizer.get_chat_template(None, tools)
    environment: jinja2.Environment = compile_template(text).environment
    tree = environment.parse(text)
    if any(tree.find_all(_ELSEWHERE)) or any(name.name in _NOT_NAMED for name in tree.find_all(nodes.Name)):
        return None
    if any(any(macro.find_all(nodes.NSRef)) for macro in tree.find_all(nodes.Macro)):
        return None
    tree.body = _changed(tree.body)
    if not any(name.name == _TAIL for name in tree.find_all(nodes.Name)):
        return None
    tree.set_environment(environment)
    template = environment.template_class.from_code(
        environment, environment.compile(tree), environment.make_globals(None)
    )
    variables = {
        **tokenizer.special_tokens_map,
        **template_options(tokenizer),
        "documents": None,
        "add_generation_prompt": True,
    }
    return TailTemplate(tokenizer, template, variables)


def _changed(body: Sequence[nodes.Node]) -> list[nodes.Node]:
    """Rewrites the loops in these statements, and in those below an `if`."""
    changed: list[nodes.Node] = []
    for statement in body:
        if isinstance(statement, nodes.If):
            statement.body = _changed(statement.body)
            _changed(statement.elif_)  # conditions: nothing is put before them
            statement.else_ = _changed(statement.else_)
        elif isinstance(statement, nodes.For) and _leaves_nothing(statement):
            begin = nodes.Call(_of_tail("begin"), [statement.iter], [], None, None)
            changed.append(nodes.Output([begin]).set_lineno(statement.lineno))
            statement.iter = _of_tail("rest")
            statement.body = [_LoopPlaces().visit(one) for one in statement.body]
        elif isinstance(statement, nodes.For):
            _end_search(statement)
        changed.append(statement)
    return changed


def _end_search(loop: nodes.For) -> None:
    """Ends a loop where it has found what it looks for, so that it need not go to the end:

    {% for … %}{% set … %}{% if ns.looks and … %}{% set ns.looks = false %}…{% endif %}{% endfor %}

    It writes no text, and what it leaves behind it writes under the condition, which is false from then on.
    """
    ifs = [one for one in loop.body if isinstance(one, nodes.If)]
    others = [one for one in loop.body if not isinstance(one, nodes.If)]
    if len(ifs) != 1 or loop.else_ or loop.recursive or ifs[0].elif_ or ifs[0].else_:
        return
    flag = ifs[0].test
    while isinstance(flag, nodes.And):
        flag = flag.left
    if not isinstance(flag, nodes.Getattr) or not isinstance(flag.node, nodes.Name):
        return
    ended = [
        nodes.Assign(nodes.NSRef(flag.node.name, flag.attr), nodes.Const(False)),
        *(one for one in ifs[0].body if isinstance(one, nodes.Assign)),
    ]
    names = [one.name for one in loop.find_all(nodes.Name) if one.ctx == "store"]
    if (
        ended[0] in ended[1:]
        and all(one == ended[0] for one in ended[1:] if one.target == ended[0].target)
        and len(ended) == len(ifs[0].body) + 1
        and all(isinstance(one, nodes.Assign) and isinstance(one.target, nodes.Name) for one in others)
        and flag.node.name not in names
    ):
        name = nodes.Name(flag.node.name, "load")
        found = nodes.Not(nodes.Getattr(name, flag.attr, "load"))
        loop.body.insert(0, nodes.If(found, [nodes.Break()], [], []))


def _leaves_nothing(loop: nodes.For) -> bool:
    """Says whether a loop's iterations have no effect but their text, and ask `loop` only for what is known
    without the skipped ones.
    """
    if loop.recursive or any(loop.find_all(nodes.NSRef)) or _breaks(loop.body):
        return False
    places = _LoopPlaces()
    for statement in loop.body:
        places.look(statement)
    return places.known and not (loop.test is not None and places.counts)


def _breaks(body: Sequence[nodes.Node]) -> bool:
    """Says whether a loop with this body may end early; loops in it may."""
    return any(
        isinstance(one, nodes.Break)
        or _breaks(one.else_ if isinstance(one, nodes.For) else list(one.iter_child_nodes()))
        for one in body
    )


class _LoopPlaces(jinja2.visitor.NodeTransformer):
    """Rewrites what a loop's body asks of `loop` so that skipped iterations are counted. `look` changes
    nothing: it finds whether all that is asked can be answered (`known`), and whether any of it counts
    iterations (`counts`).
    """

    def __init__(self) -> None:
        self.known = True
        self.counts = False

    def look(self, node: nodes.Node) -> None:
        """Goes through a statement."""
        if isinstance(node, nodes.For):  # in it, `loop` is its own
            self.look(node.iter)
            return
        if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) and node.node.name == "loop":
            self.counts |= node.attr in ("index0", "index", "first", "length")
            self.known &= node.attr in ("index0", "index", "first", "length", *_SAME)
            return
        if isinstance(node, nodes.Name) and node.name == "loop":
            self.known = False
        for child in node.iter_child_nodes():
            self.look(child)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        node.iter = self.visit(node.iter)
        return node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:  # noqa: N802
        if not (isinstance(node.node, nodes.Name) and node.node.name == "loop"):
            self.generic_visit(node)
            return node
        if node.attr in ("index0", "index", "length"):
            return nodes.Add(node, _of_tail("skipped"))
        if node.attr == "first":
            index = nodes.Add(nodes.Getattr(node.node, "index0", "load"), _of_tail("skipped"))
            return nodes.Compare(index, [nodes.Operand("eq", nodes.Const(0))])
        return node


def _of_tail(name: str) -> nodes.Expr:
    return nodes.Getattr(nodes.Name(_TAIL, "load"), name, "load")
