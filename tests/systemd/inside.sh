#!/bin/bash
# Runs as root under the systemd of the container; one line `ok …` or `FAILED …` for each check.
# $1: the interpreter that has oomwatch's dependencies.
set -u
. /opt/oomwatch-test/checks.sh
report() { # NAME: as the stand-in wrote it
    "$python" -c 'import json, sys; print(json.load(open("/var/lib/oomwatch/report.json"))[sys.argv[1]])' "$1"
}
says() { # NAME VALUE
    local now
    now=$(report "$1")
    [ "$now" = "$2" ] || { echo "$1 is $now"; return 1; }
}
# The stand-in takes the agent's place; every user can run it.
printf '#!/bin/sh\nexport PYTHONPATH=/opt/oomwatch-test\nexec /usr/bin/python3 /opt/oomwatch-test/standin.py "$@"\n' >/usr/local/bin/oomwatch-standin
chmod 755 /usr/local/bin/oomwatch-standin
mkdir -p /etc/oomwatch /etc/systemd/system/oomwatch.service.d
printf 'schema_version = 1\n' >/etc/oomwatch/config.toml
(umask 077 && echo line >/tmp/engine.log)
# A minute is long for a test; the rest of the unit is as it is shipped.
printf '[Service]\nWatchdogSec=2\nRestartSec=200ms\n' >/etc/systemd/system/oomwatch.service.d/quick.conf

# ---- install: the start waits for readiness
check "service install" service install --exec-path /usr/local/bin/oomwatch-standin
[ "$failures" = 0 ] || exit 1
check "active once it is ready" is ActiveState active
check "status line" is StatusText "watching nothing"
check "enabled at boot" systemctl is-enabled oomwatch.service
check "service status" bash -c "$(declare -f service); python=$python; service status | grep -q 'active (running)'"

# ---- what the unit gives and takes away
check "starts the agent" says arguments "['agent']"
check "no root" says uid_is_root False
check "no capabilities" says capabilities 0000000000000000
check "no new privileges" says no_new_privileges 1
check "a filter of system calls" says seccomp 2
if bash -c 'echo -500 >/proc/self/oom_score_adj' 2>/dev/null; then
    check "outlives an OOM" says oom_score_adj -500
else
    echo "not checked: OOMScoreAdjust=, for want of CAP_SYS_RESOURCE on this machine"
fi
check "writes its state" says write_state yes
check "writes nothing else" says write_etc PermissionError
check "reads its configuration" says read_config yes
check "sees no homes" says read_home PermissionError
check "has a /tmp of its own" says log_in_tmp FileNotFoundError
check "sees command lines of others" says read_cmdline_of_1 True
check "sees control groups of others" says read_cgroup_of_1 True
check "sees no environments of others" says read_environ_of_1 PermissionError
check "reads no raw kernel log" says kernel_log PermissionError
check "is in the journal's group" bash -c "$(declare -f report); python=$python; report groups | grep -qw $(getent group systemd-journal | cut -d: -f3)"
check "is told of the watchdog" says watchdog_interval 1.0

# ---- reload
check "reload" systemctl reload oomwatch.service
check "reloaded" becomes StatusText "reloaded 1"
check "active after a reload" becomes ActiveState active
check "the same process" is NRestarts 0

# ---- a hang: no signs of life for WatchdogSec
before=$(show MainPID)
kill -USR1 "$before"
check "a hang is ended and restarted" becomes NRestarts 1
check "active again" becomes ActiveState active
check "as another process" test "$(show MainPID)" != "$before"
check "the watchdog did it" bash -c 'journalctl -u oomwatch.service | grep -qi watchdog'

# ---- SIGKILL, as the kernel's OOM killer sends it
kill -KILL "$(show MainPID)"
check "restarted after SIGKILL" becomes NRestarts 2
check "active after SIGKILL" becomes ActiveState active

# ---- a stop ends it in time, and cleanly
check "stop within 3 s" within 3 systemctl stop oomwatch.service
check "ended by itself" is Result success
check "status 0" is ExecMainStatus 0

# ---- a wrong configuration is not tried again and again
touch /var/lib/oomwatch/exit-2
check "a start that fails says so" bash -c '! systemctl start oomwatch.service'
sleep 1
check "status 2 is not restarted" is ActiveState failed
rm /var/lib/oomwatch/exit-2
systemctl reset-failed oomwatch.service

# ---- drop-ins, one by one
check "drop-ins other-users,logs" service install --exec-path /usr/local/bin/oomwatch-standin --with other-users,logs
check "two capabilities" says capabilities 0000000000080004
check "reads environments of others" says read_environ_of_1 yes
check "reads homes" says read_home yes
check "reads logs of others in the host's /tmp" says log_in_tmp yes
check "cannot write there" says write_tmp OSError
check "has room for temporary files" says write_temporary yes
check "still writes nothing" says write_etc PermissionError
check "is in adm" bash -c "$(declare -f report); python=$python; report groups | grep -qw $(getent group adm | cut -d: -f3)"
check "drop-in kernel-log in place of them" service install --exec-path /usr/local/bin/oomwatch-standin --with kernel-log
check "one capability" says capabilities 0000000400000000
check "reads the raw kernel log" says kernel_log yes
check "sees no homes again" says read_home PermissionError
check "has a /tmp of its own again" says log_in_tmp FileNotFoundError

# ---- uninstall leaves what is not ours
check "service uninstall" service uninstall
check "the unit is gone" test ! -e /etc/systemd/system/oomwatch.service
check "stopped" is ActiveState inactive
check "drop-ins of others stay" test -e /etc/systemd/system/oomwatch.service.d/quick.conf
check "the state stays" test -d /var/lib/oomwatch

verdict
