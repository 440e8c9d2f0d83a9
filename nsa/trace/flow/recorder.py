"""Record the control flow of all threads of a rank, from `start` to `stop`, in a `FlowLog`.

From Python 3.12 on by `sys.monitoring`, which sees every thread; before by `sys.settrace`, which sees those that Python starts.
No thread and no lock is used: a thread that waits for the recorder would hide a stall.
"""

import dis
import inspect
import json
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from nsa.trace.flow.log import CALL, CODE, LEAVE, LINE, LINE_EVENT, PAUSE, RAISED, READ, RESUME, SET, SIZE, FlowLog
from nsa.trace.flow.statements import Lines, parse_lines
from nsa.trace.flow.values import ABSENT, LONGEST, PLAIN, describe, find, masked_text
from nsa.trace.frames import is_program_file, is_user_file

# Between two calls of a thread: executions of a line in a frame, and entries into a function, that are recorded.
MOST_PASSES, MOST_ENTRIES = 200, 200
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_YIELDS = frozenset(dis.opmap[name] for name in ("YIELD_VALUE", "SEND") if name in dis.opmap)


@dataclass(slots=True, eq=False)
class Code:
    """A code object of the program: its number in the log, the names of its lines, and how often it was entered."""

    code: CodeType
    number: int
    lines: Lines
    entries: int = 0
    counted_from: int = 0  # the number of calls at which the entries were counted from 0


@dataclass(slots=True, eq=False)
class Open:
    """A frame that is recorded: its number, its parent's, its latest line, and the values that were written."""

    number: int
    parent: int
    code: Code
    thread: int
    line: int = 0
    due: tuple[str, ...] = ()  # names that the latest line sets
    seen: dict[str, str] = field(default_factory=dict)
    passes: dict[int, int] = field(default_factory=dict)  # executions by line, since the thread's latest call
    muted: set[int] = field(default_factory=set)  # lines that are no longer recorded before the next call
    unwritten: set[str] = field(default_factory=set)  # names that these lines set


class _Thread(threading.local):
    """A thread's open frames, outermost first; its number; how many calls it has begun; the package that it imports."""

    def __init__(self) -> None:
        self.open: list[Open] = []
        self.number = -1
        self.calls = 0
        self.importing: CodeType | None = None


