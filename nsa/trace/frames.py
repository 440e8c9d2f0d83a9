"""The location in the user's code: the innermost frame that belongs neither to torch, nor to Python, nor to us."""

import contextlib
import functools
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from types import CodeType, FrameType

# Packages that call the user's code or are called by it, wherever they are: installed as editable, too.
_FRAMEWORKS = ("torch", "functorch", "torchgen", "pytest", "_pytest", "pluggy", "xdist")


def _library_folders() -> tuple[str, ...]:
    """Return the folders with no code of the user's: Python's, those of packages and their commands, and the frameworks'."""
    found = [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib", "scripts")]
    for package in _FRAMEWORKS:
        with contextlib.suppress(ImportError, ValueError):  # ValueError: of a module without a specification
            spec = importlib.util.find_spec(package)
            found += (spec.submodule_search_locations or []) if spec is not None else []
    return tuple(dict.fromkeys(path + os.sep for folder in found for path in (folder, os.path.realpath(folder))))


LIBRARIES = _library_folders()
# Those that a reader of this process's evidence cannot know by their paths.
UNUSUAL_LIBRARIES = tuple(
    folder for folder in LIBRARIES if not re.search(r"/lib/python3\.\d+/|/(?:site|dist)-packages/", folder)
)

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_ROOT = os.path.dirname(os.path.dirname(_HERE.rstrip(os.sep))) + os.sep
# The plugin that runs the program is in the same folder as this package.
_FOREIGN = (*LIBRARIES, _HERE, _ROOT + "pytest_nsa" + os.sep, "<")
# Wherever they are installed, packages are not the program under test; but `nsa` is: its model is what hangs. evidence/stacks.py
# has the same rule for folders from elsewhere.
_INSTALLED = re.compile(r"/(?:site|dist)-packages/(?!nsa/(?!trace/))")
_OURS = _ROOT + "nsa" + os.sep
# Files that torch's compiler has written, in whatever folder.
_GENERATED = re.compile(r"/[a-z2-7]{2}/c[a-z2-7]{51}\.py$")

_known: dict[str, bool] = {}


def is_user_file(filename: str) -> bool:
    """Return whether a source file belongs to the program under test."""
    known = _known.get(filename)
    if known is None:
        in_model = filename.startswith(_OURS) and not filename.startswith(_HERE)
        installed = _INSTALLED.search(filename) or _GENERATED.search(filename)
        known = in_model or not (installed or filename.startswith(_FOREIGN))
        _known[filename] = known
    return known


def add_user_file(filename: str) -> None:
    """Count a file as part of the program under test, wherever it is."""
    if filename:
        _known[filename] = True


def is_program_file(filename: str) -> bool:
    """Return whether a source file is the user's, or of a library other than torch and pytest."""
    return is_user_file(filename) or _is_of_a_library(filename)


def user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the user frames at and above ``frame``, innermost first."""
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def program_frames(frame: FrameType | None) -> Iterator[tuple[FrameType, bool]]:
    """Yield the frames of the user and of libraries at and above ``frame``, innermost first, and whether each is the user's."""
    while frame is not None:
        name = frame.f_code.co_filename
        is_user = is_user_file(name)
        if is_user or (_is_installed(name) and not _in_package(name).startswith(_RUNNERS)):
            yield frame, is_user
        frame = frame.f_back


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost user frame at or above ``frame``; None when there is none."""
    return next(user_frames(frame), None)


def describe(frame: FrameType | None) -> str:
    """Return ``file:line in function`` of a frame, '' for None."""
    return describe_line(frame.f_code, frame.f_lineno) if frame is not None else ""


def describe_line(code: CodeType, line: int) -> str:
    """Return ``file:line in function``."""
    return f"{code.co_filename}:{line} in {code.co_name}"


def call_site(depth: int = 1) -> str:
    """Return ``file:line in function`` of the user's code that called."""
    return describe(user_frame(sys._getframe(depth + 1)))


CALLERS, WALK = 6, 48  # how many callers of a call site are named, and how many frames above it are searched for them
WITHIN = 3  # lines of a library that are named between the user's and torch's function: the innermost and the outermost
_LIBRARY_BYTES = 120  # of these lines: they share a field of the board with the callers
_SCHEDULES = os.path.join("torch", "distributed", "pipelining", "")  # they make the user's calls, as a trainer does
_RUNNERS = tuple(name + os.sep for name in ("_pytest", "pluggy"))  # they call the program
# typing_extensions is a part of later standard libraries: its `deprecated` is around functions of torch.
_FRAMEWORK = ("torch" + os.sep, "typing_extensions.py", *_RUNNERS)


@functools.cache
def _is_of_a_library(filename: str) -> bool:
    """Return whether a file is of an installed package, not of torch, this one or pytest; torch's schedules of pipelines are."""
    name = _in_package(filename)
    return _is_installed(filename) and (not name.startswith(_FRAMEWORK) or name.startswith(_SCHEDULES))


@functools.cache
def _is_installed(filename: str) -> bool:
    """Return whether a file is of an installed package other than this one; torch and pytest are, too."""
    ours = filename.startswith((_HERE, _ROOT + "pytest_nsa" + os.sep))
    return _INSTALLED.search(filename) is not None and not ours


def _in_package(place: str) -> str:
    return place.rpartition("-packages" + os.sep)[2]


# By call path. The code objects are kept, because no other code has their ids while they live.
_ways: dict[tuple[int, ...], tuple[str, str, list[CodeType]]] = {}
_MOST_WAYS = 4096  # then the cache is cleared: code that is made at run time adds paths without end


def call_path(depth: int = 1, *, within: bool = False) -> tuple[str, str]:
    """Return `call_site`, and the user's lines that led there, innermost first: 'train.py:30 in step < main.py:12 in main'.

    Callers have only their file's name, which suffices to distinguish two paths to one line. Each path is formatted once. With
    ``within`` the lines of a library that the site has called come before, as in 'torchmetrics/metric.py:480 in sync
    << train.py:30 in step'.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    frames: list[FrameType] = []
    library: list[FrameType] = []
    way: list[int] = []
    left = WALK
    while frame is not None and left:
        code = frame.f_code
        if is_user_file(code.co_filename):
            frames.append(frame)
            way += (id(code), frame.f_lasti)
            if len(frames) > CALLERS:
                break
        elif within and not frames and _is_of_a_library(code.co_filename):
            if len(library) == WITHIN:
                del library[1]
            library.append(frame)
            way += (id(code), frame.f_lasti)
        left -= bool(frames)
        frame = frame.f_back
    found = _ways.get(tuple(way))
    if found is None:
        if len(_ways) >= _MOST_WAYS:
            _ways.clear()
        callers = " < ".join(describe(f).rpartition("/")[2] for f in frames[1:])
        if library:
            inner, *outer = map(describe, library)
            shown = [_in_package(inner)[-_LIBRARY_BYTES:], *(text.rpartition("/")[2] for text in outer)]
            while len(" < ".join(shown)) > _LIBRARY_BYTES:
                shown.pop()
            callers = f"{' < '.join(shown)} << {callers}"
        found = (describe(frames[0]) if frames else "", callers, [f.f_code for f in (*library, *frames)])
        _ways[tuple(way)] = found
    return found[:2]
