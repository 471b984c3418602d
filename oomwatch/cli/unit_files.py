"""Unit files of systemd: what is shipped, whose a file is, how it is written, what it starts.

A file that oomwatch writes begins with a line that says so and carries a digest of the rest, so
that it is known again, and known to be unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import shlex
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from oomwatch.errors import UsageError

UNIT: Final = "oomwatch.service"
DROP_INS: Final = ("kernel-log", "docker", "logs", "other-users")
ALL_DROP_INS: Final = (*DROP_INS, "gpu-group")  # the last by itself, where it is needed
Owner = Literal["absent", "ours", "edited", "foreign"]

_MARK: Final = re.compile(r"# Written by `oomwatch service install`, sha256 ([0-9a-f]{64}).*\n")
_EXEC: Final = "ExecStart=/usr/bin/oomwatch agent\n"
_JOURNAL: Final = "SupplementaryGroups=systemd-journal\n"
# What ProtectHome= and PrivateTmp= hide from the service.
_HIDDEN: Final = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - to refuse them


def shipped(name: str) -> str:
    """The text of a unit file or drop-in of this package."""
    return (Path(__file__).parent.parent / "systemd" / name).read_text("utf-8")


def stamp(text: str) -> str:
    """The text with the line that makes it ours."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    mark = f"# Written by `oomwatch service install`, sha256 {digest} of the rest.\n"
    return f"{mark}# Put changes into a drop-in (systemctl edit): this file is replaced.\n{text}"