class FlowRecorder:
    """Records into ``path``. `call` writes the calls that ranks must match; who begins them calls it, in their thread."""

    def __init__(self, path: Path, size: int = SIZE) -> None:
        self._codes: dict[int, Code | None] = {}  # by id: the hash of a code object is computed each time
        self._kept: list[CodeType] = []  # so that no other has its id
        self._known: list[Code] = []
        self._all_open: dict[int, Open] = {}
        self._calls: dict[int, int] = {}
        self._thread = _Thread()
        self._codes_seen, self._frames, self._threads = count(1), count(1), count()
        self.calls = 0
        self._pid = os.getpid()
        self._tool: _Settrace | _Monitoring | None = None
        self.log = FlowLog(path, self._begin_half, size)

    def start(self) -> None:
        """Record from now on, in this thread and in all that are started later."""
        self._thread.number = next(self._threads)  # 0, also where another thread starts first
        self._tool = _Monitoring(self) if hasattr(sys, "monitoring") else _Settrace(self)
        self._tool.start()
        self._adopt(sys._getframe(1))

    def _adopt(self, frame: FrameType | None) -> None:
        """Record the open frames of the program from their present lines on."""
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        for of in reversed(frames):
            code = self.find_code(of.f_code)
            if code is not None and self._tool is not None:
                opened = self.enter(code, of.f_locals)
                self.line(opened, of.f_lineno, of)
                self._tool.adopt(of, opened)

    def stop(self) -> None:
        """Record no more."""
        if self._tool is not None:
            self._tool.stop()
            self._tool = None

    def call(self, facts: Mapping[str, Any]) -> None:
        """Write a call that ranks must match: ``facts`` is a JSON object."""
        thread = self._thread
        if self._tool is None or os.getpid() != self._pid:
            return
        self.calls += 1
        for frame in thread.open:
            frame.passes.clear()
            frame.muted.clear()
            frame.unwritten.clear()
        self._tool.call_begins()
        self._write_objects(thread.open)
        self.log.text(CALL, thread.open[-1].number if thread.open else 0, json.dumps(facts))
        thread.calls += 1
        self._calls[thread.number] = thread.calls

    def _write_objects(self, frames: list[Open]) -> None:
        """Write the tensors and other objects that the frame which begins a call holds: no line that sets one writes it."""
        of: FrameType | None = sys._getframe(2)
        while of is not None and frames and of.f_code is not frames[-1].code.code:
            of = of.f_back
        if of is not None and frames:
            names = of.f_locals
            self.write(READ, frames[-1], [n for n, v in names.items() if type(v) not in PLAIN], names, {})

    def _begin_half(self) -> None:
        for code in self._known:
            self._write_code(code)
        for frame in list(self._all_open.values()):
            self.log.hold(
                frame.number,
                frame.parent,
                frame.code.number,
                frame.thread,
                frame.line,
                self._calls.get(frame.thread, 0),
            )

    def _write_code(self, code: Code) -> None:
        of, file = code.code, code.code.co_filename
        file = os.path.abspath(file) if file.endswith(".py") else file  # a script has the path by which it was started
        # Two lambdas of a line differ in their code alone.
        self.log.text(CODE, code.number, f"{file}\0{of.co_name}\0{of.co_firstlineno}\0{zlib.crc32(of.co_code)}")

    def find_code(self, code: CodeType) -> Code | None:
        """Return what is known of a code object; None where it is not the program's."""
        known = self._codes.get(id(code), self)
        if known is self:
            known = None
            if is_program_file(code.co_filename):
                known = Code(code, next(self._codes_seen), parse_lines(code.co_filename))
                self._known.append(known)
                self._write_code(known)
            self._codes[id(code)] = known
            self._kept.append(code)
        return known  # type: ignore[return-value]

    def is_in_import(self, frame: FrameType) -> bool:
        """Return whether a frame that begins is a part of the import of an installed package.

        That decides nothing of the program, and takes long to record. A program that a package has is run, not imported.
        """
        code, caller = frame.f_code, frame.f_back
        if self._thread.importing is None and code.co_name == "<module>" and caller is not None:
            is_imported = caller.f_code.co_filename.startswith("<frozen importlib")
            if is_imported and not is_user_file(code.co_filename):
                self._thread.importing = code
        return self._thread.importing is not None

    def end_import(self, code: CodeType) -> bool:
        """Return whether this thread imports a package, as a code object ends: with that of the package, the import has ended."""
        importing = self._thread.importing
        if importing is code:
            self._thread.importing = None
        return importing is not None

    def is_wanted(self, code: Code) -> bool:
        """Return whether another frame of a code is recorded."""
        if code.counted_from != self.calls:
            code.entries, code.counted_from = 0, self.calls
        code.entries += 1
        return code.entries <= MOST_ENTRIES

    def enter(self, code: Code, names: Mapping[str, Any]) -> Open:
        """Write that a frame begins; ``names`` are its locals, which are its arguments."""
        thread = self._thread
        if thread.number < 0:
            thread.number = next(self._threads)
        parent = thread.open[-1].number if thread.open else 0
        frame = Open(next(self._frames), parent, code, thread.number)
        self._all_open[frame.number] = frame
        thread.open.append(frame)
        self.log.enter(frame.number, parent, code.number, thread.number)
        of = code.code
        arguments = of.co_varnames[: of.co_argcount + of.co_kwonlyargcount]
        if arguments:
            self.write(SET, frame, arguments, names, {}, is_plain=True)
        return frame

    def resume(self, frame: Open) -> None:
        """Continue a generator's frame, in the thread that asks it for a value."""
        thread = self._thread
        parent = thread.open[-1].number if thread.open else 0
        self.log.enter(frame.number, parent, frame.code.number, frame.thread, RESUME)
        thread.open.append(frame)

    def line(self, frame: Open, line: int, of: FrameType) -> bool:
        """Write that a frame begins a line: first what its latest lines have set, then by what this one decides.

        Return whether the line's next executions, before the thread's next call, are to be recorded.
        """
        lines = frame.code.lines
        due, reads, returned = frame.due, lines.reads.get(line), lines.returns.get(line)
        names = of.f_locals if due or reads or returned or frame.unwritten else {}  # a new dict at each access
        if due or frame.unwritten:
            self.write(SET, frame, (*due, *frame.unwritten), names, of.f_globals, is_plain=True)
        self.log.write(LINE_EVENT.pack(LINE, frame.number, line))
        frame.line = line
        frame.due = lines.sets.get(line, ())
        if reads:
            self.write(READ, frame, reads, names, of.f_globals)
        if returned:
            self.write(READ, frame, returned, names, of.f_globals, is_plain=True)
        passes = frame.passes[line] = frame.passes.get(line, 0) + 1
        if passes < MOST_PASSES:
            return True
        frame.muted.add(line)
        frame.unwritten.update(frame.due)
        return False

    def write(
        self, kind: int, frame: Open, wanted: Iterable[str], names: Mapping[str, Any], others: Mapping[str, Any], *,
        is_plain: bool = False,
    ) -> None:  # fmt: skip
        """Write the values of names that differ from those that were written last for this frame.

        With ``is_plain`` nothing is written of tensors and other objects: most lines of a model set or return one.
        """
        seen = frame.seen
        for name in wanted:
            value = find(name, names, others)
            kind_of_value = type(value)
            if value is ABSENT or (is_plain and kind_of_value not in PLAIN):
                continue
            text = describe(masked_text(name, value) if kind_of_value is str else value)
            if seen.get(name) != text:
                seen[name] = text
                self.log.text(kind, frame.number, f"{name}\0{text}")

    def suspend(self, frame: Open) -> None:
        """Write that a generator's frame waits to be asked for its next value."""
        self.log.text(PAUSE, frame.number, "")
        self._pop(frame)

    def _pop(self, frame: Open) -> None:
        thread = self._thread
        if frame in thread.open:
            del thread.open[thread.open.index(frame) :]

    def leave(self, frame: Open, value: Any, of: FrameType) -> None:
        """Write that a frame returns a value."""
        if frame.due:
            self.write(SET, frame, frame.due, of.f_locals, of.f_globals, is_plain=True)
        self.log.text(LEAVE, frame.number, describe(value))
        self._end(frame)

    def unwind(self, frame: Open) -> None:
        """Write that an exception has ended a frame."""
        self.log.text(LEAVE, frame.number, "")
        self._end(frame)

    def _end(self, frame: Open) -> None:
        self._pop(frame)
        self._all_open.pop(frame.number, None)

    def raised(self, frame: Open, error: BaseException, kind: type[BaseException]) -> None:
        """Write that an exception is raised in a frame, or passes through it."""
        try:
            message = str(error).partition("\n")[0][:LONGEST]
        except Exception:  # its own message cannot be made
            message = ""
        self.log.text(RAISED, frame.number, f"{kind.__name__}: {message}" if message else kind.__name__)


