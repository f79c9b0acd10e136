"""An algorithm from a file of its own in the trainer, among real processes: nodes differ, die, join and are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.conftest import Recorded, Setup, Story, record

pytestmark = [pytest.mark.soak, pytest.mark.faults]

FED_ADAM = Path(__file__).resolve().parents[2] / "examples" / "fed_adam.py"
FILE_KEY = "outer.algorithm (file)"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Of a node of two ranks and one of one, the smaller one is killed before a transfer, and comes back."""
    folder = tmp_path_factory.mktemp("custom")
    other, same = folder / "other.py", folder / "same.py"
    other.write_text(FED_ADAM.read_text() + "# not the same\n")
    same.write_text(FED_ADAM.read_text())

    def tell(story: Story) -> None:
        story.until_struck("node1")
        story.until_contributing("node0")
        story.refuse(FILE_KEY, "--outer.algorithm", str(other))
        story.cluster.restart("node1", arguments=["--outer.algorithm", str(same)])
        story.until_contributing("node0", "node1")

    outer = (
        "custom",
        "--outer.algorithm",
        str(FED_ADAM),
        "--outer.inner-steps",
        "2",
        "--outer.settings",
        '["lr=0.01"]',
    )
    faults = {"node1": ("--fault.inject", "opened@+5=SIGKILL")}
    return record(folder, Setup(outer=outer, ranks=(2, 1), faults=faults, detect_s=2.0), tell)


def test_nodes_of_other_sizes_hold_one_state_through_a_kill_and_a_join(recorded: Recorded) -> None:
    assert list(recorded.history) == list(range(len(recorded.history)))
    for number in list(recorded.history)[:-1]:  # the nodes may have been ended before they reported the newest
        reported = recorded.of_round("round_committed", number)
        assert reported and len({event["digest"] for event in reported.values()}) == 1, number
    assert [life.first == 0 for life in recorded.lives("node1")] == [True, False]
    assert recorded.left_behind == []


def test_node_with_another_file_is_refused_and_one_with_the_same_elsewhere_is_not(recorded: Recorded) -> None:
    code, said = recorded.refusals[FILE_KEY]
    assert code != 0 and FILE_KEY in said, said
    assert len(recorded.lives("node1")) == 2
