"""Options of a chat template (`enable_thinking`, `reasoning_effort`, …): variables that it reads besides the
conversation. They travel as an attribute of the tokenizer, like the template itself, so that every
rendering of a conversation uses the same ones.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes

from rondo.chat.trial import Generation
from rondo.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

# What transformers puts into a template by itself, besides the conversation and the special tokens.
_FUNCTIONS = ("raise_exception", "strftime_now")


def template_options(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any]:
    """Returns the options with which the tokenizer's template is rendered."""
    options: Mapping[str, Any] = getattr(tokenizer, "chat_template_options", {})
    return options


def check_template_options(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError for a template that cannot be parsed, or an option that is no variable of it."""
    options = template_options(tokenizer)
    variables = template_variables(tokenizer) if tokenizer.chat_template is not None else set()
    if options and tokenizer.chat_template is None:
        raise ConfigError(
            "model.chat_template_options is set, but the tokenizer has no chat template; set "
            "model.chat_template to a Jinja file, or remove the options",
            key="model.chat_template_options",
        )
    for name in options:
        if name not in variables:
            known = f"it reads {', '.join(sorted(variables))}" if variables else "it reads none"
            raise ConfigError(
                f"model.chat_template_options: the chat template has no variable {name!r} ({known})"
                f"{did_you_mean(name, variables)}",
                key=f"model.chat_template_options.{name}",
            )


def template_variables(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Returns the variables that the template reads and that only the user can set; where there are several
    templates (tool use), those of all.
    """
    given = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages"}
    given |= {*tokenizer.special_tokens_map, *tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
    found: set[str] = set()
    for variables in in_templates(tokenizer, jinja2.meta.find_undeclared_variables):
        found |= variables
    return found - given


def template_error(problem: str) -> ConfigError:
    """Returns the error of a chat template that cannot be used."""
    return ConfigError(f"model.chat_template: {problem}", key="model.chat_template")


def in_templates(
    tokenizer: PreTrainedTokenizerBase, find: Callable[[jinja2.nodes.Template], T]
) -> Iterator[T]:
    """Yields what is found in each of the tokenizer's chat templates (none, one, or one for each use). Raises
    ConfigError for one that cannot be parsed.
    """
    template = tokenizer.chat_template
    if template is None:
        return
    for text in template.values() if isinstance(template, dict) else [template]:
        try:
            found = _found(find, text)
        except jinja2.TemplateSyntaxError as error:
            problem = f"line {error.lineno} of the template cannot be parsed: {error.message}"
            raise template_error(problem) from error
        except RecursionError as error:
            problem = "its expressions or blocks are nested too deep; take another one"
            raise template_error(f"the template cannot be parsed: {problem}") from error
        yield found


@functools.lru_cache(maxsize=64)
def _found(find: Callable[[jinja2.nodes.Template], T], text: str) -> T:
    """Kept: each tokenizer that is opened is checked, and a run opens several with one template."""
    environment = jinja2.Environment(extensions=[Generation, jinja2.ext.loopcontrols])
    environment.globals.update(dict.fromkeys(_FUNCTIONS))
    return find(environment.parse(text))
