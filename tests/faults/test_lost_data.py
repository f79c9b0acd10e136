"""A node that cannot get its data any more ends, and the others read what it was dealt: packed ids, and evaluations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from tests.faults.conftest import Recorded, Setup, Story, record, samples_of
from tests.unit.data.prepared import FileServer, served, write_packed_set

from zeroband.elastic.membership.progress import Progress
from zeroband.observe.view import node_id_of_member
from zeroband.tools.data.audit import audit, read_rounds

pytestmark = [pytest.mark.faults, pytest.mark.slow]

SEQ_LENGTH, BATCH, INNER_STEPS = 32, 4, 4
EVALUATIONS, EVERY_STEPS = 3, 8
SOURCES = ("near", "far")
CACHE_GB = 3e-5
"""Half of it is a source's: eight blocks."""


def sources_at(paths: Mapping[str, object]) -> str:
    made = [{"name": name, "weight": 1, "source": {"type": "tokens", "path": str(paths[name])}} for name in SOURCES]
    return f"--data.sources={json.dumps(made)}"


def lose_the_far_source(story: Story, server: FileServer) -> None:
    story.until_contributing("node0", "node1")
    server.fault = lambda request: "part-" in request.path and request.refuse(404)
    story.until(lambda: not story.node("node1").is_running, "node1 needs a block that is gone")
    assert story.node("node1").exit_code == 1
    assert "far/part-0.npy does not exist (" in story.node("node1").console_tail()
    story.until_contributing("node0")
    last = max(max(story.history) + 3, 1 + EVALUATIONS * EVERY_STEPS // INNER_STEPS)
    story.until(lambda: max(story.history) >= last, "node0 goes on")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("lost")
    sets = folder / "sets"
    for seed, name in enumerate((*SOURCES, "other")):
        write_packed_set(sets / name, 2000, SEQ_LENGTH, seed=seed)
    with served(sets) as server:
        setup = Setup(
            outer=("diloco", "--outer.inner-steps", str(INNER_STEPS)),
            ranks=(1, 1),
            faults={"node1": [sources_at({"near": sets / "near", "far": f"{server.url}/far"})]},
            steps_per_round=INNER_STEPS,
            batch_size=BATCH,
            seq_length=SEQ_LENGTH,
            data=(
                sources_at({name: sets / name for name in SOURCES}),
                *("--data.packing=best-fit", "--data.hold-out=0.1", "--data.shuffle-blocks=4"),
                *(f"--data.cache-gb={CACHE_GB}", f"--eval.every-steps={EVERY_STEPS}", "--eval.batches=2"),
                f"--eval.sources={json.dumps([f'other={sets}/other/'])}",
            ),
        )
        return record(folder, setup, lambda story: lose_the_far_source(story, server))


def test_what_the_lost_node_was_dealt_is_trained_by_the_other_once(run: Recorded) -> None:
    found = audit(read_rounds(run.run_dir))
    assert found.is_exact and found.trained > 100, found
    (life,) = run.lives("node1")
    dealt = {
        number: Progress.from_record(verdict.record["progress"]).assigned for number, verdict in run.history.items()
    }
    last = max(number for number, assigned in dealt.items() if life.member_id in assigned)
    later = [run.trained(number) for number in run.history if number > last]
    assert {node_id_of_member(member) for trained in later for member in trained} == {"node0"}
    lost = samples_of(dealt[last][life.member_id])
    assert lost and lost <= {sample for trained in later for samples in trained.values() for sample in samples}


def evaluated(run: Recorded) -> Iterator[Mapping[str, Any]]:
    return (row for row in run.metrics["node0"] if "eval/loss" in row)


def test_held_out_samples_and_another_set_are_evaluated_by_source(run: Recorded) -> None:
    rows = list(evaluated(run))
    assert len(rows) >= EVALUATIONS
    for row in rows:
        losses = [row[f"eval/loss/{name}"] for name in SOURCES]
        assert row["eval/loss"] == pytest.approx(np.mean(losses)) and 0 < row["eval/loss/other"] < 10
        assert row["eval/tokens"] == sum(row[f"eval/tokens/{name}"] for name in SOURCES)
        assert 0 < row["eval/tokens/other"] < 2 * BATCH * SEQ_LENGTH, "padding is no target"


def test_losses_and_tokens_of_training_are_told_by_source(run: Recorded) -> None:
    for row in run.metrics["node0"]:
        named = [name for name in SOURCES if f"data/tokens/{name}" in row]
        assert all(row[f"train/loss/{name}"] > 0 for name in named)
        assert 0 < sum(row[f"data/tokens/{name}"] for name in named) <= BATCH * SEQ_LENGTH
    per_step = np.diff([row["train/tokens"] for row in run.metrics["node0"]])
    assert per_step.min() < BATCH * SEQ_LENGTH, "padding is no target"
