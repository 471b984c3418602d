#!/usr/bin/env python3
"""Write what is generated here: the rules as a PrometheusRule, and the dashboard.

``deploy/generate.py`` writes both anew; ``--runbooks URL`` prints the rules with links to a place
of your own instead, such as a wiki that holds docs/runbooks: ``URL/CAUSE``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "grafana"))

from dashboard import dashboard  # noqa: E402 - the folder beside this file is put on the path

RULES = HERE / "prometheus" / "oomwatch.rules.yml"
SERVED = "http://{{ $labels.instance }}/runbooks/"


def rules(runbooks: str | None = None) -> str:
    """The rules, with their links as they stand or to another place."""
    text = RULES.read_text(encoding="utf-8")
    return text if runbooks is None else text.replace(SERVED, f"{runbooks.rstrip('/')}/")


def prometheus_rule() -> str:
    """The same rules for the Prometheus operator."""
    head, _, groups = RULES.read_text(encoding="utf-8").partition("groups:\n")
    indented = re.sub(r"(?m)^(?=.)", "  ", f"groups:\n{groups}")
    return (
        "# Generated from oomwatch.rules.yml by deploy/generate.py.\n"
        f"{head}"
        "apiVersion: monitoring.coreos.com/v1\n"
        "kind: PrometheusRule\n"
        "metadata:\n"
        "  name: oomwatch\n"
        "  labels:\n"
        "    app.kubernetes.io/name: oomwatch\n"
        "spec:\n"
        f"{indented}"
    )


def files() -> Iterator[tuple[Path, str]]:
    """Every generated file with what it has to hold."""
    yield HERE / "prometheus" / "oomwatch.prometheusrule.yml", prometheus_rule()
    text = json.dumps(dashboard(), indent=2, ensure_ascii=False)
    yield HERE / "grafana" / "oomwatch.json", f"{text}\n"


def main() -> None:
    """Write the files that are not as they should be, or print the rules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runbooks", metavar="URL", help="print the rules with these links")
    given = parser.parse_args()
    if given.runbooks is not None:
        printed = rules(given.runbooks)
        yaml.safe_load(printed)
        sys.stdout.write(printed)
        return
    for path, text in files():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote {path.relative_to(HERE.parent)}\n")


if __name__ == "__main__":
    main()
