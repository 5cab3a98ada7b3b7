"""Files and folders at a URL (s3://…, gs://…, hdfs://…, https://…), which fsspec reads and writes: with the
credentials, retries and other settings that its packages take from the environment, or from ~/.config/fsspec.
No other module asks fsspec.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import ipaddress
import os
import re
import socket
import time
import unicodedata
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from rondo.core.errors import ConfigError, RondoError, StorageError
from rondo.core.masking import masked_urls, was_masked

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
_EXTRAS = {"s3fs": "'rondo-rl[s3]'", "gcsfs": "'rondo-rl[gcs]'"}
_AHEAD = 1 << 23  # bytes that a request reads at least
_STRIDE = 1 << 26  # bytes that go over the network at a time: what a reader or writer holds besides its own

T = TypeVar("T")


def is_url(path: str) -> bool:
    """Says whether a path is one."""
    return _URL.match(path) is not None


def place_of(path: str) -> Place:
    """Returns what a path in a configuration means: something at a URL, or on this machine."""
    return Far(path) if is_url(path) else Path(path).expanduser()


def spelled(place: Place) -> str:
    """Returns what `place_of` reads; the text of a place is for people, and may lack something."""
    return place.url if isinstance(place, Far) else str(place)


def check_inner(name: str) -> None:
    """Raises ValueError for a name, which somebody else gave to a file below a folder, that is no path below
    one: absolute, with a part that is empty, `.` or `..`, or with what no file system or terminal should get
    (control characters, halves of characters, parts of more than 255 bytes).
    """
    parts = name.split("/")
    if not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(f"is called {name!r:.200}, which leads out of its folder")
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in name):
        raise ValueError(f"is called {name!r:.200}, which has control characters")
    if max(len(part.encode()) for part in parts) > 255 or len(name.encode()) > 1024:
        raise ValueError(f"is called {name!r:.80}…, which is too long for a file")


class Size(NamedTuple):
    """What is known of a file without reading it, by the name that `Path.stat` has for it."""

    st_size: int
    """In bytes."""


class Far:
    """A file or folder at a URL, with those verbs of `pathlib.Path` that checkpoints need. Picklable; a file
    system is opened in the process that asks.

    As text it is the URL without a user part and query, which may be secrets.

    Raises FileNotFoundError where there is nothing; StorageError, naming the URL, for whatever else the far
    side or the way to it refuses; ConfigError for a protocol that is unknown, or whose package is missing,
    and for a URL that was masked where a run kept it.
    """

    def __init__(self, url: str) -> None:
        if was_masked(url):
            raise ConfigError(
                f"{url}: a part of this URL stands for what may be a secret, and was not kept: name the URL "
                "anew; its package takes user and password from the environment, or from ~/.config/fsspec"
            )
        self.url = url.rstrip("/")

    def __str__(self) -> str:
        return masked_urls(self.url)

    def __repr__(self) -> str:
        return f"Far({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Far) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __truediv__(self, name: str) -> Far:
        return Far(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def is_file(self) -> bool:
        """Says whether there is a file now."""
        try:
            found = self._ask("read", lambda files, path: files.info(path))
        except FileNotFoundError:
            return False
        return bool(found["type"] == "file")

    def stat(self) -> Size:
        """Returns the size of the file."""
        return Size(int(self._ask("read", lambda files, path: files.info(path))["size"]))

    def read_bytes(self) -> bytes:
        """Returns all that the file holds."""
        found: bytes = self._ask("read", lambda files, path: files.cat_file(path))
        return found

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def open(self, mode: str, buffering: int = -1) -> Any:
        """Opens the file: `rb` reads what is asked for and nothing else, `xb` writes it anew.

        What was written is there when the file is closed, and not before; `abandon` closes it without.
        """
        assert mode in ("rb", "xb"), mode
        return Reading(self) if mode == "rb" else Writing(self)

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: folders come with the first file in them."""

    def files(self) -> dict[str, Mapping[str, Any]]:
        """Returns what the far side says of every file below this folder, by its path from here; nothing
        where there is none. It is asked now: what it said before is forgotten. Raises StorageError also for
        a name that is no path below this folder (`check_inner`).
        """

        def listed(files: Any, path: str) -> dict[str, Mapping[str, Any]]:
            files.invalidate_cache()
            found = files.find(path, detail=True)
            start = len(files._strip_protocol(path).rstrip("/")) + 1
            return {name[start:]: entry for name, entry in found.items() if name[start:]}

        try:
            found: dict[str, Mapping[str, Any]] = self._ask("read", listed)
        except FileNotFoundError:
            return {}
        for name in found:
            try:
                check_inner(name)
            except ValueError as error:
                raise StorageError(
                    f"{self.url}: lists a file that {error}: nothing is taken from there"
                ) from error
        return found

    def remove(self) -> None:
        """Removes the file, or the folder with all that is in it; nothing happens where there is none."""

        def removed(files: Any, path: str) -> None:
            files.invalidate_cache()
            files.rm(path, recursive=True)

        try:
            self._ask("removed", removed)
        except FileNotFoundError:
            pass

    def check_writable(self) -> None:
        """Writes, reads and removes a file in this folder. Raises StorageError where that fails."""
        trial, data = self / ".trial", b"whether rondo may write here"
        with trial.open("xb") as file:
            file.write(data)
        if trial.read_bytes() != data:
            raise StorageError(f"{trial}: does not come back as it was written")
        trial.remove()

    def upload(self, folder: Path, last: str) -> None:
        """Copies a folder of this machine, and compares the sizes of all its files there. `last`, a file by
        which others know that it is whole, comes when they are right. What was copied is removed where the
        rest cannot be.
        """
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        try:
            for name in sorted(files, key=lambda name: name == last):
                if name == last:
                    self._check_sizes({name: path for name, path in files.items() if name != last})
                with files[name].open("rb") as here, (self / name).open("xb") as there:
                    while part := here.read(_STRIDE):
                        there.write(part)
            self._check_sizes(files)
        except BaseException:
            with contextlib.suppress(RondoError):
                self.remove()
            raise

    def download(self, path: Path) -> None:
        """Copies the file to this machine, and compares its size."""
        size = self.stat().st_size
        self._ask("read", lambda files, there: files.get_file(there, str(path)))
        if path.stat().st_size != size:
            raise StorageError(f"{self}: {path.stat().st_size} of its {size} bytes have come; start again")

    def _check_sizes(self, files: Mapping[str, Path]) -> None:
        """Raises StorageError where files have another size there than here."""
        found = self.files()
        for name, path in files.items():
            size, there = path.stat().st_size, found.get(name, {}).get("size", 0)
            if there != size:
                raise StorageError(f"{self / name}: {there} bytes are there, of {size} that were written")

    def _ask(self, what: str, ask: Callable[[Any, str], Any]) -> Any:
        """Returns what `ask` does, of the file system and the path there."""
        with self.refusing(what):
            return ask(*_file_system(self.url))

    @contextmanager
    def refusing(self, what: str) -> Iterator[None]:
        """Goes around what asks the far side: each package has its own errors, of credentials and of the
        network. what: cannot be done where it fails.
        """
        try:
            yield
        except (RondoError, FileNotFoundError):
            raise
        except Exception as error:
            said = (str(error).strip().splitlines() or [""])[0]
            raise StorageError(
                f"{self.url}: cannot be {what}: {type(error).__name__}: {said}. Check the URL, and the "
                "credentials that its package takes from the environment"
            ) from error


