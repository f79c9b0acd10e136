"""`zeroband join`: a machine that knows the store and the token alone takes part in a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiny_runs import ForkedCluster

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

LIMIT_S = 120.0
ARGUMENTS = (
    *("--model.d-model=32", "--model.n-layers=2", "--model.n-heads=2", "--data.seq-length=32"),
    *("--data.source.type=synthetic", "--data.source.documents=200", "--optim.warmup-steps=2"),
    *("--train.total-steps=1000000", "--train.batch-size=4", "--train.micro-bs=4", "--train.threads=1"),
    *("--train.dtype=float32", "--outer.type=diloco", "--outer.inner-steps=20", "--fault.detect-s=10"),
)


def test_a_machine_that_knows_the_store_and_the_token_alone_takes_part(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("the secret\n")
    token.chmod(0o600)
    env = {"OMP_NUM_THREADS": "1", "ZERO_BAND_RUN__TOKEN_FILE": str(token)}
    places = (f"--data.cache-dir={tmp_path / 'cache'}",)
    with ForkedCluster(tmp_path / "runs", (*ARGUMENTS, *places), nodes=1, env=env) as cluster:
        founder = cluster.start()
        cluster.wait_until(lambda run: (run.round or 0) >= 1, timeout_s=LIMIT_S)
        assert cluster.store_url is not None
        own = [
            "--node.id=late",
            f"--run.dir={tmp_path / 'runs'}",
            "--train.threads=1",
            "--train.dtype=float32",
            *places,
        ]
        known = [cluster.store_url, "--run-id", cluster.run_id, "--token-file", str(token)]
        command = [sys.executable, "-m", "zeroband.cli", "join", *known, *own]
        with (
            (tmp_path / "late.log").open("w") as log,
            subprocess.Popen(
                command, stdout=log, stderr=log, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}
            ) as late,
        ):
            try:
                cluster.wait_until(lambda run: set(run.members) == {founder.node_id, "late"}, timeout_s=LIMIT_S)
                view = cluster.wait_until(
                    lambda run: {node.step > 0 for node in run.nodes} == {True}, timeout_s=LIMIT_S
                )
                late.send_signal(signal.SIGTERM)
                assert late.wait(LIMIT_S) == 0, (tmp_path / "late.log").read_text()
            finally:
                late.kill()
        assert view.disagreements == ()
        founder.terminate()
        assert founder.wait(LIMIT_S) == 0
    said = (tmp_path / "late.log").read_text()
    assert "the token is correct" in said and "this machine's configuration is in" in said
