"""`zeroband data prepare` against the tokenizers library's own batch call and datasets.map, on this machine.

Text of Python's standard library as JSON Lines, and a byte-level BPE that is trained on it here. All ways take turns.
What counts of `prepare` is the whole command, less the same command on one line; of the others the call alone.

    python bench/prepare.py [--megabytes 64] [--repeats 3] [--vocab-size 32000]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from evidence import count, require

from zeroband.config.data import TextSource
from zeroband.data.shard_set import ShardSet
from zeroband.data.sources import documents

LIMIT_S = 3600.0

BATCH = """
import json, sys, time
from tokenizers import Tokenizer
path, tokenizer = sys.argv[1:]
encoder = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
encoder.encode_special_tokens = True
texts = [json.loads(line)["text"] for line in open(path)]
encoder.encode_batch(texts[:2], add_special_tokens=False)
began_s, tokens = time.perf_counter(), 0
for start in range(0, len(texts), 64):
    tokens += sum(map(len, encoder.encode_batch(texts[start : start + 64], add_special_tokens=False)))
print(json.dumps([tokens, time.perf_counter() - began_s]))
"""

MAP = """
import json, os, sys, time
import datasets, transformers
path, tokenizer, workers = sys.argv[1:]
encoder = transformers.AutoTokenizer.from_pretrained(tokenizer)
data = datasets.load_dataset("json", data_files=path, split="train", cache_dir=os.environ["HF_DATASETS_CACHE"])
def encode(rows):
    return {"ids": encoder(rows["text"], add_special_tokens=False, split_special_tokens=True)["input_ids"]}
began_s = time.perf_counter()
made = data.map(encode, batched=True, remove_columns=["text"], num_proc=int(workers) if workers != "1" else None)
took_s = time.perf_counter() - began_s
print(json.dumps([sum(map(len, made["ids"])), took_s]))
"""

COMMAND = "import sys; from zeroband.cli import main; sys.exit(main(sys.argv[1:]))"


def write_corpus(path: Path, megabytes: int) -> list[str]:
    """Lines of JSON of at least so many megabytes of text, the library's files again and again, no two lines alike."""
    files = [str(document.text, "utf-8", "replace") for document in documents(TextSource(), 0)]
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


def said(code: str, arguments: Sequence[object], **env: str) -> tuple[int, float]:
    """Tokens and seconds that a program prints."""
    words = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(words, env=os.environ | env, capture_output=True, text=True, timeout=LIMIT_S)
    require(done.returncode == 0, done.stderr)
    tokens, took_s = json.loads(done.stdout.splitlines()[-1])
    return tokens, took_s


def prepared(path: Path, tokenizer: Path, out: Path, workers: int) -> tuple[int, float]:
    """Ids without the ends of documents, and seconds, of the command from its start to its end."""
    shutil.rmtree(out, ignore_errors=True)
    words = [sys.executable, "-c", COMMAND, "data", "prepare", str(path), str(out), "--tokenizer", str(tokenizer)]
    began_s = time.perf_counter()
    done = subprocess.run(
        [*words, "--workers", str(workers), "--unit-mb", "4"], capture_output=True, text=True, timeout=LIMIT_S
    )
    took_s = time.perf_counter() - began_s
    require(done.returncode == 0, done.stderr)
    made = ShardSet.of_json((out / "manifest.json").read_bytes())
    return made.tokens - made.documents, took_s


def measure(folder: Path, repeats: int, corpus: Path, tokenizer: Path) -> dict[str, list[float]]:
    """Tokens a second of each way, in turns. Ends the program where two give other numbers of tokens."""
    line = folder / "line.jsonl"
    line.write_text(corpus.open(encoding="utf-8").readline(), encoding="utf-8")
    ways = {
        "tokenizers, one thread": lambda _: said(BATCH, [corpus, tokenizer], TOKENIZERS_PARALLELISM="false"),
        "tokenizers, its threads": lambda _: said(BATCH, [corpus, tokenizer], TOKENIZERS_PARALLELISM="true"),
    }
    for workers in (1, 2):
        ways[f"prepare, {workers} workers"] = lambda _, n=workers: less_start(folder, line, corpus, tokenizer, n)
        ways[f"datasets.map, {workers} processes"] = lambda turn, n=workers: said(
            MAP,
            [corpus, tokenizer, n],
            HF_DATASETS_CACHE=str(folder / f"cache-{n}-{turn}"),
            TOKENIZERS_PARALLELISM="false",
        )
    rates: dict[str, list[float]] = {name: [] for name in ways}
    counted = set[int]()
    for turn in range(repeats):
        for name, way in ways.items():
            tokens, took_s = way(turn)
            counted.add(tokens)
            rates[name].append(tokens / took_s)
    require(len(counted) == 1 and counted != {0}, f"the ways counted {sorted(counted)} tokens")
    return rates


def less_start(folder: Path, line: Path, corpus: Path, tokenizer: Path, workers: int) -> tuple[int, float]:
    """What `prepare` of the corpus took longer than of one line: start, tokenizer and workers are paid once."""
    _, start_s = prepared(line, tokenizer, folder / "out", workers)
    tokens, took_s = prepared(corpus, tokenizer, folder / "out", workers)
    require(took_s > start_s, f"{took_s:.1f} s for the corpus and {start_s:.1f} s for a line")
    return tokens, took_s - start_s


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
        rates = measure(folder, options.repeats, folder / "corpus.jsonl", folder / "tokenizer")
    base = statistics.median(rates["tokenizers, one thread"])
    print(f"{os.cpu_count()} cores, {options.megabytes} MB of text, {options.vocab_size} ids, {options.repeats} turns")
    print("| way | tokens/s, median | best | of tokenizers on one thread | of bests |")
    print("|---|---|---|---|---|")
    best = max(rates["tokenizers, one thread"])
    for name, seen in rates.items():
        median = statistics.median(seen)
        print(f"| {name} | {median:,.0f} | {max(seen):,.0f} | {median / base:.2f} | {max(seen) / best:.2f} |")


if __name__ == "__main__":
    main()
