"""`zeroband chaos @config ...`: train with several nodes on this machine while injecting random faults.

Checks that no result diverges, no data is lost and no node hangs, and ends with a one-page report.
"""

from __future__ import annotations

import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from zeroband.config import RunConfig, load_config
from zeroband.data.ledger import count
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import ConfigError
from zeroband.tools.chaos.checks import Pulse
from zeroband.tools.chaos.effects import EnvironmentFaults, left_behind
from zeroband.tools.chaos.judgement import EXIT_UNJUDGED, Judgement
from zeroband.tools.chaos.options import ChaosOptions, read_options, require_endless, require_own, require_soak
from zeroband.tools.chaos.plan import OF_NETWORK, PlannedFault, PlanRules, plan
from zeroband.tools.chaos.soak import DIAL_OUT_ONLY, Soak, SoakFailed
from zeroband.tools.chaos.soak_report import compare, render, round_costs
from zeroband.tools.chaos.stores import Stores, StoresOfNodes
from zeroband.tools.chaos.watch import NodeFiles, SoakWatch, Violations
from zeroband.tools.cluster.interrupts import counted_interrupts
from zeroband.tools.cluster.local import LocalCluster
from zeroband.tools.cluster.network import Network
from zeroband.tools.data.audit import Audit

_EXIT_CONFIG = 2
_STORE_RETRY_S = 10.0
_NODES_STORE_RETRY_S = 1.0
"""For stores that nodes hold: they may be lost with their node."""
_LEAVING_S = 60.0
"""Time for the last guardians to clean up."""


