#!/bin/bash
# The agent, as its unit runs it, in a small virtual machine: a kernel, a systemd and a kernel log of
# their own, and cgroup v2. Shows what a container cannot: the kernel kills one engine at its unit's
# MemoryMax= and another when the whole host is out of memory. What is checked stands in inside.py.
#
# Usage: tests/vm/run.sh CACHE PYTHON     (CACHE keeps 200 MB between runs; PYTHON has pip)
# Needs root, and apt-get install --no-install-recommends debootstrap qemu-system-x86 seabios cpio zstd
# Exit status 77: it cannot run here, and the last line says why. The first run takes some minutes
# and asks the Debian mirror and the package registry; later ones take three. The processor is
# emulated: nested KVM hangs on some hosts, and nothing here wants speed.
set -euo pipefail

SUITE=bookworm      # kernel 6.1, systemd 252, Python 3.11
MEMORY_MIB=1536
LIMIT_SECONDS=1200

skip() {
    echo "skipped: $*"
    exit 77
}
here=$(dirname "$(readlink -f "$0")")
project=$(readlink -f "$here/../..")
python=${2:?usage: run.sh CACHE PYTHON}
[ "$(uname -sm)" = "Linux x86_64" ] || skip "the emulated machine is made on Linux on x86_64 only"
[ "$(id -u)" = 0 ] || skip "debootstrap needs root"
for program in debootstrap:debootstrap qemu-system-x86_64:qemu-system-x86 cpio:cpio zstd:zstd dpkg:dpkg apt-get:apt; do
    command -v "${program%%:*}" >/dev/null || skip "${program%%:*} is not installed (package ${program#*:})"
done
[ -e /usr/share/seabios/bios-256k.bin ] || skip "the BIOS is not installed (package seabios)"
mkdir -p "$1"
cache=$(readlink -f "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

pack() { # FOLDER: as part of an initial file system
    (cd "$1" && find . -xdev | cpio -o -H newc --quiet | zstd -q -3 -T0)
}

# ---- the system, the kernel and the dependencies are made once
if [ ! -s "$cache/root.cpio.zst" ]; then
    rm -rf "$cache/root"
    debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,python3,procps \
        "$SUITE" "$cache/root" >"$cache/debootstrap.log" 2>&1 ||
        skip "no Debian could be fetched: $(tail -n 1 "$cache/debootstrap.log")"
    ln -sf /lib/systemd/systemd "$cache/root/init"
    rm -rf "$cache"/root/var/cache/apt "$cache"/root/var/lib/apt/lists "$cache"/root/usr/share/{doc,locale,man}
    pack "$cache/root" >"$cache/root.new"
    mv "$cache/root.new" "$cache/root.cpio.zst"
    rm -rf "$cache/root"
fi
if ! ls "$cache"/kernel/boot/vmlinuz-* >/dev/null 2>&1; then
    package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \(linux-image-6\.1.*\)/\1/p')
    (cd "$cache" && apt-get download -qq "${package:-linux-image-6.1}" 2>"$work/said") ||
        skip "no kernel 6.1 could be fetched: $(tail -n 1 "$work/said")"
    dpkg -x "$cache"/linux-image-*.deb "$cache/kernel"
fi
needs=$(cat "$project/pyproject.toml" "$project/constraints.txt" | sha256sum | cut -c 1-12)
if [ ! -s "$cache/packages-$needs.cpio.zst" ]; then
    "$python" - "$project/pyproject.toml" >"$work/requirements" <<X
import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"], sep="\n")
X
    "$python" -m pip install --quiet --python-version 3.11 --only-binary :all: --target "$work/packages/opt/oomwatch" \
        --constraint "$project/constraints.txt" --requirement "$work/requirements" 2>"$work/said" ||
        skip "no dependencies could be fetched: $(tail -n 1 "$work/said")"
    rm -f "$cache"/packages-*
    pack "$work/packages" >"$cache/packages.new"
    mv "$cache/packages.new" "$cache/packages-$needs.cpio.zst"
fi

# ---- what is tested
layer=$work/layer
mkdir -p "$layer/opt/oomwatch" "$layer/etc/systemd/system" "$layer/usr/local/bin"
cp -a "$project/oomwatch" "$layer/opt/oomwatch/"
"$python" -m compileall -q "$layer/opt/oomwatch" # emulated it takes a minute; another Python's is left unread
cp "$here/inside.py" "$project/tests/agent/stand_in.py" "$layer/opt/"
chmod -R a+rX "$layer/opt"
printf '#!/bin/sh\nPYTHONPATH=/opt/oomwatch exec /usr/bin/python3 -m oomwatch "$@"\n' >"$layer/usr/local/bin/oomwatch"
chmod 755 "$layer/usr/local/bin/oomwatch"
cat >"$layer/etc/systemd/system/under-test.service" <<X
[Unit]
After=basic.target systemd-journald.service
[Service]
Type=oneshot
OOMPolicy=continue
OOMScoreAdjust=-900
StandardOutput=file:/dev/ttyS0
StandardError=inherit
# The service's user may write nothing here: what was not compiled before would be by each command.
ExecStart=/bin/sh -c '/usr/bin/python3 -m compileall -q /opt/oomwatch/oomwatch; exec /usr/bin/python3 /opt/inside.py'
ExecStopPost=/bin/systemctl poweroff --force --force
X
printf '[Unit]\nRequires=basic.target\nAfter=basic.target\nWants=under-test.service\nAllowIsolate=yes\n' \
    >"$layer/etc/systemd/system/under-test.target"

pack "$layer" >"$work/layer.cpio.zst"
cat "$cache/root.cpio.zst" "$cache/packages-$needs.cpio.zst" "$work/layer.cpio.zst" >"$work/initrd"
timeout "$LIMIT_SECONDS" qemu-system-x86_64 -M q35 -accel tcg -cpu max -smp 1 -m "$MEMORY_MIB" \
    -display none -no-reboot -nodefaults -serial stdio -kernel "$cache"/kernel/boot/vmlinuz-* -initrd "$work/initrd" \
    -append "console=ttyS0 quiet mitigations=off systemd.unit=under-test.target" </dev/null 2>&1 |
    tr -d '\r' | tee "$work/console" | sed -un '/^== begin/,/^== end/p' || true
grep -q '^== end' "$work/console" || {
    echo "FAILED: the machine did not come to the end of the test; it said last:"
    tail -n 20 "$work/console"
    exit 1
}
! grep -q '^FAILED' "$work/console"
