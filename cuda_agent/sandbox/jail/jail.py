"""Puts a process into a jail before it runs untrusted code. Each protection of the jail is called a wall.

``enter`` sets up the walls: no_new_privs, Landlock, a seccomp filter and, as root, a separate user. It also sets
resource limits, and it needs no privilege. Landlock restricts files, and in newer versions of Linux also TCP, device
ioctls, signals and abstract sockets. The jailed process ends with its parent. ``prove`` starts a jailed child that
attacks every wall in ``WALLS``. ``python jail.py POLICY PROGRAM ...`` runs a program in the jail.

The module uses only the standard library. It uses no namespaces, because restricted pods do not allow them."""

import ctypes
import errno
import json
import os
import resource
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

WALLS = ("no_new_privs", "landlock", "seccomp", "own_user")
SYSTEM_READ = (
    "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives",
    "/dev/null", "/dev/zero", "/dev/urandom", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu",
    "/sys/devices/system/clocksource",
)  # fmt: skip
SYSTEM_EXECUTE = ("/usr", "/bin", "/lib", "/lib64")
# Python and its packages: a path file may name a folder outside of Python's own.
PYTHON = tuple(dict.fromkeys([sys.prefix, sys.base_prefix, *(p for p in sys.path if p.endswith("-packages"))]))
# A worker's user id is this plus its process id. It is unique, so no other process counts toward the user's limits.
_FIRST_UID = 1_000_000


class JailError(RuntimeError):
    """A wall (a protection of the jail) cannot be set up or tested, or does not hold. The message says what failed."""

    exit_code = 78  # as in ``errors``, which this stand-alone program does not import


@dataclass(frozen=True)
class JailPolicy:
    """The access that a jail allows. The path of a folder includes the folder's contents. Paths that do not exist are
    ignored."""

    read: Sequence[str] = SYSTEM_READ
    write: Sequence[str] = ()  # also readable; the separate user, if there is one, becomes the owner
    execute: Sequence[str] = ()  # empty: the process may start threads, but no programs or processes
    memory_mb: int = 2048  # limit of private writable memory beyond the current use; 0: no limit
    processes: int = 64  # most processes and threads of the separate user
    file_mb: int = 64  # largest file that the process may write
    cpu_seconds: int = 600
    one_group: bool = False  # children stay in the process group, so one signal ends them all
    own_user: bool = True  # as root: change to a separate, ordinary user
    read_any: bool = False  # the separate user may read other users' files in ``read``, such as Python in a home
    shared_memory: bool = False  # allows anonymous shared memory, which no limit counts; the CUDA driver needs it


def enter(policy: JailPolicy) -> None:
    """Puts the calling process into a jail permanently. Other threads of the process, such as those of the CUDA driver,
    get the separate user and the seccomp filter, but not the limits of Landlock. Leaves out a protection that this
    machine lacks; ``prove`` finds such gaps. Raises ``JailError`` if another protection cannot be set up."""
    parent = os.getppid()
    _limits(policy)
    if policy.own_user and os.geteuid() == 0:
        _become_own_user(policy)
    _libc_call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after the change of user, which clears the signal
    if os.getppid() != parent:
        os._exit(1)
    _libc_call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _landlock(policy)
    _seccomp(policy)


def narrow(policy: JailPolicy) -> None:
    """Restricts the calling process, which is already in a jail, further to the paths of ``policy``. If this version of
    Landlock can restrict signals, also forbids signals to processes outside of the new jail. The other protections stay
    as they are. Does nothing without Landlock. Raises ``JailError`` if Landlock fails."""
    _landlock(policy)


def command(policy: JailPolicy, program: Iterable[str]) -> list[str]:
    """Returns the command line that runs ``program`` in the jail; the caller sets environment and descriptors."""
    return [sys.executable, "-I", "-S", __file__, json.dumps(asdict(policy)), *program]


