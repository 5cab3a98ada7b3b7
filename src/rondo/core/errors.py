"""The one small hierarchy of errors. Each message names the thing, the place and the remedy."""

from __future__ import annotations

import difflib
import functools
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import ParamSpec, TypeVar

from rondo.core.masking import masked_urls

E = TypeVar("E", bound="RondoError")
P = ParamSpec("P")
T = TypeVar("T")
_CALLED: dict[str, str] = {}
_LONG_WORD = re.compile(r"\S{1001,}")
_STANDARD_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_OF_THE_USERS = "_rondo_of_the_users"  # in the namespace of an error: `mark_of_the_users` saw it


class RondoError(Exception):
    """Base of every error that rondo raises on purpose. Its text has no passwords in URLs, also where
    a user wrote them.
    """

    def __init__(self, *arguments: object) -> None:
        """Cuts words of more than 1,000 characters: a name that somebody wrote is not repeated whole."""
        super().__init__(*(_cut(each) if isinstance(each, str) else each for each in arguments))

    is_outage = False
    """No code is at fault: a process died, hung, or lost its peers. The same may succeed in new ones."""

    def __str__(self) -> str:
        return as_called(masked_urls(super().__str__()))

    def _render_traceback_(self) -> list[str]:
        """Returns what a notebook shows of it (IPython asks for this): the lines of the user's own that led
        here, and the message; with RONDO_TRACEBACK=1 all of it.
        """
        if shows_tracebacks():
            return "".join(traceback.format_exception(self)).splitlines()
        own = without_libraries(users_frames(self))
        return "".join([*traceback.format_list(own), *traceback.format_exception_only(self)]).splitlines()


def _cut(text: str) -> str:
    return _LONG_WORD.sub(lambda word: f"{word[0][:200]}… ({len(word[0])} characters)", text)


def call(name: str, shown: str) -> None:
    """Has this process's errors say `shown` for `name`: for a function that a program has handed over, and
    that has a file for other processes, which nobody is to edit.
    """
    _CALLED[name] = shown


def as_called(text: str) -> str:
    """Returns a text with what `call` was told."""
    for name, shown in _CALLED.items():
        text = text.replace(name, shown)
    return text


def outage(error: E) -> E:
    """Returns the error, marked as one that no code is at fault for."""
    error.is_outage = True
    return error


