"""The warden: runs one command and takes its whole process tree down when its holder dies or says so.

It uses the standard library only, in one file with Python 3.8 syntax, so that the host's own ``python3`` can run it
(``python3 -I -S warden.py …`` or as text with ``-c``). It must never kill a process that is not its own descendant,
and never end while one of them lives.

How it knows: it is a child subreaper, so every orphan of the tree becomes its child; ``waitpid`` answering ECHILD is
the only proof of "all gone" that it takes. How it hears: stdin is a dead man's switch (EOF: the holder is dead), and
it watches its parent, because a forked child of the holder may keep the pipe open. Lines on stdin: ``TERM <grace>``
and ``KILL``. Lines on stdout are JSON objects with the key ``event``:

- ``started``: ``pid``, ``start_time`` (clock ticks since boot), ``warden``
- ``error``: ``message``; the command could not be started
- ``exit``: ``pid``, ``code`` (−N for signal N), ``t`` (epoch); the main process ended, orphans may still be dying
- ``stuck``: ``pids`` that SIGKILL has not ended after ten seconds (state D, or another user's)
- ``gone``: ``leftovers`` (how many processes needed SIGKILL), ``t``; nothing of the tree is left

An ordinary ``TERM`` goes to the main process alone, so that it can drain its children itself. Orphans of an ended main
process, and everybody once the holder is dead, get TERM and two seconds.

An order may name an ``end``: a command that is run once nothing of the tree is left, in every case, and before ``gone``
is said. It ends what is no descendant of ours: a container. What starts one needs no grace when the holder is dead.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ORPHAN_GRACE_S = 2.0
TICK_S = 0.05
STUCK_AFTER_S = 10.0
CHASE_S = 0.25
#: How long an order's ``end`` may take.
END_S = 30.0


class Proc(NamedTuple):
    """One process as /proc/PID/stat shows it; (pid, start) is unique until the next boot of the machine."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    state: str
    start: int

    @property
    def dead(self) -> bool:
        """Whether it has ended and only waits to be reaped: it holds no memory, no file, no lock."""
        return self.state in "ZXx"


def read_proc(pid: int) -> Proc | None:
    """The process as it is now, or None when there is none (or /proc hides it)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return Proc(pid, int(fields[1]), int(fields[2]), int(fields[3]), fields[0].decode(), int(fields[19]))
    except (OSError, IndexError):
        return None


def descendants(root: int) -> dict[int, Proc]:
    """Every process below ``root`` by pid, zombies included; ``root`` itself is not."""
    children: dict[int, list[Proc]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            proc = read_proc(int(name))
            if proc is not None:
                children.setdefault(proc.ppid, []).append(proc)
    found: dict[int, Proc] = {}
    todo = [root]
    while todo:
        for proc in children.get(todo.pop(), []):
            if proc.pid not in found and proc.pid != root:
                found[proc.pid] = proc
                todo.append(proc.pid)
    return found


def send_signal(proc: Proc, number: int) -> bool:
    """Signal exactly this process: never a stranger that was given the same pid since. True when it was sent."""
    handle = -1
    try:
        if hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal"):
            try:
                handle = os.pidfd_open(proc.pid)
            except ProcessLookupError:
                return False
            except OSError:  # kernel < 5.3, or forbidden by a container's seccomp profile
                handle = -1
        now = read_proc(proc.pid)  # read after the handle is open: what it names cannot change any more
        if now is None or now.start != proc.start or now.dead:
            return False
        if handle >= 0:
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(proc.pid, number)
        return True
    except OSError:  # gone in between, or another user's (a setuid program in the tree)
        return False
    finally:
        if handle >= 0:
            os.close(handle)


def kill_groups(procs: Sequence[Proc], spare: set[int]) -> None:
    """SIGKILL every process group that a member of the tree made: atomic, so that no fork slips through.

    A group belongs to one session, and the server leads a session of its own: nobody else can be in it. Groups in
    ``spare`` are left out.
    """
    for pgid in {proc.pgid for proc in procs} - spare - {0, 1}:
        for proc in procs:
            now = read_proc(proc.pid) if proc.pgid == pgid else None
            if now is not None and now.start == proc.start and now.pgid == pgid:
                try:
                    os.killpg(pgid, signal.SIGKILL)
                except OSError:
                    pass
                break


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process (the Linux call of that name); raises OSError."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


class Ears:
    """All that the warden hears: lines of its holder, the holder's death, ended children, signals."""

    def __init__(self, holder: int) -> None:
        self.holder = holder
        self.dead = False
        self.lines: list[str] = []
        self._rest = b""
        self._stdin_open = True
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        # Handlers and not SIG_IGN: exec resets a handler to the default, but hands an ignored signal on to the server.
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTSTP):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, self._terminated)

    def _terminated(self, *_: Any) -> None:
        self.dead = True

    def listen(self, seconds: float) -> None:
        """Wait until something is heard, at most so long."""
        watched = [self._wake_read] + ([0] if self._stdin_open else [])
        ready = select.select(watched, [], [], max(0.0, seconds))[0]
        if self._wake_read in ready:
            try:
                os.read(self._wake_read, 4096)
            except OSError:
                pass
        if 0 in ready:
            try:
                data = os.read(0, 65536)
            except OSError:
                data = b""
            if data:
                parts = (self._rest + data).split(b"\n")
                self._rest = parts.pop()
                self.lines += [part.decode("utf-8", "surrogateescape") for part in parts]
            else:
                self._stdin_open = False
                self.dead = True
        if os.getppid() != self.holder:
            self.dead = True


