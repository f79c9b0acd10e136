"""`zeroband data prepare` against the tokenizers library's own batch call and datasets.map, on this machine.

Text of Python's standard library as JSON Lines, and a byte-level BPE that is trained on it here. All ways take turns.
What counts of `prepare` is the whole command, less the same command on two lines; of the others the call alone.

    python bench/prepare.py [--megabytes 64] [--repeats 3] [--vocab-size 32000]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from evidence import count, require

from zeroband.config.data import TextSource
from zeroband.data.shard_set import ShardSet
from zeroband.data.sources import documents

LIMIT_S = 3600.0
BASE = "tokenizers, one thread"

BATCH = """
import json, sys, time
from tokenizers import Tokenizer
path, tokenizer = sys.argv[1:]
encoder = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
encoder.encode_special_tokens = True
texts = [json.loads(line)["text"] for line in open(path)]
encoder.encode_batch_fast(texts[:2], add_special_tokens=False)
began_s, began_cpu_s, tokens = time.perf_counter(), time.process_time(), 0
for start in range(0, len(texts), 256):
    tokens += sum(map(len, encoder.encode_batch_fast(texts[start : start + 256], add_special_tokens=False)))
print(json.dumps([tokens, time.perf_counter() - began_s, time.process_time() - began_cpu_s]))
"""

MAP = """
import json, os, resource, sys, time
import datasets, transformers
def cpu_s():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)
path, tokenizer, workers = sys.argv[1:]
encoder = transformers.AutoTokenizer.from_pretrained(tokenizer)
data = datasets.load_dataset("json", data_files=path, split="train", cache_dir=os.environ["HF_DATASETS_CACHE"])
def encode(rows):
    return {"ids": encoder(rows["text"], add_special_tokens=False, split_special_tokens=True)["input_ids"]}
began_s, began_cpu_s = time.perf_counter(), cpu_s()
made = data.map(encode, batched=True, remove_columns=["text"], num_proc=int(workers) if workers != "1" else None)
took_s, took_cpu_s = time.perf_counter() - began_s, cpu_s() - began_cpu_s
print(json.dumps([sum(map(len, made["ids"])), took_s, took_cpu_s]))
"""

COMMAND = "import sys; from zeroband.cli import main; sys.exit(main(sys.argv[1:]))"


def write_corpus(path: Path, megabytes: int) -> list[str]:
    """Lines of JSON of at least so many megabytes of text, the library's files again and again, no two lines alike."""
    texts = (document.text for document in documents(TextSource(), 0))
    files = [text if isinstance(text, str) else text.decode("utf-8", "replace") for text in texts]
    size, number = 0, 0
    with path.open("w", encoding="utf-8") as out:
        while size < megabytes * 1e6:
            for text in files:
                for start in range(0, len(text), 4000):
                    piece = f"{number} {text[start : start + 4000]}"
                    out.write(json.dumps({"text": piece}) + "\n")
                    size, number = size + len(piece), number + 1
                if size >= megabytes * 1e6:
                    break
    return files


def train(folder: Path, texts: Sequence[str], vocab_size: int) -> None:
    """Write a byte-level BPE of this text as transformers loads it."""
    import tokenizers
    import transformers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)


class Cost(NamedTuple):
    """What some tokens cost, without the ends of documents."""

    tokens: int
    took_s: float
    cpu_s: float
    """Time of processors, of all threads and processes: what other work on the machine changes least."""


def said(code: str, arguments: Sequence[object], **env: str) -> Cost:
    """What a program prints of its cost."""
    words = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(words, env=os.environ | env, capture_output=True, text=True, timeout=LIMIT_S)
    require(done.returncode == 0, done.stderr)
    return Cost(*json.loads(done.stdout.splitlines()[-1]))