Place = Path | Far


class Reading(io.RawIOBase):
    """A file at a URL, opened for reading at any place. It reads a little ahead: tensors are small and many,
    and each request takes a while.
    """

    def __init__(self, place: Far) -> None:
        self._place = place
        self._at = 0
        self._held = b""
        self._start = 0  # of what is held
        self._size: int | None = None

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at}.get(whence)
        self._at = (self._end() if start is None else start) + offset
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        """Reads as many bytes as fit, but for the end of the file, and a limit of what is held at a time."""
        if not self._start <= self._at < self._start + len(self._held):
            start, stride = self._at, min(max(len(into), _AHEAD), _STRIDE)
            end = min(start + stride, self._end())
            if start >= end:
                return 0
            self._held = self._place._ask("read", partial(_range_of, start=start, end=end))
            # Some servers of HTTP know no ranges, and send all.
            self._start = 0 if len(self._held) == self._end() else start
            if self._start == start and len(self._held) != end - start:
                raise StorageError(
                    f"{self._place}: {len(self._held)} bytes came, of {end - start} that were asked for"
                )
        found = memoryview(self._held)[self._at - self._start :][: len(into)]
        into[: len(found)] = found
        self._at += len(found)
        return len(found)

    def _end(self) -> int:
        if self._size is None:
            self._size = self._place.stat().st_size
        return self._size