class _Settrace:
    """Calls a recorder by `sys.settrace`, in this thread and in those that Python starts later."""

    def __init__(self, recorder: FlowRecorder) -> None:
        self.recorder = recorder

    def start(self) -> None:
        self._before = sys.gettrace(), threading.gettrace()
        begin = self._trace_calls()
        threading.settrace(begin)
        sys.settrace(begin)

    def stop(self) -> None:
        threading.settrace(self._before[1])
        sys.settrace(self._before[0])

    def call_begins(self) -> None:
        """The lines that are muted are a set of the frame."""

    def adopt(self, frame: FrameType, of: Open) -> None:
        """Trace a frame that is open already."""
        frame.f_trace = _make_trace(self.recorder, of)

    def _trace_calls(self) -> Callable[..., Any]:
        """Return the function that is called at each call of a Python function: most are of torch, and not recorded."""
        codes, begin = self.recorder._codes, self._begin
        unknown = object()

        def trace(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
            return None if codes.get(id(frame.f_code), unknown) is None else begin(frame)

        return trace

    def _begin(self, frame: FrameType) -> Callable[..., Any] | None:
        recorder = self.recorder
        if recorder.is_in_import(frame):
            return self._trace_import if recorder._thread.importing is frame.f_code else None
        code = recorder.find_code(frame.f_code)
        if code is None or os.getpid() != recorder._pid:
            return None
        paused = getattr(frame.f_trace, "paused", None)  # of a generator that continues
        if paused is not None:
            recorder.resume(paused)
            return frame.f_trace
        if not recorder.is_wanted(code):
            return None
        return _make_trace(recorder, recorder.enter(code, frame.f_locals))

    def _trace_import(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "return":  # by an exception, too
            self.recorder.end_import(frame.f_code)
        return self._trace_import


def _make_trace(recorder: FlowRecorder, of: Open) -> Callable[..., Any]:
    """Return the trace function of one frame."""
    muted = of.muted

    def trace(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "line":
            line = frame.f_lineno
            if line not in muted:
                recorder.line(of, line, frame)
        elif event == "return":
            code = frame.f_code
            if code.co_flags & _GENERATORS and code.co_code[frame.f_lasti] in _YIELDS:
                recorder.suspend(of)
            else:
                recorder.leave(of, arg, frame)
        elif event == "exception":
            recorder.raised(of, arg[1], arg[0])
        return trace

    trace.paused = of  # type: ignore[attr-defined]
    return trace


class _Monitoring:
    """Calls a recorder by `sys.monitoring`. Code that is not the program's costs nothing after its first call."""

    TOOL = 4

    def __init__(self, recorder: FlowRecorder) -> None:
        self.recorder = recorder
        self._paused: dict[int, Open] = {}  # by id of the frame of a generator, which lives while it is paused
        self._is_muted = False
        self._lines: set[CodeType] = set()  # code with events for lines

    def start(self) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        events = monitoring.events
        monitoring.use_tool_id(self.TOOL, "pytest-nsa flow")
        for event, callback in (
            (events.PY_START, self._start), (events.PY_RESUME, self._resume), (events.PY_THROW, self._throw),
            (events.PY_RETURN, self._return), (events.PY_YIELD, self._yield), (events.PY_UNWIND, self._unwind),
            (events.LINE, self._line), (events.RAISE, self._raise),
        ):  # fmt: skip
            monitoring.register_callback(self.TOOL, event, callback)
        monitoring.set_events(
            self.TOOL, events.PY_START | events.PY_RESUME | events.PY_THROW | events.PY_RETURN | events.PY_YIELD
            | events.PY_UNWIND | events.RAISE,
        )  # fmt: skip
        self._disable, self._set_local, self._line_event = monitoring.DISABLE, monitoring.set_local_events, events.LINE
        monitoring.restart_events()

    def stop(self) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        monitoring.set_events(self.TOOL, 0)
        for code in self.recorder._known:
            monitoring.set_local_events(self.TOOL, code.code, 0)
        monitoring.free_tool_id(self.TOOL)

    def adopt(self, frame: FrameType, of: Open) -> None:
        """Monitor a frame that is open already."""
        self._set_local(self.TOOL, frame.f_code, self._line_event)

    def call_begins(self) -> None:
        """Record the lines and functions again that were muted."""
        if self._is_muted:
            self._is_muted = False
            sys.monitoring.restart_events()  # type: ignore[attr-defined]

    def _top(self, code: CodeType) -> Open | None:
        """Return the thread's innermost frame, if it is one of a code."""
        frames = self.recorder._thread.open
        return frames[-1] if frames and frames[-1].code.code is code else None

    def _start(self, code: CodeType, offset: int) -> Any:
        recorder = self.recorder
        if recorder.is_in_import(sys._getframe(1)):
            return None
        known = recorder.find_code(code)
        if known is None or os.getpid() != self.recorder._pid:  # a child's
            return self._disable
        if known.code not in self._lines:
            self._lines.add(code)
            self._set_local(self.TOOL, code, self._line_event)
        if not recorder.is_wanted(known):
            # Until the next call. Its lines are not distinguished from those of a recorded frame of this code that called it.
            self._is_muted = True
            return self._disable
        recorder.enter(known, sys._getframe(1).f_locals)
        return None

    def _resume(self, code: CodeType, offset: int) -> Any:
        if self.recorder._thread.importing is not None:
            return None
        paused = self._paused.pop(id(sys._getframe(1)), None)
        if paused is not None:
            self.recorder.resume(paused)
        elif self.recorder.find_code(code) is None:
            return self._disable
        return None

    def _throw(self, code: CodeType, offset: int, error: BaseException) -> None:
        self._resume(code, offset)

    def _line(self, code: CodeType, line: int) -> Any:
        frame = self._top(code)
        if frame is None:
            return None
        if self.recorder.line(frame, line, sys._getframe(1)):
            return None
        self._is_muted = True
        return self._disable

    def _return(self, code: CodeType, offset: int, value: Any) -> Any:
        if self.recorder.end_import(code):
            return None
        frame = self._top(code)
        if frame is not None:
            self.recorder.leave(frame, value, sys._getframe(1))
        elif self.recorder.find_code(code) is None:
            return self._disable
        return None

    def _yield(self, code: CodeType, offset: int, value: Any) -> Any:
        if self.recorder._thread.importing is not None:
            return None
        frame = self._top(code)
        if frame is not None:
            self._paused[id(sys._getframe(1))] = frame
            self.recorder.suspend(frame)
        elif self.recorder.find_code(code) is None:
            return self._disable
        return None

    def _unwind(self, code: CodeType, offset: int, error: BaseException) -> None:
        self.recorder.end_import(code)
        frame = self._top(code)
        if frame is not None:
            self.recorder.unwind(frame)

    def _raise(self, code: CodeType, offset: int, error: BaseException) -> None:
        frame = self._top(code)
        if frame is not None:
            self.recorder.raised(frame, error, type(error))
