"""Nodes that compute in another type, by other micro-batches, train one model: real processes, one state."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny_runs import ForkedCluster

from zeroband.checkpoint.loading import open_checkpoint, steps_in_order
from zeroband.checkpoint.storage import open_storage
from zeroband.elastic.membership.loss_record import LossRecord
from zeroband.tools.data.audit import audit, read_rounds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LIMIT_S = 200.0
STEPS, BATCH, LENGTH = 8, 4, 32
ARGUMENTS = (
    *("--model.d-model=32", "--model.n-layers=2", "--model.n-heads=2", f"--data.seq-length={LENGTH}"),
    *("--data.source.type=synthetic", "--data.source.documents=200", "--optim.warmup-steps=2"),
    *(f"--train.total-steps={STEPS}", f"--train.batch-size={BATCH}", "--train.threads=1", "--fault.detect-s=10"),
)
PRECISE = ("--train.dtype=float32", "--train.micro-bs=2", "--train.device=cpu", "--eval.every-steps=4")
COARSE = ("--train.dtype=bfloat16", "--train.micro-bs=4", "--eval.every-steps=4")


@pytest.mark.parametrize(
    ("outer", "steps_of_round"),
    [
        pytest.param(("--outer.type=diloco", "--outer.inner-steps=4"), 4, id="diloco", marks=pytest.mark.soak),
        pytest.param(("--outer.type=ddp",), 1, id="ddp", marks=pytest.mark.soak),
    ],
)
def test_nodes_of_other_types_and_micro_batches_hold_one_state(
    tmp_path: Path, outer: tuple[str, ...], steps_of_round: int
) -> None:
    places = (f"--data.cache-dir={tmp_path / 'cache'}", f"--ckpt.path={tmp_path / 'checkpoints'}")
    with ForkedCluster(tmp_path, (*ARGUMENTS, *outer, *places), nodes=2, env={"OMP_NUM_THREADS": "1"}) as cluster:
        for own in (PRECISE, COARSE):
            cluster.start(arguments=own)
        codes = cluster.wait(timeout_s=LIMIT_S)
        assert set(codes.values()) == {0}, cluster.describe()
        rounds = read_rounds(cluster.run_dir)
        committed = [node.events("round_committed") for node in cluster.nodes.values()]
        precise, coarse = (node.metrics() for node in cluster.nodes.values())
        storage = open_storage(str(tmp_path / "checkpoints"), cluster.run_id)
    digests, others = ([event["digest"] for event in events] for events in committed)
    assert digests == others and len(set(digests)) == 1 + STEPS // steps_of_round
    assert audit(rounds).is_exact
    assert all(event["weights"] == [steps_of_round * BATCH * LENGTH] * 2 for event in committed[0][1:])
    losses, roughly = ([record["train/loss"] for record in metrics] for metrics in (precise, coarse))
    assert losses[-1] < losses[0] - 0.05 and roughly[-1] < roughly[0] - 0.05
    record = open_checkpoint(storage, steps_in_order(storage)[0]).manifest.stamp.record
    last = [*losses[-steps_of_round:], *roughly[-steps_of_round:]]
    assert LossRecord.of(record).loss == pytest.approx(sum(last) / len(last), rel=1e-6)
    exact, rough = ([r["eval/loss"] for r in metrics if "eval/loss" in r] for metrics in (precise, coarse))
    assert len(exact) == 2 and exact != rough
    assert rough == pytest.approx(exact, rel=1e-2)  # one model; bfloat16 rounds what it computes of it
