"""What a checkpoint records of the data of its run, so that the model can be used and evaluated later. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from zeroband.config.schema import DataConfig


@dataclass(frozen=True)
class Corpus:
    """The data that a model is trained on."""

    data: DataConfig
    seed: int
    """Of the order, and of synthetic text."""
    fingerprint: str
    """Of the tokens."""
    tokenizer_fingerprint: str

    def to_record(self) -> dict[str, Any]:
        """Plain JSON values; the section as the node that writes has it, with its paths."""
        return {**asdict(self), "data": self.data.model_dump(mode="json")}

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> Corpus:
        """Raises TypeError, LookupError or ValueError for what `to_record` did not give."""
        rest: dict[str, Any] = {name: value for name, value in record.items() if name != "data"}
        return Corpus(DataConfig.model_validate(record["data"]), **rest)
