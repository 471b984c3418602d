#!/bin/bash
# What the scripts in the container share. $python: the interpreter that has oomwatch's dependencies.
python=$1
failures=0
check() { # WHAT COMMAND...
    local what=$1
    shift
    if "$@" >/tmp/said 2>&1; then echo "ok $what"; else
        echo "FAILED $what: $*"
        sed 's/^/    /' /tmp/said
        failures=$((failures + 1))
    fi
}
show() { systemctl show oomwatch.service --property="$1" --value; }
is() { # PROPERTY VALUE
    local now
    now=$(show "$1")
    [ "$now" = "$2" ] || { echo "$1 is $now"; return 1; }
}
becomes() { # PROPERTY VALUE: within ten seconds
    for _ in $(seq 100); do
        [ "$(show "$1")" = "$2" ] && return 0
        sleep 0.1
    done
    is "$1" "$2"
}
service() { # ARGUMENTS of `oomwatch service`
    PYTHONPATH=/opt/oomwatch-test "$python" -c \
        'from oomwatch.cli.service import command; command(prog_name="oomwatch service")' "$@"
}
within() { # SECONDS COMMAND...
    local begun=$SECONDS limit=$1
    shift
    "$@" && [ $((SECONDS - begun)) -le "$limit" ]
}

verdict() {
    echo "$failures checks failed"
    [ "$failures" = 0 ] && echo "all checks passed"
}