def prove(required: Iterable[str], folder: "Path") -> dict[str, str]:
    """Starts a jailed child that attacks every wall (protection of the jail), for example by reading a file in
    ``folder``. Returns the failed walls, each with a text that says which attack succeeded. Raises ``JailError`` if a
    wall in ``required`` failed or is unknown, if no jail can be set up, or if the child takes longer than 30 s."""
    import subprocess  # imported here, because every import slows down each jailed start

    if unknown := set(required) - set(WALLS):
        names = ", ".join(sorted(unknown))
        raise JailError(f"sandbox.required_walls: no such wall: {names} (there are {', '.join(WALLS)})")
    canary = folder / "canary"
    canary.write_text("secret")
    canary.chmod(0o644)
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", __file__, "--attack", str(canary)],
            env={}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise JailError("the test of the jail took more than 30 s: the machine is too busy") from None
    finally:
        canary.unlink()
    if child.returncode != 0:
        raise JailError(f"the jail cannot be closed here: {child.stderr.strip().rpartition(chr(10))[2]}")
    breaches: dict[str, str] = json.loads(child.stdout)
    require(breaches, required)
    return breaches


def require(breaches: dict[str, str], required: Iterable[str]) -> None:
    """Raises ``JailError`` if ``breaches``, the result of ``prove``, holds a wall in ``required``."""
    for wall in required:
        if wall in breaches:
            raise JailError(f"the wall {wall!r} is missing: a jailed process {breaches[wall]}")


# ---------------------------------------------------------------------------------------------------- user and limits

_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS, _PR_GET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 8, 38, 39, 22
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH = 47, 2, 2
_libc = ctypes.CDLL(None, use_errno=True)


def _libc_call(name: str, *arguments: object) -> int:
    result = int(getattr(_libc, name)(*arguments))
    if result < 0:
        raise JailError(f"{name}{arguments[:1]}: {os.strerror(ctypes.get_errno())}")
    return result


def _limits(policy: JailPolicy) -> None:
    def limit(which: int, value: int) -> None:
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))

    present = 0
    try:
        with open("/proc/self/status") as file:
            present = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))
    except (OSError, StopIteration):
        pass
    limit(resource.RLIMIT_CORE, 0)
    if policy.memory_mb:
        limit(resource.RLIMIT_DATA, present + (policy.memory_mb << 20))
    limit(resource.RLIMIT_FSIZE, policy.file_mb << 20)
    limit(resource.RLIMIT_NOFILE, 256)
    limit(resource.RLIMIT_CPU, policy.cpu_seconds)
    if os.geteuid() == 0 and policy.own_user:
        limit(resource.RLIMIT_NPROC, policy.processes)


def _become_own_user(policy: JailPolicy) -> None:
    uid = _FIRST_UID + os.getpid()
    for path in policy.write:
        if os.path.isdir(path):
            os.chown(path, uid, uid)
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        if policy.read_any:
            _libc_call("prctl", _PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setresuid(uid, uid, uid)
    except OSError:
        return  # a user namespace with few ids; the proof reports the missing wall
    if policy.read_any:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        bit = 1 << _CAP_DAC_READ_SEARCH
        _libc_call("capset", header, (ctypes.c_uint32 * 6)(bit, bit, bit, 0, 0, 0))
        _libc_call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH, 0, 0)  # survives exec


# ----------------------------------------------------------------------------------------------------------- Landlock

_FILE_EXECUTE, _FILE_WRITE, _FILE_READ, _DIR_READ, _TRUNCATE, _IOCTL_DEV = (1 << bit for bit in (0, 1, 2, 3, 14, 15))
_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_ON_FILES = _FILE_EXECUTE | _FILE_WRITE | _FILE_READ | _TRUNCATE | _IOCTL_DEV


