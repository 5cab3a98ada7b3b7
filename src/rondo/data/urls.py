"""Files at a URL (s3://…, gs://…, hdfs://…, https://…), which fsspec reads: with the credentials and settings
that its packages take from the environment, or from ~/.config/fsspec.
"""

from __future__ import annotations

import io
import re
from typing import Any

import fsspec

from rondo.errors import ConfigError

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
# What fsspec needs besides itself.
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "az": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
}


def is_url(path: str) -> bool:
    """Says whether a path is one."""
    return _URL.match(path) is not None


def check_url(url: str) -> None:
    """Raises ConfigError where there is no such file, or nothing that could read it."""
    _asked(url, lambda files, path: files.info(path))


def fetched(url: str) -> io.BytesIO:
    """Returns what a file holds. Raises ConfigError as `check_url`."""
    return io.BytesIO(_asked(url, lambda files, path: files.cat_file(path)))


def _asked(url: str, ask: Any) -> Any:
    """Returns what `ask` does, of the file system of a URL and the path there."""
    found = _URL.match(url)
    assert found is not None
    protocol = found[1]
    try:
        return ask(*fsspec.core.url_to_fs(url))
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        remedy = f"pip install {package}" if package else str(error)
        raise ConfigError(f"{url}: {protocol}:// needs a package that is not installed: {remedy}") from error
    except FileNotFoundError as error:
        raise ConfigError(f"{url}: there is no such file") from error
    except Exception as error:  # each package has its own errors, of credentials and of the network
        raise ConfigError(f"{url} cannot be read: {type(error).__name__}: {error}") from error
