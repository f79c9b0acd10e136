from __future__ import annotations

from pathlib import Path

import pytest

from zeroband.config.sources import config_file, preset_names
from zeroband.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is no clone, to be in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_presets_are_the_files_of_configs() -> None:
    assert {f"{name}.toml" for name in preset_names()} == {
        path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.toml")
    }
    assert config_file("150M").read_bytes() == (CONFIGS / "150M.toml").read_bytes()
    assert config_file("debug/ddp").read_bytes() == (CONFIGS / "debug/ddp.toml").read_bytes()


def test_file_of_that_name_comes_before_a_preset_and_a_folder_does_not(elsewhere: Path) -> None:
    (elsewhere / "1B").mkdir()
    assert config_file("1B").name == "1B.toml"
    (elsewhere / "150M").touch()
    assert config_file("150M") == Path("150M")


def test_name_with_a_suffix_or_of_a_folder_is_a_path(elsewhere: Path) -> None:
    assert config_file("150M.toml") == Path("150M.toml")
    assert config_file("../other.toml") == Path("../other.toml")
    assert config_file(str(elsewhere)) == elsewhere


@pytest.mark.parametrize(
    ("name", "nearest"), [("150", "150M"), ("1b", "1B"), ("configs/14M", "14M"), ("debug/dilocco", "debug/diloco")]
)
def test_unknown_name_is_refused_with_the_nearest_and_all_others(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_file(name)
    assert str(refused.value) == (
        f"@{name}: neither a file nor a preset; did you mean @{nearest}? presets are {', '.join(preset_names())}"
    )


def test_name_unlike_any_and_one_that_leads_out_of_the_presets_are_refused() -> None:
    for name in ("resnet", "../zeroband/presets/150M"):
        with pytest.raises(ConfigError, match="neither a file nor a preset; presets are 10B, 14M, 150M, 1B, "):
            config_file(name)