def landlock_abi() -> int:
    """Returns the version of the Landlock ABI on this machine, or 0 if Landlock is missing."""
    return max(0, int(_libc.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def _landlock(policy: JailPolicy) -> None:
    abi = landlock_abi()
    if not abi:
        return  # the proof names the missing wall
    handled = _RIGHTS_BY_ABI[max(version for version in _RIGHTS_BY_ABI if version <= abi)]
    attributes = (ctypes.c_uint64 * 3)(handled, 0b11 if abi >= 4 else 0, 0b11 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _libc_call("syscall", 444, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))
    read = _FILE_READ | _DIR_READ
    for paths, rights in (
        (policy.read, read),
        (policy.execute, read | _FILE_EXECUTE),
        (policy.write, handled & ~_FILE_EXECUTE),
        (("/dev/null",), read | _FILE_WRITE),
    ):
        for path in paths:
            _allow(ruleset, path, rights & handled)
    _libc_call("syscall", 446, ruleset, ctypes.c_uint32(0))
    os.close(ruleset)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _ON_FILES
        rule = _PathBeneath(rights, descriptor)
        _libc_call("syscall", 445, ruleset, 1, ctypes.byref(rule), ctypes.c_uint32(0))
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------------------ seccomp

# Numbers above 423 are the same on both architectures.
_SAME = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434, "clone3": 435,
    "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "memfd_secret": 447, "process_mrelease": 448,
    "cachestat": 451, "fchmodat2": 452,
}  # fmt: skip
_NUMBERS_OF_BOTH = {  # x86_64, aarch64
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242),
    "bind": (49, 200), "listen": (50, 201), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "bpf": (321, 280), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "memfd_create": (319, 279), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186),
    "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    "fcntl": (72, 25), "ioctl": (16, 29), "mmap": (9, 222), "mq_open": (240, 180), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "seccomp": (317, 277), "personality": (135, 92), "acct": (163, 89),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161),
    "setdomainname": (171, 162), "quotactl": (179, 60), "fanotify_init": (300, 262), "syslog": (103, 116),
    "vhangup": (153, 58), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "tkill": (200, 130),
    "kill": (62, 129), "tgkill": (234, 131), "prctl": (157, 167), "clone": (56, 220), "execve": (59, 221),
    "execveat": (322, 281), "migrate_pages": (256, 238), "move_pages": (279, 239), "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "setpriority": (141, 140), "ioprio_set": (251, 30), "setsid": (112, 157),
    "setpgid": (109, 154), "fchmod": (91, 52), "fchmodat": (268, 53), "fchown": (93, 55), "fchownat": (260, 54),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
_ONLY_X86_64 = {
    "inotify_init": 253, "iopl": 172, "ioperm": 173, "fork": 57, "vfork": 58, "chmod": 90, "chown": 92, "lchown": 94,
    "utime": 132, "utimes": 235, "futimesat": 261,
}  # fmt: skip
_NUMBERS = {
    "x86_64": _SAME | _ONLY_X86_64 | {name: number for name, (number, _) in _NUMBERS_OF_BOTH.items()},
    "aarch64": _SAME | {name: number for name, (_, number) in _NUMBERS_OF_BOTH.items()},
}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_OF_A_PROCESS = ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
# Landlock does not restrict these calls: as the judge's user, a worker could change the modes of the judge's files.
_OF_FILES = {
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "utime", "utimes", "futimesat",
    "utimensat", "setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr",
}  # fmt: skip
_SPECIAL = _OF_FILES | {
    "clone", "clone3", "kill", "tgkill", "tkill", "prctl", "fork", "vfork", "execve", "execveat", "setpriority",
    "setsid", "setpgid", "fcntl", "ioctl", "mmap", *_OF_A_PROCESS,
}  # fmt: skip
# A ready file signals its owner past the filter of signals: F_SETOWN(_EX), F_SETSIG, F_NOTIFY, FIOASYNC, SIOCSPGRP ...
_F_SETFL, _F_SETOWN, _F_SETSIG, _O_ASYNC, _MAP_SHARED, _MAP_ANONYMOUS = 4, 8, 10, 0o20000, 1, 0x20
_OF_SIGNALS = {"fcntl": (_F_SETOWN, _F_SETSIG, 15, 1026), "ioctl": (0x5452, 0x8901, 0x8902)}
_NEW_NAMESPACES, _CLONE_THREAD = 0x7E020000, 0x00010000
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF opcodes on 32-bit words
# Offsets in struct seccomp_data (of arguments: the low halves, little-endian).
_NR, _ARCH, _ARG0, _ARG1, _ARG2, _ARG3 = 0, 4, 16, 24, 32, 40

_Instruction = tuple[int, int, int, int]  # opcode, jump if true, jump if false, operand