def prepared(path: Path, tokenizer: Path, out: Path, workers: int, unit_mb: float, *flags: str) -> Cost:
    """Cost of the command from its start to its end, with its workers."""
    shutil.rmtree(out, ignore_errors=True)
    words = [sys.executable, "-c", COMMAND, "data", "prepare", str(path), str(out), "--tokenizer", str(tokenizer)]
    began_s, began_cpu_s = time.perf_counter(), children_s()
    done = subprocess.run(
        [*words, "--workers", str(workers), "--unit-mb", str(unit_mb), *flags],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    took_s = time.perf_counter() - began_s
    require(done.returncode == 0, done.stderr)
    made = ShardSet.of_json((out / "manifest.json").read_bytes())
    return Cost(made.tokens - made.documents, took_s, children_s() - began_cpu_s)


def children_s() -> float:
    """Processor time of all processes that were started here and have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(folder: Path, repeats: int, corpus: Path, tokenizer: Path) -> dict[str, list[Cost]]:
    """Cost of each way, in turns. Ends the program where two give other numbers of tokens."""
    line = folder / "line.jsonl"
    with corpus.open(encoding="utf-8") as lines:
        first = lines.readline()
    line.write_text(first * 2, encoding="utf-8")
    batch, one_thread = (corpus, tokenizer), {"TOKENIZERS_PARALLELISM": "false"}
    ways: dict[str, Callable[[int], Cost]] = {
        BASE: lambda _: said(BATCH, batch, **one_thread),
        "tokenizers, its threads": lambda _: said(BATCH, batch, TOKENIZERS_PARALLELISM="true"),
    }
    for n in (1, 2):
        ways[f"prepare, {n} workers"] = lambda _, n=n: less_start(folder, line, corpus, tokenizer, n)
        ways[f"prepare --dedup, {n} workers"] = lambda _, n=n: less_start(folder, line, corpus, tokenizer, n, "--dedup")
        ways[f"datasets.map, {n} processes"] = lambda turn, n=n: said(
            MAP, (*batch, n), HF_DATASETS_CACHE=str(folder / f"cache-{n}-{turn}"), **one_thread
        )
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for turn in range(repeats):
        for name, way in ways.items():
            costs[name].append(way(turn))
    counted = {cost.tokens for seen in costs.values() for cost in seen}
    require(len(counted) == 1 and counted != {0}, f"the ways counted {sorted(counted)} tokens")
    return costs


def less_start(folder: Path, line: Path, corpus: Path, tokenizer: Path, workers: int, *flags: str) -> Cost:
    """What `prepare` of the corpus took longer than of two lines, one a unit: all workers start for either."""
    start = prepared(line, tokenizer, folder / "out", workers, line.stat().st_size / 2e6)
    whole = prepared(corpus, tokenizer, folder / "out", workers, 4, *flags)
    require(whole.took_s > start.took_s, f"{whole.took_s:.1f} s for the corpus and {start.took_s:.1f} s for two lines")
    return Cost(whole.tokens, whole.took_s - start.took_s, whole.cpu_s - start.cpu_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=count, default=64)
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--vocab-size", type=count, default=32_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zeroband-bench-") as name:
        folder = Path(name)
        texts = write_corpus(folder / "corpus.jsonl", options.megabytes)
        train(folder / "tokenizer", texts, options.vocab_size)
        costs = measure(folder, options.repeats, folder / "corpus.jsonl", folder / "tokenizer")
    print(f"{os.cpu_count()} cores, {options.megabytes} MB of text, {options.vocab_size} ids, {options.repeats} turns")
    print("| way | tokens/s, median | best | ratio of medians | of bests | tokens in a second of a processor | ratio |")
    print("|---|---|---|---|---|---|---|")
    rates = {name: [cost.tokens / cost.took_s for cost in seen] for name, seen in costs.items()}
    each = {name: statistics.median(cost.tokens / cost.cpu_s for cost in seen) for name, seen in costs.items()}
    median, best = statistics.median(rates[BASE]), max(rates[BASE])
    for name, seen in rates.items():
        ours, most = statistics.median(seen), max(seen)
        row = f"{ours:,.0f} | {most:,.0f} | {ours / median:.2f} | {most / best:.2f}"
        print(f"| {name} | {row} | {each[name]:,.0f} | {each[name] / each[BASE]:.2f} |")


if __name__ == "__main__":
    main()
