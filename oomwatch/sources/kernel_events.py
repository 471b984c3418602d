"""Kernel and driver messages that matter for memory, as patterns; and the OOM killer put together.

One kill is up to a hundred lines: who asked, the cgroup's limit and usage, a table of tasks, the
constraint, the victim. The header and the ``oom-kill:`` line are rate limited by the kernel and the
``Killed process`` line is not, so an event is made at the latter and takes what came before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from oomwatch.records import KernelEvent, KernelEventKind
from oomwatch.sources.cgroup import identify
from oomwatch.sources.kernel_format import KernelLine
from oomwatch.sources.xid import describe_xid

LONGEST_MESSAGE: Final = 4096
"""Characters; the kernel's own limit is 1 or 2 KiB. What is longer is somebody else's text."""

INTERESTING: Final = re.compile(
    r"oom|[Oo]ut of [Mm]emory|Kill|killed|NVRM|dxgkio|Xid|EDAC|Hardware Error|Memory failure"
    r"|segfault|traps: |memory: usage|limit of|\[\s*(?:pid|\d+)\s*\]\s+(?:uid|\d+)\s"
)
"""Cheap test: a line without any of these can be left out, except in the journal's export form."""

_INVOKED: Final = re.compile(
    r"(.{1,16}) invoked oom-killer: gfp_mask=.*?(?:oom_score_adj=(-?\d+))?"
)
_USAGE: Final = re.compile(r"memory: usage (\d+)kB, limit (\d+)kB, failcnt \d+")
_OLD_TASK: Final = re.compile(r"Task in (.+) killed as a result of limit of (.+)")
_TABLE_HEAD: Final = re.compile(r"\[\s*pid\s*\]\s+(.*\bname)")
_TABLE_ROW: Final = re.compile(r"\[\s*(\d+)\s*\]((?:\s+-?\d+)+)\s(.*)")
_CONSTRAINT: Final = re.compile(
    r"oom-kill:constraint=(?P<constraint>CONSTRAINT_\w+),nodemask=(?:\(null\)|[\d,-]*),cpuset=.*?"
    r",mems_allowed=[\d,-]*(?:,global_oom)?(?:,oom_memcg=(?P<oom_memcg>.*?))?"
    r"(?:,task_memcg=(?P<task_memcg>.*?))?,task=(?P<comm>.{0,64}),pid=(?P<pid>\d+),uid=\d+"
)
_GROUP: Final = re.compile(r"Tasks in (.+) are going to be killed due to memory\.oom\.group set")
# Up to 4.x: a first line names the process that scored highest, the second the (child) victim.
_SCORED: Final = re.compile(
    r"(?P<how>Out of [Mm]emory|Memory cgroup out of memory): Kill process (?P<pid>\d+) "
    r"\((?P<comm>.*)\) score \d+ or sacrifice child"
)
_KILLED: Final = re.compile(
    r"(?:(?P<how>Out of [Mm]emory(?: \(oom_kill_allocating_task\))?"
    r"|Memory cgroup out of memory): )?"
    r"Killed process (?P<pid>\d+),? \((?P<comm>.*)\)(?P<rest>(?: total-vm:|, UID |,? UID:|\.?$).*)"
)
_REAPED: Final = re.compile(r"oom_reaper: reaped process (\d+) \((.*)\), now anon-rss:.*")
_SIZE: Final = re.compile(r"\b(total-vm|anon-rss|file-rss|shmem-rss):(\d{1,15})kB")
_SCORE_ADJ: Final = re.compile(r"oom_score_adj:(-?\d+)")
_UNIT_KILL: Final = re.compile(
    r"(?P<unit>\S+): (?:A process of this unit has been killed by the OOM killer\."
    r"|Failed with result 'oom-kill'\.)"
)
_OOMD: Final = re.compile(r"Killed (/\S+) due to (memory (?:pressure|used).*|swap used.*)")

