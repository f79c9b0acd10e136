from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from zeroband.config import load_config
from zeroband.errors import ConfigError
from zeroband.node.names import node_dir_of
from zeroband.tools.cluster.local import TRAINER
from zeroband.tools.cluster.simulate import ConsoleTail, asked_cluster, main, ranks_of_nodes


@pytest.mark.parametrize(("nodes", "ranks", "each"), [(2, "2", [2, 2]), (2, "2,1", [2, 1]), (1, "4", [4])])
def test_ranks_of_nodes_are_one_number_or_one_for_each(nodes: int, ranks: str, each: list[int]) -> None:
    assert ranks_of_nodes(nodes, ranks) == each


@pytest.mark.parametrize(("nodes", "ranks"), [(0, "1"), (2, "0"), (3, "2,1"), (2, "two"), (1, ""), (2, "2,-1")])
def test_ranks_of_nodes_refuses_what_does_not_fit(nodes: int, ranks: str) -> None:
    with pytest.raises(ConfigError, match=f"NODES={nodes} RANKS={ranks}"):
        ranks_of_nodes(nodes, ranks)


def test_main_names_the_script_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["2", "2", str(tmp_path / "trian.py")]) == 2
    assert "trian.py" in capsys.readouterr().err


@pytest.mark.parametrize("script", [[], [str(TRAINER)]], ids=["the trainer", "named"])
def test_preset_needs_no_script_from_any_folder(
    script: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = Mock(return_value=0)
    monkeypatch.setattr("zeroband.tools.cluster.simulate.simulate", asked)
    assert main(["2", "2,1", *script, "@debug/diloco", "--train.micro_bs", "4"]) == 0
    asked.assert_called_once_with([2, 1], TRAINER, ["@debug/diloco", "--train.micro_bs", "4"])


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ({}, ["--run.id", "mine", "--run.dir=elsewhere"]),
        ({"ID": "other", "DIR": "there"}, ["--run", '{"id": "mine", "dir": "elsewhere"}']),
        ({"ID": "mine", "DIR": "elsewhere"}, []),
        ({}, []),
    ],
)
def test_cluster_looks_where_its_nodes_write(
    variables: dict[str, str], flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ID", "DIR"):
        monkeypatch.delenv(f"ZERO_BAND_RUN__{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"ZERO_BAND_RUN__{name}", value)
    cluster = asked_cluster(2, TRAINER, flags)
    config = load_config(flags, cluster.environment("node0", 1))
    assert cluster.run_id == config.run.id
    assert cluster.run_dir / "node0" == node_dir_of(config).absolute()
    expected = "elsewhere/mine" if flags or variables else "runs/2"
    assert str(cluster.run_dir).startswith(str(Path(expected).absolute()))


def test_flags_of_another_script_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_BAND_RUN__ID", "mine")
    assert asked_cluster(2, tmp_path / "other.py", ["--run.id", "theirs", "--lr", "3"]).run_id == "mine"


def test_console_tail_gives_each_whole_line_once_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    path.write_bytes(b"of an earlier start\n")
    tail = ConsoleTail(path, start=path.stat().st_size)
    assert tail.read() == []
    with path.open("ab") as file:
        file.write("one\ntwo ü".encode()[:-1])
        file.flush()
        assert tail.read() == ["one"]
        file.write("ü".encode()[-1:] + b"\n")
        file.flush()
        assert tail.read() == ["two ü"]
        file.write(b"no end \xff")
    assert tail.read() == []
    assert tail.read(is_over=True) == ["no end \ufffd"]
    assert tail.read(is_over=True) == []