@dataclass(frozen=True)
class SoakOutcome:
    """Result of a soak."""

    report: str
    judgement: Judgement


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Exit codes: 0 all invariants held, 1 violations, 2 wrong arguments, 3 no conclusion, 130 Ctrl-C.
    """
    try:
        options, report = read_options(argv)
        with counted_interrupts() as interrupts:
            outcome = soak(options, is_stopped=lambda: interrupts.count > 0)
            print(f"\n{outcome.report}")
            if report is not None:
                report.write_text(outcome.report, encoding="utf-8")
            if interrupts.count:
                return interrupts.exit_code
            for line in outcome.judgement.lines:
                print(f"zeroband chaos: {line}", file=sys.stderr)
            return outcome.judgement.exit_code
    except ConfigError as error:
        print(f"zeroband: {error}", file=sys.stderr)
        return _EXIT_CONFIG
    except SoakFailed as error:
        print(f"zeroband: {error}", file=sys.stderr)
        return EXIT_UNJUDGED


def soak(
    options: ChaosOptions,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> SoakOutcome:
    """Run a soak. Raises ConfigError for wrong options, SoakFailed if the nodes do not start training."""
    require_soak(options)
    obstacle = Network.obstacle()
    violations = Violations(say)
    with ExitStack() as stack:
        network = None if obstacle else stack.enter_context(Network())
        stores = stack.enter_context(
            Stores(options.stores, network) if options.stores else StoresOfNodes(options.names)
        )
        env_faults = EnvironmentFaults(Path(stack.enter_context(TemporaryDirectory())))
        cluster = stack.enter_context(_open_cluster(options, stores, network, env_faults))
        if isinstance(stores, StoresOfNodes):
            stores.cluster = cluster
            if network is not None:
                stack.enter_context(network.joined("watch"))
        environment = cluster.environment("node0", 1)
        if options.dial_out_only:
            load_config((*cluster.arguments, *DIAL_OUT_ONLY), environment)
        config = load_config(cluster.arguments, environment)
        require_own(config, cluster)
        require_endless(config, options)
        say(f"starting {options.nodes} nodes; their files are in {cluster.run_dir}")
        outcome = _SoakRun(options, cluster, stores, config, violations, obstacle, env_faults)
        outcome.run(is_stopped, say)
        outcome.check_left_behind(is_closed=False)
    outcome.check_left_behind(is_closed=True)
    judged = outcome.judged(is_interrupted=is_stopped())
    cluster.run_dir.mkdir(parents=True, exist_ok=True)
    (cluster.run_dir / "report.md").write_text(judged.report, encoding="utf-8")
    return judged


def _token(stores: Stores | StoresOfNodes) -> Mapping[str, str]:
    """Return a run token for stores held by nodes, which are open otherwise; a token that is set is kept."""
    if not isinstance(stores, StoresOfNodes):
        return {}
    return {"ZERO_BAND_RUN__TOKEN": os.environ.get("ZERO_BAND_RUN__TOKEN") or secrets.token_hex(16)}


def _open_cluster(
    options: ChaosOptions, stores: Stores | StoresOfNodes, network: Network | None, env_faults: EnvironmentFaults
) -> LocalCluster:
    return LocalCluster(
        options.directory,
        options.arguments,
        nodes=options.nodes,
        run_id=options.run_id,
        store_url=stores.url,
        env={"OMP_NUM_THREADS": "1", **_token(stores), **env_faults.environment()},
        network=network,
    )


class _SoakRun:
    """One soak and the inputs of its report."""

    def __init__(
        self,
        options: ChaosOptions,
        cluster: LocalCluster,
        stores: Stores | StoresOfNodes,
        config: RunConfig,
        violations: Violations,
        obstacle: str,
        env_faults: EnvironmentFaults,
    ) -> None:
        self._options, self._cluster, self._stores, self._config = options, cluster, stores, config
        self._violations, self._obstacle, self._env_faults = violations, obstacle, env_faults
        began_s, began_at_s = time.monotonic(), time.time()
        self._now = lambda: time.monotonic() - began_s
        names = options.names
        self._files = NodeFiles(cluster.run_dir, began_at_s=began_at_s)
        self._plan = self._planned(names)
        if not self._plan:
            raise ConfigError(
                f"no fault falls within --minutes={options.minutes:g} with --mtbf-s={options.mtbf_s:g} and "
                f"--seed={options.seed}; raise --minutes or lower --mtbf-s"
            )

    def _planned(self, names: tuple[str, ...]) -> tuple[PlannedFault, ...]:
        options = self._options
        kinds = tuple(kind for kind in options.wanted_kinds if not (self._obstacle and kind in OF_NETWORK))
        rules = PlanRules(
            nodes=names,
            duration_s=60 * options.minutes,
            mtbf_s=options.mtbf_s,
            kinds=kinds,
            detect_s=self._config.fault.detect_s,
            keep_undisturbed=options.min_undisturbed,
            dial_out_only=options.dial_out_only_nodes,
        )
        self._left_out = self._why_left_out(rules)
        return plan(rules, options.seed)

    def _why_left_out(self, rules: PlanRules) -> str:
        reasons: list[str] = []
        broken = [kind.value for kind in OF_NETWORK if self._obstacle and kind in self._options.wanted_kinds]
        if broken:
            reasons.append(f"{', '.join(broken)} ({self._obstacle})")
        if crowding := [kind.value for kind in rules.kinds if kind not in rules.possible_kinds()]:
            reasons.append(
                f"{', '.join(crowding)} (they would leave fewer than {rules.keep_undisturbed} nodes undisturbed)"
            )
        return "; ".join(reasons)

    def run(self, is_stopped: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Run all phases."""
        options, cluster, fault = self._options, self._cluster, self._config.fault
        run_id, token = cluster.run_id, self._config.run.token
        key = RunKey.of(token.get_secret_value() if token else None, run_id)
        is_held = isinstance(self._stores, StoresOfNodes)
        retry_s = _NODES_STORE_RETRY_S if is_held else _STORE_RETRY_S
        with closing(
            RedisStore(self._stores.local_url, run_id, key=key, lease_s=fault.time_outs.lease_s, retry_s=retry_s)
        ) as store:
            watch = SoakWatch(store, self._files, self._violations, is_held_by_nodes=is_held)
            self._watch = watch
            soak = Soak(
                *(cluster, self._stores, watch, options),
                detect_s=fault.detect_s,
                env_faults=self._env_faults,
                now=self._now,
                is_stopped=is_stopped,
                say=say,
            )
            self._course = soak.course
            soak.found()
            say(f"{self._now():7.1f} s  baseline of {options.calm_minutes:g} minutes")
            round_s = soak.run_baseline(60 * options.calm_minutes)
            if round_s is not None:  # without a baseline nothing can be judged
                watch.pulse = Pulse(round_s=round_s, detect_s=fault.detect_s, slack_s=options.slack_s)
                for node in cluster.nodes:
                    watch.pulse.advanced(node, self._now())
                say(f"{self._now():7.1f} s  {len(self._plan)} faults in {options.minutes:g} minutes")
                soak.run_faults(self._plan, 60 * options.minutes)
                say(f"{self._now():7.1f} s  no more faults; waiting for all nodes to recover")
                soak.await_recovery()
            soak.end()
        self._audit: Audit = watch.check_data(is_final=True)

    def check_left_behind(self, *, is_closed: bool) -> None:
        """Report processes and files left behind; guardians may take a moment to clean up."""
        end_s = time.monotonic() + _LEAVING_S
        shm_dir = self._config.node.shm_dir
        while left := left_behind(self._cluster.run_id, self._stores, shm_dir, is_closed=is_closed):
            if time.monotonic() > end_s:
                when = "after everything was closed" if is_closed else "after all nodes had ended"
                self._violations.add(f"left behind {when}: {', '.join(left)}")
                return
            time.sleep(0.1)

    def judged(self, *, is_interrupted: bool) -> SoakOutcome:
        """Return the judgement and the report."""
        course, watch, audit, found = self._course, self._watch, self._audit, self._violations
        calm_s = course.calm[1] - course.calm[0]
        events = [record for records in self._files.records.values() for record in records if "kind" in record]
        costs = [cost for node, records in self._files.records.items() for cost in round_costs(node, records)]
        comparison = compare(costs, course.struck, course.calm, course.end_s)
        seen = Judgement(
            run_dir=str(self._cluster.run_dir),
            rounds=audit.rounds,
            samples=audit.trained,
            compared=len(watch.agreement.compared),
            calm_rounds=min(course.calm_rounds, comparison.undisturbed.rounds),
            calm_s=calm_s,
            planned=len(self._plan),
            struck=len(course.planned),
            later_rounds=course.later_rounds,
            violations=tuple(found.found),
            starved=tuple(found.starved),
            is_interrupted=is_interrupted,
            complete_s=watch.complete_s,
            unseen=tuple(kind.value for kind in self._options.kinds if not course.has_struck(kind)),
            retries=len({(e["round"], e["reason"]) for e in events if e["kind"] == "round_retried"}),
            fences=sum(e["kind"] == "fenced" for e in events),
            mismatches=watch.agreement.mismatches,
            hangs=watch.hangs,
            audit=_data_line(audit),
            cpu_share=course.calm_cpu_s / calm_s / (os.cpu_count() or 1) if calm_s else 0.0,
            calm_starved=watch.starvation.share(*course.calm),
            storm_starved=watch.starvation.share(course.calm[1], course.end_s),
            restart_cpu_s=tuple(one.restart_cpu_s for one in course.struck if one.restart_cpu_s is not None),
        )
        about = {"machine": _machine(), "config": _summary(self._config), "left out": self._left_out}
        return SoakOutcome(render(self._options, about, course.struck, comparison, seen), seen)


def _data_line(audit: Audit) -> str:
    accounts = audit.accounts.values()
    repeated, skipped = sum(count(a.repeated) for a in accounts), sum(count(a.skipped) for a in accounts)
    return f"{audit.trained} samples trained, {repeated} repeated, {skipped} skipped"


def _machine() -> str:
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{os.cpu_count()} cores, {memory_gb:.0f} GB, {platform.system()} {platform.release()}"


def _summary(config: RunConfig) -> str:
    outer = config.outer.model_dump(exclude_none=True, exclude={"optimizer"}) if config.outer is not None else {}
    shown = {f"outer.{name}": value for name, value in outer.items()}
    shown |= {"fault.detect_s": config.fault.detect_s, "fault.inject": " ".join(config.fault.inject) or "none"}
    shown |= {f"model.{name}": value for name, value in config.model.model_dump(exclude_unset=True).items()}
    shown |= {"train.batch_size": config.train.batch_size}
    return ", ".join(f"{name} {value}" for name, value in shown.items())
