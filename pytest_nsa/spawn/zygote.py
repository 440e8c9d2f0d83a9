"""The zygote: a process with every test collected and torch loaded, which forks the ranks of each test.

It is either a fork of the pytest process, made right after collection, or a clean child pytest that collected the
same tests (`ServeSession`), for one host or, under xdist, for all workers. It runs no test itself, so every rank
starts from the same untouched state.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import select
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from pytest_nsa.rank.context import LATE
from pytest_nsa.rank.replay import make_ranks_config, prepare
from pytest_nsa.system.clock import monotonic
from pytest_nsa.system.descendants import children, end_orphans
from pytest_nsa.system.prctl import become_subreaper, die_with, fork, kill_group, set_handler, write_lines_at_once
from pytest_nsa.system.procfs import restless_threads
from pytest_nsa.system.sockets import hold_ports, list_numbers
from pytest_nsa.wire.messages import Channel, GroupSpec, Job, plain_nodeid

# For ranks forked ahead to form their group, once a job needs them; after it, new ranks are forked, which leave evidence.
JOIN_S = 10.0


@dataclass
class Member:
    """A rank's process, and our end of the socket pair to it."""

    rank: int
    pid: int
    control: Channel
    state: Literal["joining", "waiting", "running", "gone"] = "joining"


class KeyValues:
    """The zygote's side of a worker group's store (`rank.store`): values by key, and which ranks wait for which keys."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: list[tuple[Channel, dict[str, Any]]] = []

    def answer(self, asker: Channel, request: dict[str, Any]) -> None:
        """Answer a request, and the requests that waited for a value that it stores."""
        if not self._try_answer(asker, request):
            self._waiting.append((asker, request))
        elif self._waiting:
            self._waiting = [(a, r) for a, r in self._waiting if not self._try_answer(a, r)]

    def _try_answer(self, asker: Channel, request: dict[str, Any]) -> bool:
        """Answer a request if all its keys have values; return whether it was answered."""
        keys = {"wait": request.get("keys", ()), "get": (request.get("key"),)}.get(request["call"], ())
        if not all(key in self._values for key in keys):
            return False
        asker.send(id=request["id"], value=self._call(request))
        return True

    def _call(self, request: dict[str, Any]) -> Any:
        values, call, key = self._values, request["call"], request.get("key", "")
        if call == "set":
            values[key] = request["value"]
        elif call == "get":
            return values[key]
        elif call == "add":
            values[key] = str(int(values.get(key, "0")) + request["amount"])
            return int(values[key])
        elif call == "compare_set":
            if values.get(key, "") == request["expected"]:
                values[key] = request["desired"]
            return values.get(key, request["expected"])
        elif call == "check":
            return all(k in values for k in request["keys"])
        elif call == "delete":
            return values.pop(key, None) is not None
        elif call == "count":
            return len(values)
        return None


@dataclass
class WorkerGroup:
    """Its members by pid. ``number`` is that of the job it runs, or is to run once its members have joined their group."""

    spec: GroupSpec
    store: Path  # where torch's own store lies, for a backend that queries it from its own threads
    held: list[socket.socket] = field(default_factory=list)  # ports, for groups that the test makes itself
    members: dict[int, Member] = field(default_factory=dict)
    number: int | None = None
    pending: Job | None = None
    pending_since: float = 0.0
    reuse: str = ""
    is_doomed: bool = False
    values: KeyValues = field(default_factory=KeyValues)

    def fork(self, become: Callable[[int, Channel], None], job: Job | None) -> None:
        """Fork every rank; in each, ``become(rank, control)`` must never return. ``job``: None if they receive it later."""
        for rank in self.spec.local_ranks:
            ours, theirs = socket.socketpair()
            pid = fork()
            if pid == 0:
                ours.close()
                for member in self.members.values():
                    member.control.socket.close()
                become(rank, Channel(theirs))
            theirs.close()
            self.members[pid] = Member(rank, pid, Channel(ours), "joining" if job is None else "running")

    @property
    def pids(self) -> list[int]:
        """The process ids, in the order of the ranks."""
        return [m.pid for m in sorted(self.members.values(), key=lambda m: m.rank)]

    @property
    def is_whole(self) -> bool:
        """Whether every rank lives, and none is being killed."""
        return (
            not self.is_doomed
            and len(self.members) == len(self.spec.local_ranks)
            and all(m.state != "gone" for m in self.members.values())
        )

    @property
    def is_waiting(self) -> bool:
        """Whether every rank waits for a job."""
        return self.is_whole and all(m.state == "waiting" for m in self.members.values())

    @property
    def is_late(self) -> bool:
        """Whether a job has waited too long for the ranks to join their group."""
        return self.pending is not None and monotonic() - self.pending_since > JOIN_S

    def fits(self, job: Job) -> bool:
        """Return whether ``job`` may run here: ranks that stayed serve only their own class or module."""
        return self.is_whole and self.spec == job.group_spec and self.reuse in ("", job.reuse)

    def assign(self, number: int, job: Job) -> None:
        """Send every rank its job."""
        # Ranks that do not stay serve no other test, though they live until they have ended.
        self.number, self.reuse, self.pending = number, job.reuse if job.stay else "", None
        for member in self.members.values():
            member.state = "running"
            member.control.send(op="job", job=job.to_json())

    def signal(self, rank: int, number: int) -> None:
        """Signal one rank. It is not reaped yet, so no other process has its pid."""
        for member in self.members.values():
            if member.rank == rank and member.state != "gone":
                os.kill(member.pid, number)

    def kill(self) -> None:
        """SIGKILL every rank that is still there, and what it started."""
        self.is_doomed = True
        for member in self.members.values():
            if member.state != "gone":
                kill_group(member.pid)

    def clean_up(self) -> None:
        """Close sockets and remove the store's file, once no rank is left."""
        for member in self.members.values():
            member.control.shut_down()
        for holder in self.held:
            holder.close()
        with contextlib.suppress(OSError):
            shutil.rmtree(self.store.parent)


