"""The configurations that come with the package, by name: `@150M` is `configs/150M.toml`. Reads no file."""

from __future__ import annotations

import difflib
from pathlib import Path

from zeroband.errors import ConfigError

_FOLDER = Path(__file__).parents[1] / "presets"  # in a clone a link to configs/


def preset_names() -> list[str]:
    """Names of the presets, those in folders last: `150M`, ..., `debug/diloco`."""
    found = [path.relative_to(_FOLDER).with_suffix("").as_posix() for path in _FOLDER.rglob("*.toml")]
    return sorted(found, key=lambda name: (name.count("/"), name))


def config_file(name: str) -> Path:
    """The file that `@name` means: that file, or without a suffix, and where there is none of that name, the preset.

    Raises: ConfigError for a name that is neither, with the nearest one.
    """
    path, names = Path(name), preset_names()
    if path.suffix or path.is_file():
        return path
    if name in names:
        return _FOLDER / f"{name}.toml"
    if path.exists():
        return path
    lowered = {preset.lower(): preset for preset in names}
    close = difflib.get_close_matches(name.lower().removeprefix("configs/"), lowered, n=1)
    hint = f"did you mean @{lowered[close[0]]}? " if close else ""
    raise ConfigError(f"@{name}: neither a file nor a preset; {hint}presets are {', '.join(names)}")
