"""A state too large to be copied, in real processes: a node joins from the members, another one from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny_runs import ForkedCluster

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

LIMIT_S = 400.0
ARGUMENTS = (  # 39 M parameters, whose outer state takes 310 MB; one node's rounds 155 MB, so that two are too many
    *("--model.d-model=512", "--model.n-layers=12", "--model.n-heads=8", "--data.seq-length=8"),
    *("--data.source.type=synthetic", "--data.source.documents=200", "--optim.warmup-steps=2"),
    *("--train.total-steps=1000000", "--train.batch-size=1", "--train.micro-bs=1", "--train.threads=1"),
    *("--train.dtype=float32", "--outer.type=diloco", "--outer.inner-steps=16", "--fault.detect-s=20"),
)


@pytest.mark.parametrize("source", ["members", "checkpoint"])
def test_node_joins_a_run_whose_state_is_served_as_it_lies_there(tmp_path: Path, source: str) -> None:
    saves = (f"--ckpt.path={tmp_path / 'checkpoints'}", "--ckpt.every-rounds=1") if source == "checkpoint" else ()
    places = (f"--data.cache-dir={tmp_path / 'cache'}",)
    with ForkedCluster(tmp_path / "runs", (*ARGUMENTS, *saves, *places), nodes=1) as cluster:
        cluster.start()
        cluster.wait_until(lambda run: (run.round or 0) >= 2, timeout_s=LIMIT_S)
        late = cluster.start()
        cluster.wait_until(lambda run: bool(late.events("joined")), timeout_s=LIMIT_S)
        joined = late.events("joined")[-1]["round"]
        view = cluster.wait_until(lambda run: (run.round or 0) > joined + 1, timeout_s=LIMIT_S)
        assert view.disagreements == ()
        recovered = late.events("recovered")[-1]
        assert recovered["source"] == source