def filter_program(
    machine: str, processes: bool, pid: int, one_group: bool = False, shared_memory: bool = False
) -> list[_Instruction]:
    """Returns a seccomp filter as BPF instructions for ``machine`` (``x86_64`` or ``aarch64``). It refuses or restricts
    the system calls in ``_NUMBERS`` and allows all others. If ``processes``, the jailed process may fork and run
    programs. Otherwise it may only start threads, and may send signals only to itself (``pid`` is its process id).
    ``JailPolicy`` explains ``one_group`` and ``shared_memory``."""
    numbers = _NUMBERS[machine]
    refuse = (_RETURN, 0, 0, _REFUSE | errno.EPERM)
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
        (_AT_LEAST, 0, 1, 0x40000000),  # the x32 calling convention has its own numbers
        (_RETURN, 0, 0, _KILL),
    ]

    def on(name: str, *body: _Instruction) -> None:
        if name in numbers:
            program.extend([(_EQUAL, 0, len(body), numbers[name]), *body])

    for name in numbers:
        if name not in _SPECIAL or (name == "setsid" and one_group):
            on(name, refuse)
    if one_group:  # ninja fails if it cannot set a group for each compiler, so the call only pretends to succeed
        on("setpgid", (_RETURN, 0, 0, _REFUSE | 0))
    on("clone3", (_RETURN, 0, 0, _REFUSE | errno.ENOSYS))  # its flags are behind a pointer; libc falls back to clone
    allow = (_RETURN, 0, 0, _ALLOW)
    flags = (_LOAD, 0, 0, _ARG0)
    on("prctl", flags, (_EQUAL, 1, 0, _PR_SET_SECCOMP), (_EQUAL, 0, 1, _PR_SET_PDEATHSIG), refuse, allow)
    asynchronous = ((_EQUAL, 0, 3, _F_SETFL), (_LOAD, 0, 0, _ARG2), (_ANY_BIT, 0, 1, _O_ASYNC), refuse)
    for name, commands in _OF_SIGNALS.items():
        body = [line for command in commands for line in ((_EQUAL, 0, 1, command), refuse)]
        on(name, (_LOAD, 0, 0, _ARG1), *body, *(asynchronous if name == "fcntl" else ()), allow)
    if not shared_memory:
        both = (_ANY_BIT, 0, 2, _MAP_ANONYMOUS), (_ANY_BIT, 0, 1, _MAP_SHARED)
        on("mmap", (_LOAD, 0, 0, _ARG3), *both, refuse, allow)
    if not processes:  # more processors would be an unfair advantage over the baselines
        on("sched_setaffinity", refuse)
    for name in _OF_A_PROCESS:  # a process may change itself only: it could starve or kill another of its user
        on(name, flags, (_EQUAL, 0, 1, 0), allow, refuse)
    on("setpriority", flags, (_EQUAL, 0, 3, 0), (_LOAD, 0, 0, _ARG1), (_EQUAL, 0, 1, 0), allow, refuse)
    if processes:
        on("clone", flags, (_ANY_BIT, 0, 1, _NEW_NAMESPACES), refuse, allow)
    else:
        on("clone", flags, (_ANY_BIT, 0, 1, _CLONE_THREAD), allow, refuse)
        for name in ("fork", "vfork", "execve", "execveat", "tkill", *sorted(_OF_FILES)):
            on(name, refuse)
        for name in ("kill", "tgkill"):
            on(name, (_LOAD, 0, 0, _ARG0), (_EQUAL, 0, 1, pid), allow, refuse)
    return [*program, allow]