_XID: Final = re.compile(
    r"(?:NVRM: )?Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.\d)?)"
    r"(?: GPU-I:(?P<gi>\d+))?(?: GPU-CI:(?P<ci>\d+))?\): (?P<xid>\d{1,4})\b(?:, )?"
    r"(?:pid='?(?P<pid><unknown>|\d+)'?(?:, |$))?(?:name=(?P<name>.*?)(?:, |$))?(?P<detail>.*)"
)
# The driver also says it without an Xid, for a card that is lost before any program used it.
_LOST: Final = re.compile(
    r"NVRM:(?: The NVIDIA GPU (?P<pci>[0-9a-fA-F:.]+))?"
    r".*\bfallen off the bus and is not responding.*"
)
_CAUSED: Final = re.compile(r"\bcaused by previous Xid (\d{1,4})\b")
_GPU_UUID: Final = re.compile(r"NVRM: GPU at (?:PCI:)?([0-9a-fA-F:.]+): (GPU-[0-9a-fA-F-]+)")
_DRIVER_NO_MEMORY: Final = re.compile(r"NVRM: .*\bNV_ERR_NO_MEMORY\b.*")
# The paravirtual driver of WSL: -12 is ENOMEM.
_RESIDENCY: Final = re.compile(r".*\bdxgkio_make_resident: Ioctl failed: -12\b.*")
_MISMATCH: Final = re.compile(
    r"NVRM: API mismatch: the client(?: '[^']*' \(pid \d+\))? has the version ([\d.]+\d)"
    r"(?:.{0,20}kernel module has the version ([\d.]+\d))?.*"
)
_EDAC: Final = re.compile(r"EDAC (?:\w+ )?MC\d+: \d+ (?P<type>CE|UE) .*")
_MACHINE_CHECK: Final = re.compile(
    r"(?:mce: )?(?:\{\d+\})?\[Hardware Error\]:.*\b(?:memory|Memory|DIMM|ECC)\b.*"
    r"|Memory failure: 0x[0-9a-f]+: .*"
)
_SEGFAULT: Final = re.compile(
    r"(?P<comm>.{1,16})\[(?P<pid>\d+)\]:? segfault at [0-9a-f]+ ip .*?"
    r"(?: in (?P<module>[^\[]+)\[(?P<offset>[^\]]*)\])?"
    r"(?: likely on CPU .*)?"
)
_TRAP: Final = re.compile(
    r"traps: (?P<comm>.{1,16})\[(?P<pid>\d+)\] (?:trap invalid opcode|general protection).*?"
    r"(?: in (?P<module>[^\[]+)\[(?P<offset>[^\]]*)\])?"
)

_SIZE_FIELDS: Final = {
    "total-vm": "total_vm_bytes",
    "anon-rss": "anon_rss_bytes",
    "file-rss": "file_rss_bytes",
    "shmem-rss": "shmem_rss_bytes",
}
_PAGE_BYTES: Final = (
    4096  # used where the table does not let us work it out (arm64 may have 64 KiB)
)
_LISTED_TASKS: Final = 12
_SCOPES: Final = {
    "CONSTRAINT_MEMCG": "cgroup",
    "CONSTRAINT_CPUSET": "cpuset",
    "CONSTRAINT_MEMORY_POLICY": "memory_policy",
}


