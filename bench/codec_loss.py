"""What a codec costs in loss: the demo's run, undisturbed, with each codec and the same seeds.

python bench/codec_loss.py [--codecs fp32 int8 int4] [--seeds 0 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from evidence import finite, require

ROOT = Path(__file__).parents[1]
NODES = 4
LAST_STEPS = 30
"""Of 240: the mean over these is compared, two rounds of each node."""


def final_loss(codec: str, seed: int) -> float:
    """Nats per byte at the end of the demo's run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "zeroband.cli", "simulate", str(NODES), "1", "src/zeroband/train.py"),
            *("@configs/demo.toml", "--run.dir", folder, "--run.seed", str(seed), "--comm.codec", codec),
            *("--elastic.start-nodes", str(NODES), "--observe.sample-tokens", "1"),
        ]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        losses: list[float] = []
        for file in Path(folder).glob("*/*/metrics.jsonl"):
            records = [json.loads(line) for line in file.read_text().splitlines()]
            losses += [record["train/loss"] for record in records if "train/loss" in record][-LAST_STEPS:]
    require(len(losses) == NODES * LAST_STEPS, f"{len(losses)} losses of {NODES * LAST_STEPS} were written")
    return finite(statistics.mean(losses), f"the loss with {codec}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", nargs="+", default=["fp32", "int8", "int4"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    print("| seed | codec | loss | over the first codec |\n|---|---|---|---|")
    for seed in arguments.seeds:
        first = None
        for codec in arguments.codecs:
            loss = final_loss(codec, seed)
            first = first or loss
            print(f"| {seed} | {codec} | {loss:.4f} | {100 * (loss / first - 1):+.2f} % |", flush=True)


if __name__ == "__main__":
    main()
