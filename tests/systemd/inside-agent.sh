#!/bin/bash
# Runs as root under the systemd of the container, after inside.sh: the real agent as the unit runs
# it, with a scripted NVML, beside an engine that is killed. Lines as those of inside.sh.
set -u
. /opt/oomwatch-test/checks.sh
said() { # TEXT: the agent's lines in the journal
    for _ in $(seq 100); do
        journalctl --quiet -u oomwatch.service | grep -qF -- "$1" && return 0
        sleep 0.1
    done
    journalctl --quiet -u oomwatch.service | tail -n 20
    return 1
}
states() { # TEXT: in the status line, within 20 s
    for _ in $(seq 200); do
        show StatusText | grep -qF -- "$1" && return 0
        sleep 0.1
    done
    show StatusText
    return 1
}

printf '#!/bin/sh\nexport PYTHONPATH=/opt/oomwatch-test:/opt/oomwatch-deps\nexec /usr/bin/python3 -m oomwatch "$@"\n' >/usr/local/bin/oomwatch-agent
chmod 755 /usr/local/bin/oomwatch-agent
mkdir -p /etc/oomwatch
printf 'schema_version = 1\n[discovery]\ninterval = "1s"\n' >/etc/oomwatch/config.toml
if [ -e /opt/oomwatch-test/nvml/libnvidia-ml.so.1 ]; then
    printf '[Service]\nEnvironment=LD_LIBRARY_PATH=/opt/oomwatch-test/nvml FAKENVML_SCENARIO=/opt/oomwatch-test/nvml/scenario\n' \
        >/etc/systemd/system/oomwatch.service.d/nvml.conf
fi

# ---- an engine: a unit of its own, whose log is a file that others may read
mkdir -p /opt/engine
/usr/bin/python3 -c 'import sys; sys.path[0] = "/opt/oomwatch-test"; import stand_in; print(stand_in.SERVER)' >/opt/engine/vllm
echo '{"page": "figures", "load": 10, "told": 0, "orphaned": false}' >/opt/engine/state
chmod -R a+rX /opt/engine
systemd-run --quiet --unit=engine --setenv=STAND_IN=/opt/engine --property=UMask=0022 \
    /usr/bin/python3 /opt/engine/vllm serve /models/m --port 8123

# ---- the agent, as it is shipped
check "service install of the agent" service install --exec-path /usr/local/bin/oomwatch-agent
check "the agent is active once it is ready" is ActiveState active
check "it sees the engine" states "vllm-8123"
[ -e /opt/oomwatch-test/nvml/scenario ] && check "it sees the GPU" states "1 GPU(s)"
check "it has its database" test -s /var/lib/oomwatch/oomwatch.db
sleep 5
check "the watchdog is fed" is NRestarts 0
check "it reports no fault of its own" bash -c '! journalctl --quiet -u oomwatch.service | grep -i "traceback\|failed; it starts again\|internal fault"'

# ---- an incident
pkill -KILL -f '^VLLM::EngineCore'
check "the kill is an incident" said "by signal 9"
check "the status line tells it" states "1 open incident(s)"
check "root reads it" bash -c 'oomwatch-agent incidents list | grep -q vllm-8123'

# ---- reload
check "reload of the agent" systemctl reload oomwatch.service
check "the configuration was read" said "read anew"
echo 'nonsense = [' >>/etc/oomwatch/config.toml
systemctl reload oomwatch.service
check "a wrong one is refused" said "the old one stays"
check "and it goes on" is ActiveState active
printf 'schema_version = 1\n' >/etc/oomwatch/config.toml

# ---- a hang, a kill, an end
before=$(show MainPID)
kill -STOP "$before"
check "the watchdog ends a stopped agent" becomes NRestarts 1
check "it is active again" becomes ActiveState active
kill -KILL "$(show MainPID)"
check "it comes back after SIGKILL" becomes NRestarts 2
check "and is active" becomes ActiveState active
check "nothing was told twice" bash -c 'oomwatch-agent incidents list --json; [ "$(oomwatch-agent incidents list --json | grep -c "\"id\"")" = 1 ]'
check "the agent stops within 3 s" within 3 systemctl stop oomwatch.service
check "the agent ended by itself" is Result success
check "the agent's status is 0" is ExecMainStatus 0
check "nothing was left unwritten" bash -c '! journalctl --quiet -u oomwatch.service | grep -F "did not take everything"'
systemctl stop engine.service 2>/dev/null
check "uninstall of the agent" service uninstall
verdict