def normalize_pci(text: str) -> str | None:
    """A PCI address as ``0000:3b:00``; NVML prints ``00000000:3B:00.0``, the log the short form."""
    match = re.fullmatch(r"([0-9a-fA-F]{1,8}):([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})(?:\.\d)?", text)
    if match is None:
        return None
    domain, bus, device = (int(part, 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}"


class Assembler:
    """Turns messages, in their order, into events."""

    def __init__(self) -> None:
        self._kill: dict[str, Any] = {}
        self._kill_line: tuple[int, KernelLine] | None = None
        self._columns: list[str] = []
        self._tasks: list[tuple[int, str, int, int]] = []  # pid, comm, rss and total_vm in pages
        self._last_kill: dict[str, Any] = {}
        self._killed_pids: set[int] = set()
        self._units: set[str] = set()
        self._uuids: dict[str, str] = {}

    def feed(self, number: int, line: KernelLine) -> Iterator[KernelEvent]:
        """The events that this message completes; mostly none, seldom two."""
        text = line.text
        if match := _INVOKED.fullmatch(text):
            yield from self.finish()
            self._kill = {"invoked_by": match[1]}
            self._kill_line = (number, line)
            self._tasks, self._columns = [], []
        elif match := _USAGE.fullmatch(text):
            self._kill["usage_bytes"] = int(match[1]) * 1024
            limit = int(match[2]) * 1024
            if limit < 2**60:  # the kernel's "no limit" is 2^63 less a page
                self._kill["limit_bytes"] = limit
        elif match := _OLD_TASK.fullmatch(text):
            self._kill |= {"task_memcg": match[1], "oom_memcg": match[2], "scope": "cgroup"}
        elif match := _TABLE_HEAD.fullmatch(text):
            self._columns, self._tasks = match[1].split(), []
        elif match := _TABLE_ROW.fullmatch(text):
            self._row(int(match[1]), match[2].split(), match[3])
        elif match := _CONSTRAINT.fullmatch(text):
            self._kill |= {name: value for name, value in match.groupdict().items() if value}
            self._kill["pid"] = int(match["pid"])
            self._kill["scope"] = _scope(match["constraint"])
            self._kill_line = (number, line)
        elif match := _SCORED.fullmatch(text):
            self._kill |= {"pid": int(match["pid"]), "comm": match["comm"], "scored": True}
            self._kill.setdefault("scope", _how_scope(match["how"]))
            self._kill_line = (number, line)
        elif match := _KILLED.fullmatch(text):
            yield self._killed(number, line, match)
        elif match := _GROUP.fullmatch(text):
            self._last_kill["group"] = match[1]
        elif match := _REAPED.fullmatch(text):
            if int(match[1]) not in self._killed_pids:
                yield _event("oom_kill", number, line, {"pid": int(match[1]), "comm": match[2]})
        else:
            yield from self._other(number, line)

    def finish(self) -> Iterator[KernelEvent]:
        """A kill of which the ``Killed process`` line is missing."""
        pending, where = self._kill, self._kill_line
        self._kill, self._kill_line = {}, None
        if where is None:
            return
        kind: KernelEventKind = "oom_kill" if "pid" in pending else "oom_invoked"
        if kind == "oom_kill":
            self._killed_pids.add(pending["pid"])
        yield self._kill_event(kind, *where, pending)

    def _other(self, number: int, line: KernelLine) -> Iterator[KernelEvent]:
        text = line.text
        if match := _GPU_UUID.fullmatch(text):
            if pci := normalize_pci(match[1]):
                self._uuids[pci] = match[2]
            return
        for pattern, kind, fields_of in _SIMPLE:
            if match := pattern.fullmatch(text):
                fields = fields_of(match)
                if kind == "xid":
                    fields["uuid"] = self._uuids.get(fields["pci"])
                if kind == "unit_oom_kill" and "result" in text:
                    # systemd says it twice of one kill; the second is news only without the first.
                    if fields["unit"] in self._units:
                        self._units.discard(fields["unit"])
                        return
                elif kind == "unit_oom_kill":
                    self._units.add(fields["unit"])
                yield _event(kind, number, line, fields)
                return

    def _row(self, pid: int, numbers: list[str], name: str) -> None:
        if len(self._tasks) > 100_000 or len(numbers) + 1 != len(self._columns):
            return
        row = dict(zip(self._columns, numbers, strict=False))
        if "rss" in row and "total_vm" in row:
            self._tasks.append((pid, name, int(row["rss"]), int(row["total_vm"])))

    def _killed(self, number: int, line: KernelLine, match: re.Match[str]) -> KernelEvent:
        pid = int(match["pid"])
        known = self._kill.get("pid")
        if known not in (None, pid) and not self._kill.get("scored"):
            # Not the kill that the lines before spoke of.
            context = dict(self._last_kill) if self._last_kill.get("group") else {}
        elif self._kill:
            context = dict(self._kill)
            self._kill, self._kill_line = {}, None
        else:
            context = dict(self._last_kill) if self._last_kill.get("group") else {}
        context.pop("scored", None)
        self._last_kill = dict(context)
        fields = context | {"pid": pid, "comm": match["comm"]}
        if how := match["how"]:
            fields.setdefault("scope", _how_scope(how))
        for name, value in _SIZE.findall(match["rest"]):
            fields[_SIZE_FIELDS[name]] = int(value) * 1024
        if score := _SCORE_ADJ.search(match["rest"]):
            fields["oom_score_adj"] = int(score[1])
        self._killed_pids.add(pid)
        return self._kill_event("oom_kill", number, line, fields)

    def _kill_event(
        self, kind: KernelEventKind, number: int, line: KernelLine, fields: dict[str, Any]
    ) -> KernelEvent:
        fields.pop("scored", None)
        if self._tasks:
            page = self._page_bytes(fields)
            largest = sorted(self._tasks, key=lambda task: -task[2])[:_LISTED_TASKS]
            fields["tasks"] = tuple((pid, comm, rss * page) for pid, comm, rss, _ in largest)
        if memcg := fields.get("task_memcg"):
            identity = identify(memcg)
            fields |= {
                name: value
                for name, value in (
                    ("unit", identity.unit),
                    ("container", identity.container),
                    ("pod_uid", identity.pod_uid),
                )
                if value
            }
        return _event(kind, number, line, fields)

    def _page_bytes(self, fields: dict[str, Any]) -> int:
        """The victim stands in the table in pages and in its own line in kB."""
        for pid, _, _, total_vm in self._tasks:
            if pid == fields.get("pid") and total_vm and "total_vm_bytes" in fields:
                size = fields["total_vm_bytes"] / total_vm
                return min((4096, 16384, 65536), key=lambda page: abs(page - size))
        return _PAGE_BYTES


def _event(
    kind: KernelEventKind, number: int, line: KernelLine, fields: dict[str, Any]
) -> KernelEvent:
    known = {name: value for name, value in fields.items() if value is not None}
    return KernelEvent(kind, line.text[:2000], number, line.at, line.monotonic_seconds, known)


def _scope(constraint: str) -> str:
    """What was short of memory: a cgroup at its limit, a set of NUMA nodes, or the whole host."""
    return _SCOPES.get(constraint, "host")


def _how_scope(how: str) -> str:
    return "cgroup" if how.startswith("Memory cgroup") else "host"


def _xid_fields(match: re.Match[str]) -> dict[str, Any]:
    code = int(match["xid"])
    meaning = describe_xid(code)
    pid, name = match["pid"], match["name"]
    caused = _CAUSED.search(match["detail"])
    return {
        "xid": code,
        "pci": normalize_pci(match["pci"]),
        "gpu_instance": None if match["gi"] is None else int(match["gi"]),
        "compute_instance": None if match["ci"] is None else int(match["ci"]),
        "pid": int(pid) if pid and pid.isdigit() else None,
        "name": None if name in (None, "", "<unknown>") else name,
        "detail": match["detail"] or None,
        "caused_by_xid": int(caused[1]) if caused else None,
        "xid_kind": meaning.kind if meaning else None,
        "xid_meaning": meaning.text if meaning else None,
    }


def _crash_fields(match: re.Match[str]) -> dict[str, Any]:
    fields: dict[str, Any] = dict(match.groupdict())
    fields["pid"] = int(match["pid"])
    return fields


_SIMPLE: Final[
    tuple[
        tuple[re.Pattern[str], KernelEventKind, Callable[[re.Match[str]], dict[str, Any]]],
        ...,
    ]
] = (
    (_XID, "xid", _xid_fields),
    (_LOST, "xid", lambda match: {"xid": 79, "pci": normalize_pci(match["pci"] or "")}),
    (_DRIVER_NO_MEMORY, "driver_no_memory", lambda _: {}),
    (_RESIDENCY, "driver_no_memory", lambda _: {}),
    (
        _MISMATCH,
        "driver_mismatch",
        lambda match: {"client_version": match[1], "kernel_version": match[2]},
    ),
    (_UNIT_KILL, "unit_oom_kill", lambda match: {"unit": match["unit"]}),
    (
        _OOMD,
        "unit_oom_kill",
        lambda match: {"task_memcg": match[1], "unit": identify(match[1]).unit, "detail": match[2]},
    ),
    (_EDAC, "hardware_ecc", lambda match: {"corrected": match["type"] == "CE"}),
    (_MACHINE_CHECK, "hardware_ecc", lambda _: {}),
    (_SEGFAULT, "native_crash", _crash_fields),
    (_TRAP, "native_crash", _crash_fields),
)
