"""`zeroband doctor @config --nodes N`: check this machine for a run and measure its links to the other nodes.

Run it on all nodes at the same time. Exit codes: 0 a run would work; 2 wrong arguments; 3 it would not start, or most
likely not finish.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from zeroband.checks.checklist import all_checks, asked_config
from zeroband.checks.finding import Finding
from zeroband.config import RunConfig
from zeroband.errors import ConfigError
from zeroband.tools.arguments import bounded, parser_of, run_command

_EXIT_PROBLEM = 3


def main(argv: Sequence[str]) -> int:
    """Check and print findings with advice. Returns the exit code."""
    parser = parser_of("doctor", __doc__)
    add = parser.add_argument
    add("--nodes", type=bounded(int, ge=1), default=1, help="number of nodes that run it at the same time")
    add("--wait-s", type=bounded(float, ge=0), default=60.0, help="seconds to wait for the others")
    options, rest = parser.parse_known_args(argv)
    return run_command("doctor", lambda: _examine(asked_config(rest), options.nodes, options.wait_s))


def _examine(config: RunConfig, nodes: int, wait_s: float) -> int:
    if config.store.address is None and nodes > 1:
        raise ConfigError("--nodes needs store.url, through which the nodes find each other")
    from zeroband.tools.doctor.outside import look_outside  # imported lazily: loads torch

    findings = list(all_checks(config, os.environ, nodes if nodes > 1 else None))
    if config.store.address is not None:
        findings += look_outside(config, nodes, wait_s)
    _show(findings)
    return _EXIT_PROBLEM if any(finding.is_fatal for finding in findings) else 0


def _show(findings: Sequence[Finding]) -> None:
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        mark = "FAIL" if finding.is_fatal and finding.advice else "note" if finding.advice else "ok"
        print(f"{mark:<5} {finding.what:<{width}}  {finding.seen}")
        if finding.advice:
            print(f"{'':<5} {'':<{width}}  -> {finding.advice}")
