"""A comparison with real processes: a common start, one node and two, the page; and the same again for nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeroband import cli

TINY = (
    *("--model.d-model=32", "--model.n-layers=1", "--model.n-heads=2", "--model.d-ff=64", "--data.seq-length=32"),
    *("--data.source.type=synthetic", "--data.source.documents=200", "--data.hold-out=0.05"),
    *("--train.batch-size=4", "--train.micro-bs=8", "--train.dtype=float32", "--train.threads=1"),
    *("--optim.warmup-steps=2", "--fault.detect-s=30"),
)


@pytest.mark.soak
@pytest.mark.slow
def test_methods_are_compared_from_one_start_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZERO_BAND_RUN__DIR", str(tmp_path / "runs"))
    asked = ["compare", "--methods=single,diloco-fp32", "--nodes=2", "--inner-steps=4", "--train.total-steps=8"]
    asked += ["--warm-steps=20", "--warm-lr=1e-2", "--optim.adamw.lr=1e-4", "--points=2", "--samples=32"]
    asked += [*TINY, f"--data.cache-dir={tmp_path / 'cache'}", f"--out={tmp_path / 'out'}"]
    assert cli.main(asked) == 0
    outcomes = {
        one["arm"]: one for one in map(json.loads, map(Path.read_text, (tmp_path / "runs/compare-results").iterdir()))
    }
    for arm, nodes, rounds in (("single", 1, 0), ("diloco-fp32", 2, 2)):
        outcome: dict[str, Any] = outcomes[arm]
        counters = outcome["measured"]
        assert [point["step"] for point in outcome["points"]] in ([4, 8], [8])  # [8]: the writer was not done yet
        assert outcome["tuning_loss"] not in (None, outcome["points"][-1]["loss"])  # of another text
        assert all(point["loss"] < 5.4 for point in outcome["points"])  # log(320) = 5.8 where nothing was learned
        assert (counters["nodes"], counters["rounds"], counters["tokens"]) == (nodes, rounds, nodes * 8 * 4 * 32)
        assert counters["sent_bytes"] == pytest.approx(rounds * 4 * outcome["params"], rel=0.02)
    told = (tmp_path / "out" / "table.md").read_text()
    assert "| diloco-fp32 |" in told and told.count(".png)") == len(list((tmp_path / "out").glob("*.png"))) == 3
    assert not list((tmp_path / "out" / "checkpoints").iterdir())
    capsys.readouterr()
    assert cli.main(asked) == 0
    assert capsys.readouterr().out.count("cached") == 2