def owner(path: Path) -> Owner:
    """Whose file is at `path`. A link (a masked unit) is never ours."""
    if path.is_symlink():
        return "foreign"
    try:
        text = path.read_text("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return "absent"
    except OSError:
        return "foreign"
    match = _MARK.match(text)
    if match is None:
        return "foreign"
    rest = text[match.end() :].partition("\n")[2]
    return "ours" if hashlib.sha256(rest.encode()).hexdigest() == match.group(1) else "edited"


def write_atomically(path: Path, text: str) -> None:
    """Put a file in place as a whole, readable for all, without following links."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o644)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


# ---------------------------------------------------------------- the command that a unit starts
def find_command() -> tuple[str, ...]:
    """How this oomwatch is started: its script, else its interpreter with ``-m oomwatch``."""
    called = shutil.which(sys.argv[0]) if sys.argv else None
    for script in (called, str(Path(sys.executable).parent / "oomwatch")):
        if script and Path(script).name == "oomwatch" and os.access(script, os.X_OK):
            return (str(Path(script).absolute()),)
    return (sys.executable, "-m", "oomwatch")


def unreachable(command: tuple[str, ...]) -> str | None:
    """Why a user of the service's own could not run the command; None if it can."""
    interpreter = _interpreter(Path(command[0]))
    package = () if interpreter is None else (Path(__file__).parent.parent,)
    for path in (Path(command[0]), *([interpreter] if interpreter else []), *package):
        for place in dict.fromkeys((path.resolve(), path.absolute())):
            reason = _closed(place)
            if reason:
                return reason
    return None


def _interpreter(script: Path) -> Path | None:
    """The program that the first line of a script names: ``#!/opt/oomwatch/bin/python3``."""
    try:
        with script.open("rb") as file:
            first = file.readline(512)
    except OSError:
        return None
    words = first[2:].split() if first.startswith(b"#!") else []
    return Path(os.fsdecode(words[0])) if words else None


def _closed(path: Path) -> str | None:
    for hidden in _HIDDEN:
        if path.is_relative_to(hidden):
            return f"{path} is below {hidden}, which services do not see"
    for part in (*reversed(path.parents), path):
        try:
            mode = part.stat().st_mode
        except OSError as error:
            return f"{part}: {(error.strerror or str(error)).lower()}"
        needed = stat.S_IXOTH | (stat.S_IROTH if part == path else 0)
        if mode & needed != needed:
            return f"{part} is closed to other users"
    return None


# ---------------------------------------------------------------- what is installed
@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Where the files of one installation go. `root` is the tree that is to be changed."""

    root: Path
    user: bool

    @property
    def directory(self) -> Path:
        """Of the unit."""
        if not self.user:
            return self.below("/etc/systemd/system")
        base = os.environ.get("XDG_CONFIG_HOME", "")
        home = Path(base) if base.startswith("/") else Path.home() / ".config"
        return self.below(str(home / "systemd" / "user"))

    @property
    def unit(self) -> Path:
        """The unit."""
        return self.directory / UNIT

    def drop_in(self, name: str) -> Path:
        """One drop-in of ours."""
        return self.directory / f"{UNIT}.d" / f"50-oomwatch-{name}.conf"

    def below(self, path: str) -> Path:
        """A path of the tree."""
        return self.root / path.lstrip("/")

    def installed_drop_ins(self) -> tuple[str, ...]:
        """Names of the optional drop-ins that are there and ours."""
        return tuple(name for name in DROP_INS if owner(self.drop_in(name)) in ("ours", "edited"))

    def packaged(self) -> Path | None:
        """A unit of the same name that a package of the distribution brought."""
        kind = "user" if self.user else "system"
        places = (f"/usr/lib/systemd/{kind}", f"/lib/systemd/{kind}")
        units = (self.below(place) / UNIT for place in places)
        return next((unit for unit in units if unit.exists()), None)

    def group_exists(self, name: str) -> bool:
        """Whether the tree has a group: a unit that names one which it has not does not start.

        A tree without a list of groups, such as a package in the making, is taken to have it.
        """
        known = self.below("/etc/group").exists()
        return not known or any(group == name for group, _ in self._groups())

    def gpu_group(self) -> str | None:
        """The group that the NVIDIA device nodes are kept for; None if all may use them."""
        try:
            node = self.below("/dev/nvidiactl").stat()
        except OSError:
            return None
        if node.st_mode & 0o006 == 0o006 or node.st_gid == 0:
            return None
        return next((group for group, gid in self._groups() if gid == node.st_gid), None)

    def _groups(self) -> Iterator[tuple[str, int]]:
        try:
            lines = self.below("/etc/group").read_text("utf-8", "replace").splitlines()
        except OSError:
            lines = []
        for line in lines:  # systemd-journal:x:101:
            fields = line.split(":")
            if len(fields) == 4 and fields[2].isdigit():
                yield fields[0], int(fields[2])
        if self.root == Path("/"):  # a directory service may know more
            import grp

            yield from ((group.gr_name, group.gr_gid) for group in grp.getgrall())


def unit_text(layout: Layout, command: tuple[str, ...]) -> tuple[str, list[str]]:
    """The unit for this host, and notes on what differs from the shipped one."""
    text = shipped(f"user/{UNIT}" if layout.user else UNIT)
    notes = []
    quoted = " ".join(_quote(word) for word in command)
    text = text.replace(_EXEC, f"ExecStart={quoted} agent\n")
    if not layout.user and not layout.group_exists("systemd-journal"):
        text = text.replace(_JOURNAL, f"# (this host has no such group)\n#{_JOURNAL}")
        notes.append("there is no group systemd-journal here: the journal is not read")
    return text, notes


def drop_in_texts(layout: Layout, names: tuple[str, ...]) -> dict[Path, str]:
    """The drop-ins by their paths, among them the group of the GPUs where they have one."""
    texts = {layout.drop_in(name): shipped(f"drop-ins/{name}.conf") for name in names}
    group = None if layout.user else layout.gpu_group()
    if group is not None:
        texts[layout.drop_in("gpu-group")] = (
            "# The NVIDIA device nodes of this host are kept for this group.\n"
            f"[Service]\nSupplementaryGroups={group}\n"
        )
    return texts


def check_drop_ins(layout: Layout, names: tuple[str, ...]) -> None:
    """Refuse a drop-in that would keep the unit from starting.

    Raises:
        UsageError: it is not known, or names a group that is not there.

    """
    for name in names:
        if name not in DROP_INS:
            raise UsageError(f"there is no drop-in {name!r}; there are {', '.join(DROP_INS)}")
        for group in re.findall(
            r"^SupplementaryGroups=(.+)$", shipped(f"drop-ins/{name}.conf"), re.MULTILINE
        ):
            if not layout.group_exists(group):
                raise UsageError(
                    f"the drop-in {name} needs the group {group}, which is not here: the unit "
                    "would not start"
                )


def program_of(command: str) -> str | None:
    """The first word of ExecStart=, as it was before `_quote`; None where there is none."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    return words[0].replace("%%", "%").replace("$$", "$") if words else None


def _quote(word: str) -> str:
    """A word of ExecStart=; ``%`` and ``$`` mean something there."""
    word = word.replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[A-Za-z0-9_./:@%$+=,-]+", word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
