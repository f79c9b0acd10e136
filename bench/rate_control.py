"""Transfers at one even pace beside those that are left to TCP: the same run with comm.rate_control and without.

Linux as root, with `ip` and a C compiler (bench/wan.py).

Four real nodes in network namespaces, every access link shaped in both directions, rounds of a second of computing.
A transfer takes as long as the member that it takes longest; the first rounds, in which the pace is found, are apart.

    python bench/rate_control.py [--mbit 3 10 30 100] [--rtt-ms 20]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from utilisation import trained

from zeroband.tools.compare.methods import Arm, flags_of

NODES = 4
INNER_STEPS = 5
SEARCHING, ROUNDS = 12, 6
"""Rounds that come before, and that count."""

MODELS = {
    3.0: ("128", "4"),
    10.0: ("256", "5"),
    30.0: ("256", "5"),
    100.0: ("384", "7"),
}
"""Width and layers by Mbit/s: a transfer takes more than a second."""


def transfers(mbit: float, rtt_ms: float, *, paced: bool) -> tuple[list[float], int]:
    """Seconds of each round's transfer, and the model's size."""
    width, layers = MODELS[mbit]
    arguments = flags_of(Arm("diloco", "diloco"), nodes=NODES, inner_steps=INNER_STEPS)
    arguments += ["--model.d-model", width, "--model.n-layers", layers, f"--comm.rate_control={str(paced).lower()}"]
    arguments += [f"--train.total-steps={(SEARCHING + ROUNDS) * INNER_STEPS}"]
    records, params = trained(arguments, mbit, rtt_ms, NODES)
    rounds = [[record["outer/transfer_s"] for record in of_node if "outer/round" in record] for of_node in records]
    assert {len(of_node) for of_node in rounds} == {SEARCHING + ROUNDS}, "a node was away for some rounds"
    return [max(float(str(took_s)) for took_s in of_round) for of_round in zip(*rounds, strict=True)], params


def row(mbit: float, params: int, free: Sequence[float], paced: Sequence[float]) -> str:
    """A line of the table."""
    of_free, of_paced = free[SEARCHING:], paced[SEARCHING:]
    medians = statistics.median(of_free), statistics.median(of_paced)
    spreads = [f"{min(times):.2f} to {max(times):.2f}" for times in (of_free, of_paced)]
    searching = sum(paced[:SEARCHING]) / sum(free[:SEARCHING])
    cells = [f"{mbit:g}", f"{params / 1e6:.1f}", f"{medians[0]:.2f}", spreads[0], f"{medians[1]:.2f}", spreads[1]]
    return "| " + " | ".join([*cells, f"{medians[1] / medians[0]:.3f}", f"{searching:.3f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", nargs="+", type=float, default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--rtt-ms", type=float, default=20)
    arguments = parser.parse_args()
    print(f"| Mbit/s | M values | TCP, s | range | paced, s | range | paced / TCP | the first {SEARCHING} rounds |")
    print("|---|---|---|---|---|---|---|---|")
    for mbit in arguments.mbit:
        free, params = transfers(mbit, arguments.rtt_ms, paced=False)
        paced, _ = transfers(mbit, arguments.rtt_ms, paced=True)
        print(row(mbit, params, free, paced), flush=True)


if __name__ == "__main__":
    main()