# What a rank imports in every test: imported here once.
PRELOAD = (
    "torch", "torch.distributed", "nsa.trace.session", "nsa.trace.stall.threads",
    "nsa.trace.training", "pytest_nsa.rank.process",
)  # fmt: skip
# Fixtures that need the modules of LATE; without them, they are imported after the first rank that needed them.
LATE_FIXTURES = {"ddp", "fsdp"}
PENDING_S = 0.5


@dataclass(eq=False)
class Host:
    """A pytest process that requests ranks: the worker groups of its job and, forked ahead, of its next test."""

    channel: Channel
    current: WorkerGroup | None = None
    ahead: WorkerGroup | None = None
    groups: list[WorkerGroup] = field(default_factory=list)


class Zygote:
    """Serves hosts until the first one disconnects. ``listener`` accepts further hosts (xdist workers)."""

    def __init__(
        self,
        items: dict[str, pytest.Item],
        first: socket.socket,
        listener: socket.socket | None = None,
        failures: Mapping[str, str] | None = None,
    ) -> None:
        self.items = items
        self.failures = failures or {}
        self.first = Host(Channel(first))
        self.hosts = [self.first]
        self.listener = listener
        self._count = 0
        self._late: set[str] = set()  # modules that ranks had to import
        self._is_ended = False

    def serve(self) -> None:
        """Preload, report that we are ready, and fork ranks until the first host has closed its end."""
        began = monotonic()
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        become_subreaper()
        # Not SIGKILL: what the ranks have started does not die with them, and must be ended here.
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_is_ended", True))
        die_with(os.getppid(), signal.SIGTERM)
        refusal = self._preload()
        for config in {id(item.config): item.config for item in self.items.values()}.values():
            make_ranks_config(config)
        gc.freeze()  # pages that no garbage collection touches stay shared with the ranks
        self._random = random.getstate()
        self._own = set(children())  # processes that collection has started are no orphans
        self._greeting: dict[str, Any] = {"op": "unfit", "reason": refusal} if refusal else {"op": "ready"}
        rest = monotonic() - began - self._importing_s
        print(f"zygote: imports {self._importing_s:.3f} s, everything else {rest:.3f} s", flush=True)  # to its log
        self.first.channel.send(**self._greeting)
        while not self.first.channel.closed and not self._is_ended:
            for source in self._wait(wake_read):
                if isinstance(source, Host):
                    self._receive_from_host(source)
                elif isinstance(source, tuple):
                    self._receive_from_member(*source)
                elif source == wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                    self._reap()
                elif self.listener is not None:
                    self._accept(self.listener)
            for host in self.hosts:
                for group in list(host.groups):
                    if group.pending is not None:
                        self._settle(host, group)
        for host in list(self.hosts):
            self._drop(host)

    def _wait(self, wake: int) -> list[Any]:
        """Return what can be read now: hosts, members with their host and worker group, and the descriptors of this process."""
        sources: dict[int, Any] = {wake: wake}
        if self.listener is not None:
            sources[self.listener.fileno()] = self.listener.fileno()
        is_pending = False
        for host in self.hosts:
            sources[host.channel.fileno()] = host
            for group in host.groups:
                is_pending = is_pending or group.pending is not None
                for member in group.members.values():
                    if not member.control.closed:
                        sources[member.control.fileno()] = (host, group, member)
        poll = select.poll()
        for fd in sources:
            poll.register(fd, select.POLLIN)
        return [sources[fd] for fd, _ in poll.poll(1e3 * PENDING_S if is_pending else None)]

    def _preload(self) -> str:
        """Import what ranks need and install the tracers; '' or the reason that ranks must not be forked from here."""
        threads = restless_threads()
        needs_late = any(LATE_FIXTURES.intersection(getattr(i, "fixturenames", ())) for i in self.items.values())
        began = monotonic()
        for module in (*PRELOAD, *(LATE if needs_late else ())):
            importlib.import_module(module)
        self._importing_s = monotonic() - began
        torch, self._rank = sys.modules["torch"], sys.modules["pytest_nsa.rank.process"]
        if torch.cuda.is_initialized():
            return (
                "collecting the tests initialises CUDA, and a process forked after that cannot use it: "
                "move the CUDA calls from module level into tests or fixtures, or use --ranks-launch=cold"
            )
        if threads:
            return (
                f"collecting the tests starts threads ({', '.join(threads[:3])}), which ranks forked from here would lack, "
                "with whatever locks they hold: start them in tests or fixtures, or use --ranks-launch=cold"
            )
        torch.set_num_threads(1)
        self._rank.installed()
        self._rank.listen_to_traces()
        self._rank.rehearse()
        return ""

    def _accept(self, listener: socket.socket) -> None:
        host = Host(Channel(listener.accept()[0]))
        self.hosts.append(host)
        host.channel.send(**self._greeting)

    def _receive_from_host(self, host: Host) -> None:
        try:
            for message in host.channel.receive(0):
                self._handle(host, message)
        except ValueError:  # it was interrupted in the middle of a line
            host.channel.shut_down()
        if host.channel.closed and host is not self.first:
            self._drop(host)

    def _receive_from_member(self, host: Host, group: WorkerGroup, member: Member) -> None:
        if member.control.closed:  # a message handled just before has closed it
            return
        for message in member.control.receive(0):
            if message["op"] == "store":
                group.values.answer(member.control, message)
            elif message["op"] == "joined":
                member.state = "waiting"
            elif message["op"] == "finished" and group.number is not None:
                member.state = "waiting" if message["stays"] else "running"  # until it has ended
                self._late.update(message["late"])
                host.channel.send(op="finished", number=group.number, rank=member.rank, code=message["code"])

    def _handle(self, host: Host, message: dict[str, Any]) -> None:
        if message["op"] == "run":
            try:
                self._start(host, message["number"], Job.from_json(message["job"]))
            except Exception as error:  # no process, descriptor or disk space left; or a module that fails to import
                traceback.print_exc()
                reason = f"{type(error).__name__}: {error}"
                host.channel.send(op="refused", number=message["number"], reason=reason)
                return
            if message["ahead"] is not None and host.ahead is None:
                with contextlib.suppress(OSError):  # the next test's own start will report the error
                    run = Path(message["job"]["folder"]).parent
                    host.ahead = self._fork(host, GroupSpec(**message["ahead"]), run)
        elif host.current is not None and host.current.number == message["number"]:
            if message["op"] == "kill":
                host.current.pending = None
                host.current.kill()
            elif message["op"] == "signal":
                host.current.signal(message["rank"], message["signal"])

    def _start(self, host: Host, number: int, job: Job) -> None:
        if self._late:
            for module in sorted(self._late):
                importlib.import_module(module)
            self._late.clear()
            gc.freeze()
        try:
            prepare(job, self.items)
        except LookupError as error:
            why = next((text for at, text in self.failures.items() if at and job.nodeid.startswith(at)), "")
            reason = f"{error}, a new `python -m pytest`: {why}" if why else str(error)
            host.channel.send(op="refused", number=number, reason=reason)
            return
        stayed = host.current if host.current is not None and host.current.reuse else None
        if stayed is not None and stayed.is_waiting and job.reuse and stayed.fits(job):
            self._assign(host, stayed, number, job)
            return
        if stayed is not None:
            stayed.kill()
        ahead, host.ahead = host.ahead, None
        if ahead is not None and ahead.fits(job):
            ahead.number, ahead.pending, ahead.pending_since = number, job, monotonic()
            host.current = ahead
            self._settle(host, ahead)
            return
        if ahead is not None:
            ahead.kill()
        self._start_fresh(host, number, job)

    def _settle(self, host: Host, group: WorkerGroup) -> None:
        """Send a worker group that was forked ahead its job once it is ready; replace it if it fails or is late."""
        job, number = group.pending, group.number
        assert job is not None
        assert number is not None
        if group.is_waiting:
            self._assign(host, group, number, job)
        elif not group.is_whole or group.is_late:
            group.pending = group.number = None
            group.kill()
            self._start_fresh(host, number, job)

    def _assign(self, host: Host, group: WorkerGroup, number: int, job: Job) -> None:
        group.assign(number, job)
        host.current = group
        host.channel.send(op="started", number=number, pids=group.pids)

    def _start_fresh(self, host: Host, number: int, job: Job) -> None:
        group = self._fork(host, job.group_spec, Path(job.folder).parent, job)
        group.number, group.reuse = number, job.reuse if job.stay else ""
        host.current = group
        host.channel.send(op="started", number=number, pids=group.pids)

    def _fork(self, host: Host, spec: GroupSpec, run: Path, job: Job | None = None) -> WorkerGroup:
        """Fork a worker group: for ``job``, or for a job that it will receive."""
        self._count += 1
        folder = run / ".worker_groups" / f"{os.getpid()}-{self._count}"  # made by a rank that needs it
        group = WorkerGroup(spec, folder / "store", held=hold_ports())
        parent = os.getpid()
        host.groups.append(group)
        try:
            # Made before the fork: an object that a rank makes after it costs the copy of a page.
            ports = list_numbers(group.held)
            ranks = {
                rank: self._rank.RankProcess(rank, spec, group.store, self.items, ports=ports)
                for rank in spec.local_ranks
            }
            group.fork(lambda rank, control: self._become_rank(parent, ranks[rank], group, control, job), job)
        except OSError:
            group.kill()
            raise
        return group

    def _become_rank(self, parent: int, rank: Any, group: WorkerGroup, control: Channel, job: Job | None) -> None:
        """Run the rank and exit: whatever happens, the child must not continue as a zygote."""
        code = 70
        try:
            die_with(parent)
            os.setpgid(0, 0)
            # Python reseeds it in a fork; all ranks begin equal, as with torch's and numpy's.
            random.setstate(self._random)
            signal.set_wakeup_fd(-1)
            set_handler(signal.SIGCHLD, signal.SIG_DFL)
            set_handler(signal.SIGTERM, signal.SIG_DFL)
            for host in self.hosts:
                host.channel.socket.close()
                for other in host.groups:
                    for holder in other.held if other is not group else ():
                        holder.close()
                    for member in other.members.values():
                        member.control.socket.close()
            if self.listener is not None:
                self.listener.close()
            rank.control = control
            code = rank.run(job)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Report each rank that has ended, and end what it left running."""
        for host in self.hosts:
            for group in list(host.groups):
                for pid, member in group.members.items():
                    if member.state == "gone":
                        continue
                    # Until it is reaped, no other process can have its pid or its group.
                    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                        continue
                    kill_group(pid)
                    _, status = os.waitpid(pid, 0)
                    member.state = "gone"
                    member.control.shut_down()
                    if group.number is not None and group.pending is None:
                        host.channel.send(op="exited", number=group.number, rank=member.rank, status=status)
                if group.pending is not None:
                    self._settle(host, group)
                if all(m.state == "gone" for m in group.members.values()):
                    group.clean_up()
                    host.groups.remove(group)
        self._end_orphans()

    def _end_orphans(self) -> None:
        end_orphans(self._own | {pid for host in self.hosts for group in host.groups for pid in group.members})

    def _drop(self, host: Host) -> None:
        """End the ranks of a host that has disconnected."""
        for group in host.groups:
            group.kill()
            for pid, member in group.members.items():
                if member.state != "gone":
                    os.waitpid(pid, 0)
            group.clean_up()
        host.groups.clear()
        self._end_orphans()
        host.channel.shut_down()  # a socket that is not closed becomes a ResourceWarning in the next rank
        self.hosts.remove(host)


def by_nodeid(items: Iterable[pytest.Item]) -> dict[str, pytest.Item]:
    """Return items by their id, without the '@group' that xdist appends."""
    return {plain_nodeid(item.nodeid): item for item in items}


class ServeSession:
    """Registered in a clean child pytest: after collection it serves as the zygote instead of running tests."""

    def __init__(self, fd: int, listener_fd: int | None) -> None:
        self.first = socket.socket(fileno=fd)
        self.listener = socket.socket(fileno=listener_fd) if listener_fd is not None else None
        self.failures: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the error of a module that cannot be collected here, though the host could."""
        if report.failed:
            *_, last = report.longreprtext.strip().splitlines() or [""]
            self.failures[report.nodeid] = last.removeprefix("E").strip()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:

        Zygote(by_nodeid(session.items), self.first, self.listener, self.failures).serve()
        return True


class ColdSession:
    """Registered where the environment names a job: replaces the test loop."""

    def __init__(self, spec: Path) -> None:
        self.spec = spec

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        from pytest_nsa.rank.process import EXIT_FAILED, RankProcess, seed_alike

        data = json.loads(self.spec.read_text(encoding="utf-8"))
        job = Job.from_json(data["job"])
        code = EXIT_FAILED
        try:
            seed_alike(job.seed)
            write_lines_at_once()
            rank = RankProcess(
                data["rank"], job.group_spec, Path(job.folder) / "store", by_nodeid(session.items), ports=data["ports"]
            )
            code = rank.run(job)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
