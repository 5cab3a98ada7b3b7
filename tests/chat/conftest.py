"""The quickstart's tokenizer, also with other chat templates."""

from __future__ import annotations

import pytest

from rondo.recipes.quickstart import CHAT_TEMPLATE, tokenizer


@pytest.fixture(scope="module")
def tok():
    return tokenizer()


@pytest.fixture
def with_template(tok):
    """The tokenizer with another template for one test."""

    def use(template):
        tok.chat_template = template
        return tok

    yield use
    tok.chat_template = CHAT_TEMPLATE