def _range_of(files: Any, path: str, start: int, end: int) -> bytes:
    found: bytes = files.cat_file(path, start=start, end=end)
    return found


class Writing:
    """Sends what is written, a part at a time; the file appears, whole, when it is closed."""

    def __init__(self, place: Far) -> None:
        self._place = place
        with self._refusing():
            files, self._path = _file_system(place.url)
            folder, _, name = self._path.rpartition("/")
            # A disk shows a file from its first byte on: there it has another name until it is whole.
            self._aside = f"{folder}/.writing-{name}" if files.protocol == ("file", "local") else None
            path = self._aside or self._path
            try:
                self._file = files.open(path, "wb")
            except FileNotFoundError:  # where folders are real: a disk, ssh
                files.makedirs(files._parent(path), exist_ok=True)
                self._file = files.open(path, "wb")

    def write(self, data: Any) -> int:
        view = memoryview(data)
        with self._refusing():
            for start in range(0, len(view), _STRIDE):
                self._file.write(view[start : start + _STRIDE])
        return len(view)

    def close(self) -> None:
        with self._refusing():
            self._file.close()
            if self._aside:
                os.replace(self._aside, self._path)

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Closes the file so that it does not appear, where the protocol can do that. Its own failure is not
        reported, because it is called after another one.
        """
        with contextlib.suppress(StorageError), self._refusing():
            if hasattr(self._file, "_upload_chunk"):  # fsspec's own kind, which object stores have
                self._file.closed = True  # else dropping the file sends what is in it
                self._file.discard()
            else:
                self._file.close()
                if self._aside:
                    os.unlink(self._aside)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            with self._place.refusing("written"):
                yield
        except FileNotFoundError as error:
            raise StorageError(
                f"{self._place}: cannot be written: there is no such bucket, or no such folder: {error}"
            ) from error


def found_at(url: str) -> dict[str, Mapping[str, Any]]:
    """Returns what the far side says of the file at a URL, by that URL, or of all files below it. Raises
    ConfigError where there is none, or nothing that could read it.
    """

    def found(place: Far) -> dict[str, Mapping[str, Any]]:
        about: Mapping[str, Any] = place._ask("read", lambda files, path: files.info(path))
        if about["type"] == "file":
            return {url: about}
        return {(place / name).url: entry for name, entry in place.files().items()}

    return _asked(url, found)


def matching(url: str) -> dict[str, Mapping[str, Any]]:
    """Returns what the far side says of each file that a pattern (`*`, `?`, `[…]`, `**`) fits, by its URL.
    Raises ConfigError as `found_at`.
    """

    def found(place: Far) -> dict[str, Mapping[str, Any]]:
        def globbed(files: Any, path: str) -> dict[str, Mapping[str, Any]]:
            entries = files.glob(path, detail=True)
            named = {str(files.unstrip_protocol(name)): entry for name, entry in entries.items()}
            return {name: entry for name, entry in named.items() if entry["type"] == "file"}

        fitting: dict[str, Mapping[str, Any]] = place._ask("read", globbed)
        return fitting

    return _asked(url, found)


def _asked(url: str, ask: Callable[[Far], T]) -> T:
    try:
        return ask(Far(url))
    except FileNotFoundError as error:
        raise ConfigError(f"{url}: there is no such file") from error
    except StorageError as error:
        raise ConfigError(str(error)) from error


def _file_system(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL, and the path there. Raises ConfigError."""
    import fsspec

    found = _URL.match(url)
    assert found is not None
    protocol = found[1]
    try:
        files, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        remedy = f"pip install {_EXTRAS.get(str(package), package)}" if package else str(error)
        raise ConfigError(f"{url}: {protocol}:// needs a package that is not installed: {remedy}") from error
    except ValueError as error:
        if protocol in fsspec.available_protocols():
            raise
        raise ConfigError(f"{url} cannot be used: fsspec knows no {protocol}://") from error
    return files, path


