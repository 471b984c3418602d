#!/bin/bash
# The shipped unit under a real systemd as PID 1, in a container over a throw-away copy of this
# machine's own root (an overlay in memory): installs it with `oomwatch service`, first with a
# stand-in program, for sandbox and drop-ins, then with the agent itself beside an engine; both for
# readiness, reload, watchdog, restart and stop.
#
# Usage: tests/systemd/run-under-systemd.sh [PYTHON]     (an interpreter with oomwatch's dependencies)
# Needs root and systemd-nspawn (package systemd-container). Exit status 77: it cannot run here, and
# the last line says why. About 40 s. Nothing outside the container is changed.
set -euo pipefail

skip() {
    echo "skipped: $*"
    exit 77
}
here=$(dirname "$(readlink -f "$0")")
python=${1:-python3}
[ "$(id -u)" = 0 ] || skip "needs root"
command -v systemd-nspawn >/dev/null || skip "systemd-nspawn is not installed (package systemd-container)"
[ -x /lib/systemd/systemd ] || skip "systemd is not installed"
[ -x /usr/bin/python3 ] || skip "/usr/bin/python3, for the service's own user, is not there"
/usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || skip "/usr/bin/python3 is older than 3.11"

work=$(mktemp -d)
root=$work/root
cgroups() { ls -d /sys/fs/cgroup/{systemd,unified,.}/{payload,supervisor} 2>/dev/null || true; }
cgroups_before=$(cgroups)
cleanup() {
    mountpoint -q "$root" && umount "$root"
    mountpoint -q "$work/memory" && umount "$work/memory"
    rm -rf "$work"
    # nspawn leaves its empty control groups behind where it was not started by systemd.
    cgroups | grep -vxF "${cgroups_before:-none}" | while read -r group; do
        find "$group" -depth -type d -exec rmdir {} \; 2>/dev/null
    done || true
}
trap cleanup EXIT

mkdir "$root" "$work/memory"
mount -t tmpfs -o size=512m,mode=755 tmpfs "$work/memory" 2>/dev/null || skip "a tmpfs may not be mounted"
mkdir "$work/memory/upper" "$work/memory/work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$work/memory/upper,workdir=$work/memory/work" "$root" 2>/dev/null ||
    skip "an overlay may not be mounted over this root"

mkdir -p "$root/opt/oomwatch-test"
cp -r "$here/../../oomwatch" "$root/opt/oomwatch-test/"
cp "$here"/{standin.py,checks.sh,inside.sh,inside-agent.sh} "$here/../agent/stand_in.py" "$root/opt/oomwatch-test/"
if command -v cc >/dev/null; then
    mkdir "$root/opt/oomwatch-test/nvml"
    cc -O1 -shared -fPIC -o "$root/opt/oomwatch-test/nvml/libnvidia-ml.so.1" "$here/../fakenvml/fakenvml.c"
    printf 'gpu 0 GPU-0 00000000:10:00.0 NVIDIA H100 80GB HBM3\nmemory 0 0 80G 1G 10G\n' >"$root/opt/oomwatch-test/nvml/scenario"
fi
chmod -R a+rX "$root/opt/oomwatch-test"
rm -f "$root"/etc/systemd/system/oomwatch.service
given=$python
python=$(command -v "$given") || skip "there is no interpreter $given"
case $python in /*) ;; *) python=$PWD/$python ;; esac
case $python in /tmp/* | /run/*) skip "$python is below /tmp or /run, which the container mounts anew" ;; esac
PYTHONPATH=/opt/oomwatch-test chroot "$root" "$python" -c 'import click, oomwatch' 2>/dev/null ||
    skip "$python, with oomwatch's dependencies, is not on the root file system"
# The service's own user runs the distribution's interpreter, with the dependencies of the other.
deps=$("$python" -c 'import sqlalchemy, pathlib; print(pathlib.Path(sqlalchemy.__file__).parents[1])')
agent_too=
[ "$("$python" -c 'import sys; print(sys.version_info[:2])')" = "$(/usr/bin/python3 -c 'import sys; print(sys.version_info[:2])')" ] &&
    agent_too="ExecStart=/bin/bash /opt/oomwatch-test/inside-agent.sh $python"
cat >"$root/etc/systemd/system/under-test.service" <<X
[Unit]
After=basic.target
[Service]
Type=oneshot
StandardOutput=append:/opt/oomwatch-test/output
StandardError=inherit
ExecStart=/bin/bash /opt/oomwatch-test/inside.sh $python
$agent_too
ExecStopPost=/bin/systemctl poweroff --force --force
X
printf '[Unit]\nRequires=basic.target\nAfter=basic.target\nWants=under-test.service\nAllowIsolate=yes\n' \
    >"$root/etc/systemd/system/under-test.target"

kmsg=()
[ -c /dev/kmsg ] && kmsg=(--bind=/dev/kmsg)
timeout --kill-after=10 150 systemd-nspawn --quiet --directory="$root" --boot --register=no --keep-unit \
    --private-network --link-journal=no --console=pipe "${kmsg[@]}" --bind-ro="$deps:/opt/oomwatch-deps" --capability=CAP_SYSLOG \
    --uuid="$(tr -d - </proc/sys/kernel/random/uuid)" -- systemd.unit=under-test.target \
    >"$work/console" 2>&1 </dev/null || true
if [ ! -s "$root/opt/oomwatch-test/output" ]; then
    tail -n 20 "$work/console"
    skip "systemd did not come up in the container"
fi
cat "$root/opt/oomwatch-test/output"
expected=2
if [ -z "$agent_too" ]; then
    echo "not checked: the agent, for /usr/bin/python3 is of another version than $python"
    expected=1
fi
[ "$(grep -cx "all checks passed" "$root/opt/oomwatch-test/output")" = $expected ]