class _Filter(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def _seccomp(policy: JailPolicy) -> None:
    machine = os.uname().machine
    if machine not in _NUMBERS:
        return  # the proof names the missing wall
    program = filter_program(machine, bool(policy.execute), os.getpid(), policy.one_group, policy.shared_memory)
    code = b"".join(
        op.to_bytes(2, "little") + bytes((yes, no)) + operand.to_bytes(4, "little") for op, yes, no, operand in program
    )
    every_thread = 1  # the CUDA driver has started some
    number, install = ctypes.c_long(_NUMBERS[machine]["seccomp"]), ctypes.c_uint(1)
    if _libc_call("syscall", number, install, ctypes.c_uint(every_thread), ctypes.byref(_Filter(len(program), code))):
        raise JailError("seccomp: a thread of this process has a filter of its own")


# -------------------------------------------------------------------------------------------------------------- proof


def _attacks(canary: str, parent: int) -> dict[str, str]:
    import socket

    breaches: dict[str, str] = {}

    def attempt(wall: str, what: str, action: object) -> None:
        try:
            result = action()  # type: ignore[operator]
        except OSError:
            return
        if result is not False:
            breaches.setdefault(wall, what)

    def call(number: str, *arguments: object) -> object:
        return _libc.syscall(_NUMBERS[os.uname().machine][number], *arguments) >= 0

    if _libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        breaches["no_new_privs"] = "may gain privileges"
    attempt("landlock", "read a file outside its folders", lambda: os.close(os.open(canary, os.O_RDONLY)))
    attempt("landlock", "wrote a file", lambda: os.close(os.open(canary + "2", os.O_WRONLY | os.O_CREAT)))
    attempt("landlock", "read its parent's environment", lambda: os.open(f"/proc/{parent}/environ", os.O_RDONLY))
    attempt("landlock", "opened its parent's memory", lambda: os.open(f"/proc/{parent}/mem", os.O_RDWR))
    if os.uname().machine not in _NUMBERS:
        breaches["seccomp"] = f"is not filtered on {os.uname().machine}"
    else:
        attempt("seccomp", "opened a socket", lambda: socket.socket().close())
        attempt("seccomp", "sent a signal to its parent", lambda: os.kill(parent, 0))
        attempt("seccomp", "forked", lambda: os.fork() or os._exit(0))
        try:
            os.execv("/nonexistent", ["nonexistent"])
        except PermissionError:
            pass  # the filter refuses before the path is looked at
        except OSError:
            breaches.setdefault("seccomp", "may run programs")
        uncounted = None, 4096, 3, _MAP_SHARED | _MAP_ANONYMOUS, -1, 0
        attempt("seccomp", "made memory that no limit counts", lambda: _libc.mmap(*uncounted) != -1)
        file, owned = os.pipe()[0], "may send signals to its parent as the owner of a file"
        buffer = ctypes.create_string_buffer(8)
        vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
        for what, name, arguments in (
            ("traced its parent", "ptrace", (0x4206, parent, 0, 0)),
            ("read its parent's memory", "process_vm_readv", (parent, vector, 1, vector, 1, 0)),
            ("made a user namespace", "unshare", (0x10000000,)),
            ("set up io_uring", "io_uring_setup", (4, ctypes.create_string_buffer(120))),
            ("made a memory file", "memfd_create", (b"x", 0)),
            (owned, "fcntl", (file, _F_SETSIG, signal.SIGCONT)),
            (owned, "fcntl", (file, _F_SETOWN, parent)),
            (owned, "fcntl", (file, _F_SETFL, _O_ASYNC)),
            (owned, "ioctl", (file, _OF_SIGNALS["ioctl"][0], ctypes.byref(ctypes.c_int(1)))),
            ("watched a folder of others", "inotify_init1", (0,)),
            ("asked for the machine's semaphores", "semctl", (0, 0, 3, ctypes.create_string_buffer(128))),
            ("opened a performance counter", "perf_event_open", (ctypes.create_string_buffer(128), 0, -1, -1, 0)),
        ):
            attempt("seccomp", what, lambda name=name, arguments=arguments: call(name, *arguments))
    return breaches


def _main() -> None:
    if sys.argv[1] == "--attack":
        import socket  # noqa: F401  # while files can still be read

        parent = os.getppid()
        uid = os.stat(f"/proc/{parent}").st_uid
        enter(JailPolicy())
        breaches = _attacks(sys.argv[2], parent)
        if os.geteuid() == uid:
            breaches["own_user"] = "runs as the user of its judge"
        print(json.dumps(breaches), flush=True)
        os._exit(0)
    enter(JailPolicy(**json.loads(sys.argv[1])))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as failure:
        print(f"{sys.argv[2]}: {failure.strerror}", file=sys.stderr)
        os._exit(127)


if __name__ == "__main__":
    _main()
