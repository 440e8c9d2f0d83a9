"""Record exceptions that end a test, or a thread of it: their text, where they were raised, and their causes."""

import os
import traceback
from collections import Counter
from pathlib import Path

from nsa.trace.events import record
from nsa.trace.frames import is_user_file
from nsa.trace.stall.counters import counters_at
from nsa.trace.stall.network import unusable_network

MAX_TEXT = 200_000
MAX_CHAIN = 10
MAX_FRAMES = 64


def cut(text: str) -> str:
    """Return ``text``; if it has more than `MAX_TEXT` characters, its middle is replaced by the number of omitted ones."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters omitted ...]\n{text[-half:]}"


def message_of(error: BaseException) -> str:
    """Return ``str(error)``, cut; for a group with the exceptions in it; a replacement text if __str__ fails."""
    try:
        text = str(error)
    except Exception as failure:
        return f"<its text could not be made: {type(failure).__name__} in __str__>"
    if isinstance(error, BaseExceptionGroup):
        text += ": " + "; ".join(f"{type(e).__name__}: {message_of(e)}" for e in error.exceptions[:MAX_CHAIN])
    return cut(text)


def _user_line(frames: traceback.StackSummary, *, recursion: bool = False) -> traceback.FrameSummary | None:
    """Return the innermost frame of the user's code; for a recursion, the most frequent one."""
    if recursion:
        lines = Counter((f.filename, f.lineno) for f in frames if is_user_file(f.filename))
        most = lines.most_common(1)[0][0] if lines else None
        return next((f for f in frames if (f.filename, f.lineno) == most), None)
    return next((f for f in reversed(frames) if is_user_file(f.filename)), None)


def _named(place: traceback.FrameSummary | None) -> str:
    return f"{place.filename}:{place.lineno} in {place.name}" if place else ""


def origin(error: BaseException) -> dict[str, str]:
    """Return the user's line that raised, and the message of the exception's cause or context, '' without one."""
    place = _user_line(traceback.extract_tb(error.__traceback__))
    before = error.__cause__ or error.__context__
    return {"where": _named(place), "after": message_of(before) if before is not None else ""}


def record_thread_exception(folder: Path, error: BaseException, owner: str, future: int) -> None:
    """Append an exception of a side thread or a task; ``future``: the number of the future that keeps it, or 0."""
    frames = traceback.extract_tb(error.__traceback__)
    place = _user_line(frames)
    record(
        folder, event="thread_exception", whose=owner, future=future, type=type(error).__name__, message=message_of(error),
        where=_named(place), raised_in=frames[-1].filename if frames else "",
    )  # fmt: skip


def _missing_file(error: BaseException) -> str:
    """Return the path of the file that a FileNotFoundError is about; '' for other exceptions."""
    name = error.filename if isinstance(error, FileNotFoundError) else None
    return os.path.abspath(name) if type(name) is str and name else ""


def record_exception(
    folder: Path, error: BaseException, when: str, test: traceback.FrameSummary | None = None, **more: str
) -> None:
    """Append an exception with the innermost line of the user's code, its stack with the counters of its loops, and
    ``more`` fields. ``test`` is the location to use if no user's line is on its stack.
    """
    frames, message = traceback.extract_tb(error.__traceback__), message_of(error)
    chain: list[tuple[str, str, str]] = []
    missing = _missing_file(error)
    cause = error.__cause__ or error.__context__
    while cause is not None and len(chain) < MAX_CHAIN:
        inner = traceback.extract_tb(cause.__traceback__)
        chain.append((message_of(cause), inner[-1].filename if inner else "", type(cause).__name__))
        missing = missing or _missing_file(cause)
        cause = cause.__cause__ or cause.__context__
    place = _user_line(frames, recursion=isinstance(error, RecursionError)) or test or (frames[-1] if frames else None)
    record(
        folder,
        event="exception",
        when=when,
        type=type(error).__name__,
        module=type(error).__module__,
        message=message,
        file=place.filename if place else "",
        line=place.lineno if place else 0,
        function=place.name if place else "",
        raised_in=frames[-1].filename if frames else "",
        # If a worker dies while it sends a batch, the first symptom is an error of its socket.
        in_loader=any(
            f.name == "_try_get_data" and f.filename.endswith("/torch/utils/data/dataloader.py") for f in frames
        ),
        chain=chain,
        stack=[(f.filename, f.lineno or 0, f.name) for f in frames[-MAX_FRAMES:]],
        counters=counters_at(error),
        **more,
        **({"missing": missing} if missing else {}),
        **({"network": network} if (network := unusable_network(message)) else {}),
    )
