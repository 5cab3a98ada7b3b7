"""What is a secret, and what stands in its place."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from rondo.config.keys import schema_keys
from rondo.core import errors
from rondo.core.errors import ConfigError, RondoError, WorkerError
from rondo.core.masking import (
    digest,
    is_secret,
    masked,
    masked_settings,
    masked_urls,
    warn_of_open_way,
    was_masked,
)

SECRETS = (
    *("key", "token", "password", "secret", "api_key", "judge_api_key", "hf_token", "db_password"),
    *("client_secret", "Token", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"),
)
OTHERS = (
    "max_tokens",
    "prompt_key",
    "keys",
    "tokens",
    "tokenizer",
    "key_value",
    "secrets",
    "passwords",
    "sort_key",
)


@pytest.mark.parametrize(("name", "expected"), [*((n, True) for n in SECRETS), *((n, False) for n in OTHERS)])
def test_names_of_secrets(name: str, expected: bool) -> None:
    assert is_secret(name) is expected


def test_no_key_of_the_schema_is_called_as_a_secret() -> None:
    """So that names alone decide, where a record of a run is compared."""
    assert [key for key in schema_keys() if any(map(is_secret, key.split(".")))] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://u:p@h:1/x?k=v", "http://***@h:1/x?***"),
        ("https://ghp_1@h/x", "https://***@h/x"),  # a token may be all of the user part
        ("https://h/x?download", "https://h/x?***"),
        ("see <http://u:p@h>, or `https://h?a=b`.", "see <http://***@h>, or `https://h?***`."),
        ("at http://u:p@h/x?k=v: gone (https://h?a=b)", "at http://***@h/x?***: gone (https://h?***)"),
        ("sqlite:///x.db?cipher=c and postgres://u:p@h/db", "sqlite:///x.db?*** and postgres://***@h/db"),
        ("HTTPS://U:P@H/", "HTTPS://***@H/"),
        (
            "http://proxy/http://u:p@h and http://a/b,http://u:p@h/c",
            "http://proxy/http://***@h and http://a/b,http://***@h/c",
        ),
        ("1http://tok@h and git+https://tok@h", "1http://***@h and git+https://***@h"),
        # No secrets: a container, a user's name, a pattern, an address in a path, nothing at all.
        ("abfs://box@account/x", "abfs://box@account/x"),
        ("sftp://bob@h/x", "sftp://bob@h/x"),
        ("s3://b/part-?.parquet", "s3://b/part-?.parquet"),
        ("https://h/a@b", "https://h/a@b"),
        ("what? a@b: c://", "what? a@b: c://"),
        ("", ""),
    ],
)
def test_urls_in_a_text(text: str, expected: str) -> None:
    assert masked_urls(text) == masked_urls(expected) == expected
    kept = masked_urls(text, digest)
    assert masked_urls(kept, digest) == kept == masked_urls(kept)
    assert was_masked(kept) == (expected != text)
    assert re.sub("masked-[0-9a-f]{8}", "***", kept) == expected


def test_options_at_any_depth() -> None:
    variable = {"env": "JUDGE_KEY"}
    options: dict[str, Any] = {
        "api_key": "sk-1",
        "token": variable,
        "secret": ["a", {"b": "c", "n": 3}],
        "db_password": {"env": "sk-1"},
        "key": "",
        "password": None,
        "of": {"name": "user", "api_key": "sk-1", "tries": [{"token": "sk-1"}]},
        "max_tokens": 3,
        "url": "http://u:p@h",
    }
    found = masked("options", options)
    one = digest("sk-1")
    assert found == {
        "api_key": one,
        "token": variable,
        "secret": [digest("a"), {"b": digest("c"), "n": 3}],
        "db_password": {"env": one},
        "key": "",
        "password": None,
        "of": {"name": "user", "api_key": one, "tries": [{"token": one}]},
        "max_tokens": 3,
        "url": f"http://{digest('u:p')}@h",
    }
    assert masked("options", found) == found
    assert one != digest("sk-2")
    assert re.fullmatch("masked-[0-9a-f]{8}", one)


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("reward.functions.0.api_key=sk-1", "reward.functions.0.api_key=***"),
        ("x=[{name: f, api_key: sk-1, max_tokens: 3}]", "x=[{name: f, api_key: ***, max_tokens: 3}]"),
        ("x=[{'token': 'sk 1', 'prompt_key': 'a'}]", "x=[{'token': ***, 'prompt_key': 'a'}]"),
        ('x={"password": "a"}', 'x={"password": ***}'),
        ("x.api_key={env: JUDGE_KEY}", "x.api_key={env: JUDGE_KEY}"),
        ("x={'api_key': {'env': 'JUDGE_KEY'}}", "x={'api_key': {'env': 'JUDGE_KEY'}}"),
        ("x.api_key={env: sk-1}", "x.api_key={env: ***}"),
        ("x={'api_key': {'env': 'sk-1'}}", "x={'api_key': {'env': ***}}"),
        ("data.train.0.path=https://u:p@h?k=v", "data.train.0.path=https://***@h?***"),
        ("rollout.max_tokens=5", "rollout.max_tokens=5"),
        ("data.train.0.prompt_key=question", "data.train.0.prompt_key=question"),
    ],
)
def test_arguments_as_messages_show_them(argument: str, shown: str) -> None:
    assert masked_settings(argument) == shown


KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, RondoError)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_error_has_a_password_of_a_url(kind: type[RondoError]) -> None:
    text = "http://u:p@h/x?key=k cannot be reached"
    error = WorkerError("actor", 0, "load", text, f"OSError: {text}") if kind is WorkerError else kind(text)
    assert "http://***@h/x?*** cannot be reached" in str(error)
    assert "u:p" not in str(error)
    assert "key=k" not in str(error)
    assert str(ConfigError.of([ConfigError(text), ConfigError("b")])).splitlines()[1] == "b"


@pytest.mark.parametrize(
    ("url", "open_"),
    [
        ("http://10.0.0.3:8000/v1", True),
        ("http://u:p@judge/v1", True),
        *(
            (url, False)
            for url in ("http://localhost:1", "http://127.0.0.2/v1", "http://[::1]:8/v1", "https://h")
        ),
    ],
)
def test_a_key_on_an_open_way_is_said_once(url: str, open_: bool, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        warn_of_open_way("a.url", url, key=True)
    said = "the key goes there unencrypted, as all that is said: use https://"
    assert caplog.messages == [f"a.url: {masked_urls(url)}: {said}"] * open_
    warn_of_open_way("b.url", url, key=False)
    assert len(caplog.messages) == open_ + ("@" in url)  # it has one itself