class _Staying(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, so that a key is sent to the host that was named and to no other."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        told = f"it says to ask {newurl} instead, where no key is sent; if it is right, name that one"
        raise urllib.error.HTTPError(req.full_url, code, told, headers, fp)


def open_there(request: urllib.request.Request, *, timeout: float) -> Any:
    """Asks by HTTP, as `urllib.request.urlopen` does, but for redirects: these are an HTTPError that says
    where to. timeout: seconds. Raises OSError, HTTPException.
    """
    return urllib.request.build_opener(_Staying).open(request, timeout=timeout)


# ---- what a row of data names: the URL is a stranger's ----


def fetched(url: str, most: int, seconds: float) -> bytes:
    """Returns what is at a URL that somebody's data names, at most so many bytes, within so many seconds.

    Raises StorageError for what cannot be read, is larger or takes longer; and for an address of this
    machine or its network (http, https), before anything is asked of it, wherever a redirect leads.
    """
    name = masked_urls(url)
    if not url.lower().startswith(("http://", "https://")):
        place = Far(url)
        if place.stat().st_size > most:
            raise StorageError(f"{name}: has {place.stat().st_size} bytes, more than {most}")
        return place.read_bytes()
    end = time.monotonic() + seconds
    parts, size = [], 0
    try:
        with urllib.request.build_opener(_Http, _Https).open(url, timeout=seconds) as answer:
            while part := answer.read(1 << 16):
                parts.append(part)
                size += len(part)
                if size > most or time.monotonic() > end:
                    why = f"has more than {most} bytes" if size > most else f"took more than {seconds:g} s"
                    raise StorageError(f"{name}: {why}")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise StorageError(f"{name}: cannot be read: {error}") from error
    return b"".join(parts)


def is_of_everybody(address: str) -> bool:
    """Says whether an address is reached through the internet: not this machine's, nor of its network."""
    return ipaddress.ip_address(address).is_global


class _ToEverybody(http.client.HTTPConnection):
    """A connection on which nothing is asked of an address that is not everybody's."""

    def connect(self) -> None:
        for found in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM):
            self._check(str(found[4][0]))  # so that nobody learns from the time which ports are open
        super().connect()
        self._check(self.sock.getpeername()[0])  # the name may stand for another address by now

    def _check(self, address: str) -> None:
        if not is_of_everybody(address):
            self.close()
            raise StorageError(
                f"{self.host} is {address}, an address of this machine or its network: nothing was asked; "
                "give the image itself (a row: its file, in a folder that image_dir names)"
            )


class _SafelyToEverybody(_ToEverybody, http.client.HTTPSConnection):
    """Likewise, encrypted."""


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        # What a proxy reaches is its affair.
        return self.do_open(http.client.HTTPConnection if req.has_proxy() else _ToEverybody, req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> Any:
        kind = http.client.HTTPSConnection if req.has_proxy() else _SafelyToEverybody
        return self.do_open(kind, req)
