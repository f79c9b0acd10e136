from __future__ import annotations

from pathlib import Path

import pytest

from zeroband.cluster.simulate import ConsoleTail, main, ranks_of_nodes
from zeroband.errors import ConfigError


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
