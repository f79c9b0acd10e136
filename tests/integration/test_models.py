"""Models of transformers and of a user's file among real processes: they die, join, are resumed on other ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.conftest import Recorded, Setup, Story, record
from tests.integration.test_resume import cluster_of, finish, losses
from tests.unit.model.foreign import hub_section

from zeroband.export.opened import open_trained

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

pytestmark = [pytest.mark.faults, pytest.mark.slow]

OWN_MODEL = Path(__file__).resolve().parents[2] / "examples" / "own_model.py"


def hub_model(family: str, **changes: Any) -> tuple[str, ...]:
    """Arguments that ask for a tiny model of transformers."""
    return ("--model.type", "transformers", "--model.config", json.dumps({**hub_section(family)["config"], **changes}))


def agree(recorded: Recorded) -> None:
    """In every round all who reported it hold one state; nobody left anything behind."""
    assert list(recorded.history) == list(range(len(recorded.history)))
    for number in list(recorded.history)[:-1]:  # the nodes may have been ended before they reported the newest
        reported = recorded.of_round("round_committed", number)
        assert reported and len({event["digest"] for event in reported.values()}) == 1, number
    assert recorded.left_behind == []


@pytest.fixture(scope="module", params=["qwen3", "mixtral"])
def struck(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Recorded]:
    """One of two nodes, the first of which has two ranks for a mixture, is killed before a transfer, and comes back."""
    family = request.param
    outer, ranks = (("diloco", "--outer.inner-steps", "2"), (1, 1)) if family == "qwen3" else (("ddp",), (2, 1))

    def tell(story: Story) -> None:
        story.until_struck("node1")
        story.until_contributing("node0")
        story.refuse("model.config", *hub_model(family, rope_theta=20_000.0))
        story.cluster.restart("node1", arguments=())
        story.until_contributing("node0", "node1")

    faults = {"node1": ("--fault.inject", "opened@+5=SIGKILL")}
    setup = Setup(outer=outer, ranks=ranks, faults=faults, detect_s=2.0, model=hub_model(family))
    return family, record(tmp_path_factory.mktemp(family), setup, tell)


@pytest.mark.soak
def test_nodes_hold_one_model_through_a_kill_and_a_join(struck: tuple[str, Recorded]) -> None:
    _, recorded = struck
    agree(recorded)
    assert [life.first == 0 for life in recorded.lives("node1")] == [True, False]


@pytest.mark.soak
def test_node_with_another_model_is_refused_with_what_differs(struck: tuple[str, Recorded]) -> None:
    _, recorded = struck
    code, said = recorded.refusals["model.config"]
    assert code != 0 and "model.config" in said and "rope_theta" in said, said


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = hub_section("qwen3")["config"]
    for name in ("base", "other"):
        made = transformers.AutoConfig.for_model(**config)
        transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder / name)
    return folder


@pytest.mark.soak
def test_adapters_alone_travel_and_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    def model(name: str) -> tuple[str, ...]:
        lora = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
        asked = ("--model.type", "transformers", "--model.name", str(base / name), "--model.lora", json.dumps(lora))
        return (*asked, "--data.tokenizer", "byte")

    def tell(story: Story) -> None:
        story.until_contributing("node0", "node1")
        story.refuse("model (frozen parameters)", *model("other"))
        story.until(lambda: len(story.history) > 5, "some rounds")

    setup = Setup(outer=("demo",), ranks=(1, 1), faults={}, detect_s=2.0, model=model("base"))
    recorded = record(tmp_path, setup, tell)
    agree(recorded)
    code, said = recorded.refusals["model (frozen parameters)"]
    assert code != 0 and "model (frozen parameters)" in said, said


@pytest.mark.soak
def test_module_of_a_file_trains_with_sparse_payloads(tmp_path: Path) -> None:
    model = ("--model.type", "custom", "--model.file", str(OWN_MODEL), "--model.settings", '["width=16"]')

    def tell(story: Story) -> None:
        story.until(lambda: len(story.history) > 5, "some rounds")

    outer = ("sparseloco", "--outer.inner-steps", "2")
    agree(record(tmp_path, Setup(outer=outer, ranks=(2, 1), faults={}, model=model), tell))


TINY = (
    *("--data.seq-length", "32", "--data.source.type", "synthetic", "--data.source.documents", "200"),
    *("--train.dtype", "float32", "--train.threads", "1", "--train.batch-size", "6", "--train.micro-bs", "2"),
    *("--train.total-steps", "10", "--optim.warmup-steps", "2", "--ckpt.every-rounds", "5", "--ckpt.keep-last", "9"),
)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[int, tuple[float, object]]]]:
    """A mixture of experts on two ranks, whose experts do not divide by three, with its checkpoints."""
    folder = tmp_path_factory.mktemp("two_ranks")
    with cluster_of(folder, 1, base=(*hub_model("mixtral"), *TINY), alone=True) as cluster:
        node = cluster.start(ranks=2)
        finish(cluster)
        yield folder / "ckpt" / cluster.run_id, losses(node.metrics(), after=5)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 3])
def test_checkpoint_of_two_ranks_goes_on_with_others(
    ranks: int, two_ranks: tuple[Path, dict[int, tuple[float, object]]], tmp_path: Path
) -> None:
    checkpoint, expected = two_ranks
    more = ("--resume.path", str(checkpoint / "step_00000005"))
    with cluster_of(tmp_path, 1, *more, base=(*hub_model("mixtral"), *TINY), alone=True) as cluster:
        node = cluster.start(ranks=ranks)
        finish(cluster)
        found = losses(node.metrics(), after=5)
    assert found.keys() == expected.keys() == set(range(6, 11))
    assert [found[step][0] for step in found] == pytest.approx([expected[step][0] for step in found], rel=1e-4)


@pytest.mark.soak
def test_checkpoint_opens_without_its_configuration(two_ranks: tuple[Path, Any]) -> None:
    opened = open_trained(str(two_ranks[0]))
    assert opened.what.startswith("step 10 of run")
    logits = opened.model.build(torch.device("cpu"))(torch.arange(8)[None])
    assert logits.shape == (1, 8, 320)


@pytest.mark.soak
def test_checkpoint_of_adapters_does_not_go_on_over_another_base(base: Path, tmp_path: Path) -> None:
    def model(name: str) -> tuple[str, ...]:
        lora = json.dumps({"r": 2, "target_modules": ["q_proj"]})
        asked = ("--model.type", "transformers", "--model.name", str(base / name), "--model.lora", lora)
        return (*asked, "--data.tokenizer", "byte", *TINY)

    with cluster_of(tmp_path / "first", 1, base=model("base"), alone=True) as cluster:
        cluster.start()
        finish(cluster)
        saved = tmp_path / "first" / "ckpt" / cluster.run_id / "step_00000005"
    more = ("--resume.path", str(saved))
    with cluster_of(tmp_path / "second", 1, *more, base=model("other"), alone=True) as cluster:
        node = cluster.start()
        cluster.wait(timeout_s=120.0)
        assert node.exit_code == 2
        assert "model (frozen parameters) differ from those of the checkpoint" in node.console_tail()