class Warden:
    """One command and everything that came of it."""

    def __init__(self, ears: Ears, say: Callable[..., None]) -> None:
        self.ears = ears
        self.say = say
        self.main = 0
        self.main_gone = False
        self.deadline: float | None = None
        self.killing_since: float | None = None
        self.killed: set[tuple[int, int]] = set()
        self.told = False  # everybody was sent TERM
        self.complained = False
        self.end: list[str] = []  # what is still to be run at the end
        self.ending = False
        self.ender: tuple[dict[str, str] | None, int, list[int]] = (None, 2, [])  # environment, log, descriptors

    def start(self, argv: list[str], env: dict[str, str] | None, cwd: str | None, log: int, hold: list[int]) -> bool:
        """Start the command in a session of its own; False (and an ``error`` line) when that cannot be."""
        import subprocess

        warden = os.getpid()

        def in_child() -> None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed warden takes the server along
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            if os.getppid() != warden:
                os._exit(255)

        try:
            server = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                cwd=cwd,
                start_new_session=True,
                pass_fds=hold,
                preexec_fn=in_child,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            if isinstance(error, OSError) and error.strerror:
                reason = error.strerror
                if cwd is not None and not os.path.isdir(cwd):
                    reason += f" (working directory {cwd!r})"
            else:
                reason = str(error)
            self.say("error", message=f"cannot start {argv[0]!r}: {reason}")
            return False
        self.main = server.pid
        server.returncode = 0  # this file reaps by itself: Popen must not
        self.ender = (env, log, hold)
        proc = read_proc(server.pid)
        self.say("started", pid=server.pid, start_time=proc.start if proc else None, warden=warden)
        return True

    def guard(self) -> None:
        """Return when nothing of the tree is left."""
        while self.reap() or self.finish():
            now = time.monotonic()
            self.obey(now)
            wait = TICK_S
            if self.killing_since is not None:
                fresh = self.kill_all()
                # A storm of forks is outrun without a pause; what SIGKILL does not end is tried again more slowly.
                wait = 0.0 if fresh else (TICK_S if now - self.killing_since < 5 else 0.5)
                self.complain(now)
            elif self.deadline is not None:
                wait = min(wait, self.deadline - now)
            self.ears.listen(wait)
        self.say("gone", leftovers=len(self.killed), t=time.time())

    def reap(self) -> bool:
        """Collect the ended; False once there is no child left: the one proof that the tree is gone."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.main and not self.main_gone:
                self.main_gone = True
                code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                self.say("exit", pid=pid, code=code, t=time.time())

    def obey(self, now: float) -> None:
        """Turn what was heard into deadlines. A deadline only ever comes nearer."""
        lines, self.ears.lines = self.ears.lines, []
        for line in lines if not self.ending else []:  # the end is not cut short: it is what KILL is for
            words = line.split()
            if words[:1] == ["KILL"]:
                self.end_by(now)
            elif words[:1] == ["TERM"]:
                try:
                    grace = float(words[1])
                except (IndexError, ValueError):
                    grace = 10.0
                if self.deadline is None and not self.main_gone:
                    main = read_proc(self.main)
                    if main is not None:
                        send_signal(main, signal.SIGTERM)
                self.end_by(now + grace)
        if (self.ears.dead or self.main_gone) and not self.told:
            self.told = True
            self.end_by(now + (0.0 if self.end and self.ears.dead else ORPHAN_GRACE_S))
            for proc in descendants(os.getpid()).values():
                send_signal(proc, signal.SIGTERM)
        if self.deadline is not None and now >= self.deadline and self.killing_since is None:
            self.killing_since = now
            try:
                os.nice(-10)  # if we may: a storm of forks takes all the time that it can get
            except OSError:
                pass

    def finish(self) -> bool:
        """Run the order's ``end``, once: True when it was started."""
        import subprocess

        if not self.end:
            return False
        command, self.end = self.end, []
        env, log, hold = self.ender
        self.ending = self.told = True
        self.deadline, self.killing_since = time.monotonic() + END_S, None
        try:
            ender = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
                pass_fds=hold,
            )
        except (OSError, ValueError, subprocess.SubprocessError):
            traceback.print_exc()
            return False
        ender.returncode = 0  # reaped like the others
        return True

    def end_by(self, moment: float) -> None:
        """SIGKILL is due at this moment, or sooner if it was before."""
        self.deadline = moment if self.deadline is None else min(self.deadline, moment)

    def kill_all(self) -> bool:
        """One pass of SIGKILL over the tree; True when it met a process for the first time."""
        before = len(self.killed)
        listed = set(os.listdir("/proc"))
        procs = [proc for proc in descendants(os.getpid()).values() if not proc.dead]
        self.killed.update((proc.pid, proc.start) for proc in procs)
        kill_groups(procs, {os.getpgrp()})
        for proc in procs:
            send_signal(proc, signal.SIGKILL)
        self.chase(listed)
        return len(self.killed) > before

    def chase(self, listed: set[str]) -> None:
        """Kill what was born since ``listed``, as long as there is something, at most CHASE_S.

        A process that forks, ends and goes on in the child's new session is somewhere else before a walk over all of
        /proc has come to its end. Its latest child is ours by then (or of one that we have just killed): looking at
        nothing but new pids, and shooting at sight, is faster than such a hop.
        """
        me = os.getpid()
        end = time.monotonic() + CHASE_S
        idle = 0
        while idle < 3 and time.monotonic() < end:
            born = [name for name in os.listdir("/proc") if name not in listed]
            listed.update(born)
            idle += 1
            for name in reversed(born):
                proc = read_proc(int(name)) if name.isdigit() else None
                if proc is None or (proc.ppid != me and not any(proc.ppid == pid for pid, _ in self.killed)):
                    continue
                idle = 0
                if not proc.dead:
                    self.killed.add((proc.pid, proc.start))
                    if proc.ppid == me:
                        try:
                            os.kill(proc.pid, signal.SIGKILL)  # we have not reaped it: the pid is still its own
                        except OSError:
                            pass  # a setuid program
                    else:
                        send_signal(proc, signal.SIGKILL)
                    kill_groups([proc], {os.getpgrp()})

    def complain(self, now: float) -> None:
        """Say once which processes SIGKILL does not end."""
        if self.complained or self.killing_since is None or now - self.killing_since < STUCK_AFTER_S:
            return
        stuck = [proc.pid for proc in descendants(os.getpid()).values() if not proc.dead]
        if stuck:
            self.complained = True
            self.say("stuck", pids=stuck)


