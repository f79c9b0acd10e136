"""The [export] section: the model as a directory for transformers and vLLM, written when the run is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from zeroband.config.section import NODE_LOCAL, Section

ExportDtype = Literal["bfloat16", "float32"]
EXPORT_DTYPES: tuple[ExportDtype, ...] = get_args(ExportDtype)


class ExportConfig(Section):
    """Where the export goes, and how exact it is."""

    path: Path | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Folder to make; one that is there already is left alone. None: `<run.dir>/<run.id>/<node id>/export`."""
    dtype: ExportDtype = Field(default="bfloat16", json_schema_extra=NODE_LOCAL)
    """Type of the weights in it; float32 keeps them bit for bit."""