class ConfigError(RondoError, ValueError):
    """A key, value or combination in the configuration cannot work; names key and file:line or argument."""

    def __init__(self, message: str = "", *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key
        """Which one, also where the raising code does not know the place; `commands/recipe.py` adds that."""
        self._several: tuple[ConfigError, ...] = ()

    @property
    def problems(self) -> tuple[ConfigError, ...]:
        """All that is wrong, each by itself."""
        return self._several or (self,)

    @classmethod
    def of(cls, problems: Sequence[ConfigError]) -> ConfigError:
        """Returns one error that says all of `problems`, each once, in a line of its own."""
        problems = list({str(problem): problem for problem in problems}.values())
        if len(problems) == 1:
            return problems[0]
        error = cls("\n".join(map(str, problems)), key=problems[0].key)
        error._several = tuple(problems)
        return error


class WrongDeviceError(ConfigError):
    """A function of the user's makes a tensor on another device than its columns'."""


@contextmanager
def about(key: str) -> Iterator[None]:
    """Says that a ConfigError raised inside is about this key, unless it names a key below."""
    try:
        yield
    except ConfigError as error:
        if error.key is None or not error.key.startswith(key + "."):
            error.key = key
        raise


@contextmanager
def within(section: str, whose: str = "") -> Iterator[None]:
    """Puts the section in front of a ConfigError raised inside, which begins with a key as the section has it
    (`lora.rank`), and `whose` behind it. An error without a key is about the section.
    """
    try:
        yield
    except ConfigError as error:
        if error.key is None:
            raise ConfigError(f"{section}: {error}{whose}", key=section) from error
        raise ConfigError(f"{section}.{error}{whose}", key=f"{section}.{error.key}") from error


@contextmanager
def named_by(key: str) -> Iterator[None]:
    """Turns a DataError raised inside into a ConfigError about this key, which names the data."""
    try:
        yield
    except DataError as error:
        raise ConfigError(f"{key}: {error}", key=key) from error


class DataError(RondoError, ValueError):
    """A prompt file, row, column or batch is not what was declared; names file, row and column."""


class RolloutError(RondoError):
    """A rollout engine could not do what a request asked for."""


class RefusedRequestError(RolloutError):
    """A request that this kind of engine cannot serve with this model. The engine itself is well."""


class ReplicaLostError(RolloutError):
    """A replica died or cannot be reached. partial: what it had made of the request (a `types.Completion`),
    to go on with it elsewhere; None: nothing. last_lines: what its process wrote last.
    """

    def __init__(self, message: str, partial: object = None, last_lines: str = "") -> None:
        self.partial = partial
        self.last_lines = last_lines
        super().__init__(message)


class FailedRequestError(RolloutError):
    """A request that cannot be served, by itself: one failed trajectory, not the end of a run."""


class DeadlyRequestError(FailedRequestError):
    """Several replicas died while they ran this request, the last one while it ran nothing else; it is not
    given to another.
    """


class LostImageError(FailedRequestError):
    """An image of a request is gone, cannot be read, or is not the one that was counted."""


class ToolError(RondoError):
    """What a tool says to the policy in place of a result ("no such city"): an observation like any other.

    Raise it in a tool of yours. Whatever else a tool raises is the tool's own failure, and ends the episode.
    """


class EnvironmentFailedError(RondoError):
    """An environment did not start, died, or broke its protocol: infrastructure, never what a policy did."""


class EpisodeLostError(RondoError):
    """The process that an episode lived in has died or was ended: the episode is begun again."""


class RewardError(RondoError):
    """A scorer raised, hung, or returned something that is no score, and the policy says stop."""


class SandboxError(RondoError):
    """A sandbox did not start or was lost from outside: infrastructure, never what a program in it did."""


class TrainError(RondoError):
    """A training engine cannot go on (a unit over the token budget, shapes that do not fit)."""


class WeightSyncError(RondoError):
    """The weights that the sampler holds are not those of the trainer."""


class CheckpointError(RondoError):
    """A checkpoint is incomplete, damaged, or was made by an incompatible run."""


class OtherRunError(CheckpointError):
    """A checkpoint is whole, and of a run with other settings, models or rows: so is every older one."""


class StorageError(RondoError):
    """A file or folder of a run, or an output, cannot be written or read: the disk is full, read-only, …"""

    def __init__(self, message: str, fault: int | None = None) -> None:
        super().__init__(message)
        self.fault = fault
        """The errno."""

    def __reduce__(self) -> tuple[type, tuple[str, int | None]]:
        return type(self), (str(self), self.fault)


class WorkerError(RondoError):
    """A worker raised or died; names role, rank and method, and carries the worker's own traceback."""

    def __init__(self, role: str, rank: int, method: str, message: str, worker_traceback: str = "") -> None:
        self.role = role
        self.rank = rank
        self.method = method
        self.worker_traceback = worker_traceback
        self.message = message
        self.cause_error: BaseException | None = None  # the worker's own exception, where it could travel
        self.died = False  # the rank's process is gone or was given up: no later call can reach it
        text = f"{role}[{rank}].{method} failed: {message}"
        if worker_traceback:
            text += f"\n--- traceback in {role}[{rank}] ---\n{worker_traceback.rstrip()}"
        super().__init__(text)

    def __reduce__(self) -> tuple[type, tuple[str, int, str, str, str]]:
        return type(self), (self.role, self.rank, self.method, self.message, self.worker_traceback)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Writes the middle of a message: `; did you mean 'x'?` for the nearest candidate, `.` when none is
    near. The name itself is none: what is wrong with it is another thing than its spelling.
    """
    others = [candidate for candidate in candidates if candidate != name]
    near = difflib.get_close_matches(name, others, n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else "."


def half_of_a_pair(text: str) -> int | None:
    """Returns where a text has half of a surrogate pair, which JSON and Python can hold and no file,
    tokenizer or other process takes; None: nowhere.
    """
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def is_deep(value: object, levels: int) -> bool:
    """Says whether mappings and lists lie in each other more than so many levels deep: without end, where one
    holds itself.
    """
    below = [(value, 1)]
    while below:
        one, level = below.pop()
        if isinstance(one, Mapping | list | tuple):
            if level > levels:
                return True
            below += [(child, level + 1) for child in (one.values() if isinstance(one, Mapping) else one)]
    return False


@functools.cache
def our_folders() -> tuple[str, ...]:
    """Returns the folders of rondo's packages: of those that are named in its entry points, which lie beside
    each other.
    """
    rondo = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with open(os.path.join(rondo, "entry_points.txt"), encoding="utf-8") as file:
        names = {name for line in file for name in re.findall(r"^[\w-]+ = (\w+)", line)}
    return tuple(os.path.join(os.path.dirname(rondo), name) for name in sorted(names))


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the frames of an error's traceback that are not in rondo's own files."""
    return without_rondo(traceback.extract_tb(error.__traceback__))


def without_rondo(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Returns the frames that are not in rondo's own files, wherever its packages lie."""
    ours = tuple(folder + os.sep for folder in our_folders())
    return [frame for frame in frames if not os.path.abspath(frame.filename).startswith(ours)]


def without_libraries(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Returns the frames that are neither Python's nor an installed package's."""
    return [
        frame
        for frame in frames
        if "site-packages" not in frame.filename
        and not frame.filename.startswith(("<frozen", _STANDARD_LIBRARY))
    ]


# ---- what Python prints of an error that nobody catches


def shows_tracebacks() -> bool:
    """Says whether errors are shown with all their frames: RONDO_TRACEBACK=1."""
    return os.environ.get("RONDO_TRACEBACK", "0") not in ("", "0")


@contextmanager
def told_shortly() -> Iterator[None]:
    """Leaves the user's own lines and the message of an error that leaves the library here, where it is a
    RondoError or the user's own (`mark_of_the_users`): the frames of event loops and workers in between say
    nothing to a user. Every other error is a bug and keeps all its frames, and so does a worker's that is
    none of rondo's; with RONDO_TRACEBACK=1 all errors do.
    """
    try:
        yield
    except Exception as error:
        if not shows_tracebacks() and not _is_a_bug(error):
            _shorten(error)
        raise


def mark_of_the_users(error: Exception) -> None:
    """Marks an error that code of the user's raised and that goes to the caller as it is."""
    vars(error)[_OF_THE_USERS] = True


def short_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a function tell its errors shortly (`told_shortly`)."""

    @functools.wraps(function)
    def called(*args: P.args, **named: P.kwargs) -> T:
        with told_shortly():
            return function(*args, **named)

    return called


def _is_a_bug(error: Exception) -> bool:
    if isinstance(error, WorkerError):
        return not (error.died or isinstance(error.cause_error, RondoError))
    return not (isinstance(error, RondoError) or _OF_THE_USERS in vars(error))


def _shorten(error: Exception) -> None:
    """Cuts the traceback of an error, and of what it was raised from, to the user's frames. Causes without
    any are left out: the message says what they said.
    """
    assert error.__traceback__ is not None
    # The frame of `with`, from which Python goes on with this very list: it is cut in place.
    around = error.__traceback__.tb_next
    assert around is not None
    around.tb_next = _users_part(around.tb_next)
    if isinstance(error, WorkerError) and error.cause_error is not None:
        error.args = (f"{error.role}[{error.rank}].{error.method} failed: {error.message}",)
    causes, one = list[BaseException](), _raised_from(error)
    while one is not None and one is not error and one not in causes:  # they may go round in a circle
        causes.append(one)
        one = _raised_from(one)
    for one in causes:
        one.__traceback__ = _users_part(one.__traceback__)
    shown = [one for one in causes if one.__traceback__ is not None and not isinstance(one, WorkerError)]
    for one, cause in zip([error, *shown], [*shown, None], strict=True):
        one.__cause__ = cause  # and no __context__ any more


def _raised_from(error: BaseException) -> BaseException | None:
    """Returns the error that Python shows above this one."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    """Returns a traceback with the frames of the user's alone, linked to each other."""
    own: list[TracebackType] = []
    while frames is not None:
        summary = traceback.FrameSummary(frames.tb_frame.f_code.co_filename, None, "")
        if without_libraries(without_rondo([summary])):
            own.append(frames)
        frames = frames.tb_next
    for frame, below in zip(own, [*own[1:], None], strict=False):
        frame.tb_next = below
    return own[0] if own else None
