"""What a command sees and may change when it runs in bubblewrap: the mounts, and whether they work here.

The system is read-only, the roots are writable, everything else is not there: no home but an empty
one (unless a root contains it), no sockets of the session, no keys of the kernel's keyrings
(`_seccomp`), no other processes, no network. Leaves the process in it to `_launched` and `_inside`,
its environment but for what names a hidden place to `_terminals`.

What is shown of the system is a list, so that what nobody has thought of is hidden. Roots are bound
by descriptor: bubblewrap looks whether what it has bound is what the descriptor is, and gives up if
somebody has exchanged it meanwhile.

Where we are root, so is the command, without any capability. What root owns outside it cannot reach
but for the six device nodes: it can change their modes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from antiphon._launch import inherit_env
from antiphon.services._seccomp import without_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from antiphon._launch import StrPath

__all__ = ["Box", "below", "interpreter"]

#: Of the system this is shown, read-only, where it exists.
SYSTEM: Final = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/sys"),
    *("/nix", "/gnu", "/snap", "/run/current-system", "/run/opengl-driver"),
    *("/var/lib/ca-certificates", "/var/lib/alternatives"),
)
#: These lead to what belongs to the user's session, which a command in a sandbox is no part of.
SESSION_VARIABLES: Final = (
    *("DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "XDG_RUNTIME_DIR"),
    *("SSH_AUTH_SOCK", "SSH_AGENT_PID", "GPG_AGENT_INFO", "DOCKER_HOST", "TMUX", "STY"),
)
#: A sandbox is made within some 30 ms; one that is not is none.
PROBE_SECONDS: Final = 10.0

# It is the first process, what was bound by descriptor is there, the system cannot be written; and
# the interpreter has what `_inside.stand_apart` needs.
_PROBE: Final = """
import ctypes, os
ctypes.CDLL(None).prctl
print(os.getpid(), os.path.isdir("/tmp/bound/bin"), os.statvfs("/usr").f_flag & os.ST_RDONLY)
print(os.readlink("/proc/self/ns/net"))
"""
_SETTINGS: Final = (
    "user.max_user_namespaces, kernel.unprivileged_userns_clone,"
    " kernel.apparmor_restrict_unprivileged_userns"
)
_HINTS: Final = (
    (
        "bind-fd",
        "it cannot bind by descriptor, which came with a security fix in 2024: update bubblewrap",
    ),
    ("namespace", f"this kernel or container lets this user make none: see {_SETTINGS}"),
    ("ctypes", "the Python that begins each command lacks a part of its standard library"),
    ("uid map", f"this kernel lets this user make none that holds: see {_SETTINGS}"),
)

# What has been found to work, by everything that could make a difference.
_works: set[tuple[str, str, bool]] = set()


def interpreter() -> str:
    """The Python that runs `_inside`: ours, outside of its virtual environment.

    Raises:
        NotImplementedError: there is none (an application frozen into one file).
    """
    own = getattr(sys, "_base_executable", None) or sys.executable
    found = None if getattr(sys, "frozen", False) else own
    found = found or shutil.which("python3")
    if not found:
        raise NotImplementedError("a pty or a sandbox needs a Python interpreter, and none is here")
    return os.path.realpath(found)


class Box:
    """A sandbox as it is made for each command.

    Args:
        network: leave it the network of this machine.
        visible: further files and directories that are shown, read-only.

    Raises:
        NotImplementedError: no sandbox can be made here; the text says what is missing.
        OSError: something in `visible` does not exist.
    """

    def __init__(self, *, network: bool = False, visible: Iterable[StrPath] = ()) -> None:
        if sys.platform != "linux":
            raise NotImplementedError('confine="bwrap" needs Linux')
        program = shutil.which("bwrap")
        if program is None:
            raise NotImplementedError(
                'confine="bwrap": there is no bwrap on PATH; install the package bubblewrap'
            )
        self.program = program
        self.python = interpreter()
        self.network = network
        self._plan = _Plan(network=network)
        for path in _needed_by(self.python):
            self._plan.show(path)
        for shown in visible:
            self._plan.show(os.path.join(os.getcwdb(), os.fsencode(shown)))
        if (program, self.python, network) not in _works:
            self._probe()
            _works.add((program, self.python, network))

    def _probe(self) -> None:
        usr = os.open("/usr", os.O_PATH | os.O_CLOEXEC)
        try:
            # By path here: nothing is lent yet that could be exchanged.
            shown = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in self.shown}
            calls = as_file(without_keys())
            fd = as_arguments(self.arguments({}, {b"/tmp/bound": usr}, shown, calls, b"/"))
            try:
                done = subprocess.run(
                    [self.program, "--args", str(fd), self.python, "-I", "-S", "-c", _PROBE],
                    env=environment_of_tools(),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    check=False,
                    timeout=PROBE_SECONDS,
                    pass_fds=(fd, calls, usr, *shown.values()),
                )
            finally:
                for other in (fd, calls, *shown.values()):
                    os.close(other)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotImplementedError(f'confine="bwrap": {self.program}: {error}') from error
        finally:
            os.close(usr)
        *facts, network = [*done.stdout.decode("utf-8", "replace").split(), ""][:4]
        own = network != os.readlink("/proc/self/ns/net")
        if done.returncode == 0 and facts == ["1", "True", "1"] and own != self.network:
            return
        said = done.stderr.decode("utf-8", "replace").strip().replace("\n", "; ")
        said = said or f"it ended with {done.returncode} and nothing that holds"
        hint = next((hint for word, hint in _HINTS if word in said), None)
        text = f'confine="bwrap": {self.program} makes no sandbox here: {said}'
        raise NotImplementedError(text + (f" ({hint})" if hint else ""))

    @property
    def shown(self) -> list[bytes]:
        """Real paths of what is shown besides the system: what there is may be exchanged."""
        return list(self._plan.shown)

    def shows(self, path: str, roots: Iterable[bytes]) -> bool:
        """Whether a path, and where it leads, lies where a command in the sandbox can see it."""
        try:
            given = os.fsencode(path)
            return all(
                self._plan.sees(way, roots)
                for way in (os.path.normpath(given), os.path.realpath(given))
            )
        except ValueError:
            return False

    def arguments(
        self,
        spellings: Mapping[bytes, bytes],
        bound: Mapping[bytes, int],
        shown: Mapping[bytes, int],
        calls: int,
        cwd: bytes,
    ) -> list[bytes]:
        """What bwrap is told, for `as_arguments`.

        Args:
            spellings: each name by which a root is known -> its real path.
            bound: real path of each root that lies in no other -> a descriptor of it.
            shown: what of `self.shown` is to be shown -> a descriptor of it.
            calls: a descriptor of the filter of system calls.
            cwd: the real path of the directory to begin in.
        """
        words = [b"--unshare-all", b"--die-with-parent", b"--as-pid-1", b"--cap-drop", b"ALL"]
        if self.network:
            words.append(b"--share-net")
        words += self._plan.words(spellings, bound, shown)
        if os.geteuid() == 0:
            # What root may write there (sysctls, modes) needs no capability, and changes the whole
            # machine. Others cannot, and find it as ever.
            words += [b"--remount-ro", b"/proc"]
        return [*words, b"--remount-ro", b"/", b"--seccomp", b"%d" % calls, b"--chdir", cwd]


class _Plan:
    """What is mounted where, whatever the roots of a command are."""

    def __init__(self, *, network: bool) -> None:
        self._links: dict[bytes, bytes] = {b"/var/run": b"/run"}
        self._system: set[bytes] = set()
        self.shown: set[bytes] = set()
        # Each is an empty directory of the sandbox's own.
        self._empty = {b"/tmp": b"1777", b"/var/tmp": b"1777", b"/run": b"0755"}
        self._masked: set[bytes] = set()
        for path in map(os.fsencode, SYSTEM):
            if os.path.islink(path) and path.count(b"/") == 1:
                self._links[path] = os.path.realpath(path)
            elif os.path.isdir(path):
                self._system.add(path)
        for path in _homes():
            real = os.path.realpath(path)
            # What lies in the system is seen as it is, and nothing can be mounted where nothing is.
            if real != b"/" and (os.path.isdir(real) or not below(real, self._system)):
                self._empty[real] = b"0700"
                if path != real:
                    self._links[path] = real
        for path in _secret(b"/etc"):
            self._masked.add(path)
        if network and os.path.exists("/etc/resolv.conf"):
            self.show(b"/etc/resolv.conf")

    def show(self, path: bytes) -> None:
        """Show a file or directory, read-only, by its real path and under this name."""
        path = os.path.normpath(path)
        real = os.path.realpath(path, strict=True)
        if not below(real, self._system):
            self.shown.add(real)
        if path != real:
            self._links[path] = real

    def sees(self, path: bytes, roots: Iterable[bytes]) -> bool:
        """Whether a path lies in a root or in what is shown."""
        if below(path, roots):
            return True
        seen = below(path, self._system) or below(path, self.shown) or below(path, self._links)
        return seen and not below(path, self._masked)

    def words(
        self,
        spellings: Mapping[bytes, bytes],
        roots: Mapping[bytes, int],
        shown: Mapping[bytes, int],
    ) -> list[bytes]:
        mounts: dict[bytes, list[bytes]] = {
            b"/proc": [b"--proc", b"/proc"],
            b"/dev": [b"--dev", b"/dev"],
        }
        for path, mode in self._empty.items():
            if not below(path, roots):
                mounts[path] = [b"--perms", mode, b"--tmpfs", path]
        empty = {b"/", *mounts}
        for path in self._system:
            if not below(path, roots):
                mounts[path] = [b"--ro-bind", path, path]
        for path, fd in shown.items():
            if not below(path, roots):
                mounts[path] = [b"--ro-bind-fd", b"%d" % fd, path]
        for path in self._masked:
            if not below(path, roots):
                # A device on a mount without devices: it can be opened by nobody.
                is_folder = os.path.isdir(path)
                mounts[path] = (
                    [b"--perms", b"0000", b"--tmpfs", path]
                    if is_folder
                    else [b"--ro-bind", b"/dev/null", path]
                )
        for real, fd in roots.items():
            mounts[real] = [b"--bind-fd", b"%d" % fd, real]
        # What is mounted deeper comes later, or would be covered.
        words = [word for _, words in sorted(mounts.items(), key=_depth) for word in words]
        made: set[bytes] = set()
        for path, real in sorted({**self._links, **spellings}.items(), key=_depth):
            # In what is bound from outside the link stands already, or what was made there.
            if path not in mounts and _deepest(path, mounts) in empty and not below(path, made):
                words += [b"--symlink", real, path]
                made.add(path)
        return words


def _depth(item: tuple[bytes, object]) -> int:
    return item[0].rstrip(b"/").count(b"/")


def below(path: bytes, places: Iterable[bytes]) -> bool:
    """Whether a path is one of these or lies in one of these."""
    return any(path == place or path.startswith(place.rstrip(b"/") + b"/") for place in places)


def _deepest(path: bytes, places: Iterable[bytes]) -> bytes:
    return max((place for place in places if below(path, [place])), key=len, default=b"/")


def _homes() -> set[bytes]:
    import pwd  # which Windows does not have

    homes = {os.fsencode(os.environ.get("HOME", "/"))}
    with contextlib.suppress(KeyError):
        homes.add(os.fsencode(pwd.getpwuid(os.geteuid()).pw_dir))
    return {os.path.normpath(home) for home in homes if home.startswith(b"/")}


def _secret(folder: bytes) -> Iterator[bytes]:
    """What below a folder is not for everybody: a sandbox that is root's could read it."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            mode = entry.stat(follow_symlinks=False).st_mode
        except OSError:
            continue
        if stat.S_ISDIR(mode):
            if mode & 0o005 == 0o005:
                yield from _secret(entry.path)
            else:
                yield entry.path
        elif stat.S_ISREG(mode) and not mode & 0o004:
            yield entry.path


def _needed_by(python: str) -> Iterator[bytes]:
    """What an interpreter needs to begin, if it is ours; another's is part of the system.

    Not its whole prefix: that may be a directory like `~/.local`, with other things in it.
    """
    yield os.fsencode(python)
    if python == os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable):
        yield os.fsencode(os.path.dirname(os.__file__))
        import sysconfig  # slow, and needed nowhere else

        library = os.path.join(
            sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or ""
        )
        if os.path.isfile(library):
            yield os.fsencode(library)


def as_arguments(words: Sequence[str | bytes]) -> int:
    """A descriptor from which bwrap takes its arguments: they are not in the list of processes."""
    return as_file(b"".join(os.fsencode(word) + b"\0" for word in words))


def as_file(content: bytes) -> int:
    """A descriptor from which this can be read, once."""
    fd = os.memfd_create("bwrap")
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


def environment_of_tools() -> dict[str, str]:
    """What bwrap and the interpreter get: nothing that an agent could have a say in."""
    return inherit_env("LD_LIBRARY_PATH")
