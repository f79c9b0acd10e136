"""Small checkpoints for tests: a model of a few tensors, saved by the library without a process of its own."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from zeroband.checkpoint.layout import OWNER, plan_outer
from zeroband.checkpoint.loading import restore
from zeroband.checkpoint.manifest import Stamp
from zeroband.checkpoint.ownership import Owner, claim
from zeroband.checkpoint.peers import WriterLine, WriterStatus
from zeroband.checkpoint.saving import Save, SaveContext, SaveOrder, SaveRules
from zeroband.checkpoint.storage import LocalStorage, Storage
from zeroband.state.digest import digest_of
from zeroband.state.flat import FlatLayout, Slot
from zeroband.state.slot import bytes_of

SHAPES = {
    "embed_tokens.weight": (7, 4),
    "layers.0.mlp.up_proj.weight": (5, 4),
    "lm_head.weight": (7, 4),
    "norm.weight": (4,),
}
SECTIONS = ("params", "momentum")
RULES = SaveRules(keep_last=2, keep_every=None, peer_wait_s=0.0, retry_s=0.0)


def layout() -> FlatLayout:
    slots: list[Slot] = []
    for name, shape in sorted(SHAPES.items()):
        slots.append(Slot(name, shape, slots[-1].start + slots[-1].numel if slots else 0))
    return FlatLayout(tuple(slots))


def buffers_of(seed: int, names: Sequence[str] = SECTIONS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(layout().numel, generator=generator) for name in names}


def stamp_of(
    step: int, *, members: Sequence[str] = ("a",), session: str = "s1", data: Mapping[str, Any] | None = None
) -> Stamp:
    return Stamp(
        run_id="run",
        session=session,
        round=step // 10,
        inner_step=step,
        record={"progress": {"inner_step": step}, "weight": 3},
        state_digest=digest_of(*buffers_of(step).values()),
        sections=SECTIONS,
        members=tuple(members),
        layout=layout().digest(),
        model={"d_model": 4, "vocab_size": 7},
        tokenizer="byte",
        data={"seed": 0} if data is None else data,
    )


def context_of(
    storage: Storage,
    step: int,
    line: WriterLine,
    *,
    node_id: str = "a",
    rules: SaveRules = RULES,
    max_bytes: int = 1 << 30,
) -> SaveContext:
    """A writer's context, with the buffers of this step staged."""
    plan = plan_outer(layout().slots, SECTIONS, max_bytes=max_bytes)
    outer = {name: bytes_of(buffer) for name, buffer in buffers_of(step).items()}
    inner = {name: bytes_of(buffer) for name, buffer in buffers_of(step + 1000, ("exp_avg", "exp_avg_sq")).items()}
    return SaveContext(storage, node_id, rules, line, layout().slots, plan, outer, inner)


@dataclass
class Around(WriterLine):
    """The surroundings of a save in a test: a clock that sleeping moves, and what was told."""

    kills_at: ClassVar[str] = ""
    """The point at which this process ends by SIGKILL; empty: it does not."""
    on_point: Callable[[str], None] = lambda point: None
    clock_s: float = 0.0
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    on_sleep: Callable[[], None] = lambda: None
    gone: tuple[str, ...] = ()
    words: dict[str, WriterStatus] = field(default_factory=dict[str, WriterStatus])
    excuses: list[str | None] = field(default_factory=list)

    def now_s(self) -> float:
        return self.clock_s

    def sleep(self, seconds: float) -> None:
        self.clock_s += seconds
        self.on_sleep()

    def tell(self, kind: str, **fields: Any) -> None:
        self.told.append((kind, fields))

    def count(self, written_bytes: int) -> None: ...

    def working(self, *, is_waiting: bool) -> None: ...

    def report_unavailable(self, attempt: str, why: str | None) -> None:
        self.excuses.append(why)

    def peer_status(self, member: str) -> WriterStatus:
        return WriterStatus(out="lost", is_lost=True) if member in self.gone else self.words.get(member, WriterStatus())

    def at(self, point: str) -> None:
        if point == self.kills_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.on_point(point)

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.told]


def own(storage: Storage, session: str = "s1", *, takes_over: bool = False) -> None:
    claim(storage, Owner("run", session, layout().digest()), takes_over=takes_over)


def save_of(
    storage: Storage,
    step: int,
    around: Around,
    *,
    node_id: str = "a",
    members: Sequence[str] = ("a",),
    rules: SaveRules = RULES,
    max_bytes: int = 1 << 30,
    **stamp: Any,
) -> Save:
    stamped = replace(stamp_of(step, members=members), **stamp)
    context = context_of(storage, step, around, node_id=node_id, rules=rules, max_bytes=max_bytes)
    return Save(context, SaveOrder(stamped, tuple(members), {"node": node_id, "step": step}))


def saved(storage: Storage, *steps: int, **options: Any) -> None:
    """Commit checkpoints of these steps; what many tests begin with is saved once and copied."""
    own(storage)
    if isinstance(storage, LocalStorage) and not options and storage.names() == [OWNER]:
        shutil.copytree(_folder_of(steps), storage.url, dirs_exist_ok=True)
        return
    for step in steps:
        around = Around()
        assert save_of(storage, step, around, **options).run(), around.told


def restored_step(storage: Storage) -> int | None:
    """The step that a restore takes; its state must be that step's in every bit."""
    buffers = {name: torch.zeros(layout().numel) for name in SECTIONS}
    found = restore(storage, layout().slots, buffers)
    if found is None:
        return None
    step = found.manifest.stamp.inner_step
    assert all(torch.equal(buffers[name], buffer) for name, buffer in buffers_of(step).items())
    assert not found.rejected
    return step


@cache
def _folder_of(steps: tuple[int, ...]) -> Path:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    storage = LocalStorage(folder / "run", "a")
    own(storage)
    for step in steps:
        assert save_of(storage, step, Around()).run()
    return folder / "run"


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