def say(event: str, **facts: Any) -> None:
    """Write one status line; a holder that is dead no longer reads it, which is no error."""
    line = json.dumps(dict(facts, event=event)) + "\n"
    try:
        os.write(1, line.encode())
    except OSError:
        pass


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="warden", description="Run one command; end its whole tree with the holder.")
    parser.add_argument("--holder", type=int, help="pid whose death ends the tree (default: the parent at the start)")
    parser.add_argument("--log", help="append the command's output, stdout and stderr merged, to this file")
    parser.add_argument("--log-fd", type=int, help="the same with an inherited descriptor")
    parser.add_argument("--cwd", help="working directory of the command")
    parser.add_argument(
        "--order",
        action="store_true",
        help='the first line of stdin says what to run: {"argv": […], "env": {…}, "cwd": …}; the command is then on no '
        "command line but its own, and nothing runs if the holder dies before it has said all",
    )
    parser.add_argument("--hold", default="", help="inherited descriptors, comma separated: kept open until the end")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if bool(options.command) == options.order:
        parser.error("give a command, or --order")
    return options


def run(arguments: Sequence[str]) -> int:
    """The warden's life; 0 when nothing of the tree is left, 1 when the command could not be started."""
    parent = os.getppid()
    options = parse(arguments)
    ears = Ears(parent if options.holder is None else options.holder)
    hold = [int(number) for number in options.hold.split(",") if number]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    argv, env, cwd = options.command, None, options.cwd
    end: list[str] = []
    if options.order:
        while not ears.lines and not ears.dead:
            ears.listen(TICK_S)
        if not ears.lines:
            return 1  # the holder died before it had said all: nothing was started
        order = json.loads(ears.lines.pop(0))
        argv, env, cwd, end = order["argv"], order.get("env"), order.get("cwd"), order.get("end") or []
    if ears.dead:
        return 1
    log = 2 if options.log_fd is None else options.log_fd
    if options.log is not None:
        try:
            log = os.open(options.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            say("error", message=f"cannot write the log {options.log!r}: {error.strerror}")
            return 1
    warden = Warden(ears, say)
    warden.end = end
    if not warden.start(argv, env, cwd, log, hold):
        return 1
    while True:
        try:
            warden.guard()
            return 0
        except Exception:  # no memory, no descriptor left, a bug: the tree must not outlive that
            traceback.print_exc()
            ears.dead = True
            time.sleep(TICK_S)


if __name__ == "__main__":
    os._exit(run(sys.argv[1:]))
