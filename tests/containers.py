"""Dockerfiles without an engine: a reader of stages, and a walk of them in chroots, which needs root and overlayfs.

Understands what this repository's Dockerfile uses, and refuses the rest.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

_KEYWORDS = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "HEALTHCHECK", "RUN", "USER", "VOLUME", "WORKDIR"}
_FLAG = re.compile(r"--([a-z-]+)=(\S+)\s+")


@dataclass(frozen=True)
class Instruction:
    """One instruction, with the variables of its stage filled in. `flags`: those before its arguments."""

    keyword: str
    flags: tuple[tuple[str, str], ...]
    text: str

    @property
    def words(self) -> tuple[str, ...]:
        """Its arguments, of the JSON form or of the shell's."""
        return tuple(json.loads(self.text)) if self.text.startswith("[") else tuple(shlex.split(self.text))

    @property
    def command(self) -> tuple[str, ...]:
        """What RUN, CMD or ENTRYPOINT starts."""
        return self.words if self.text.startswith("[") else ("/bin/sh", "-c", self.text)


@dataclass(frozen=True)
class Stage:
    """`base`: another stage, or an image where there is none of that name."""

    name: str
    base: str
    instructions: tuple[Instruction, ...] = ()


@dataclass(frozen=True)
class Settings:
    """What an engine would start a container of a stage with."""

    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str = "/"
    user: str = "0"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    health: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()


def read_stages(text: str, arguments: Mapping[str, str] | None = None) -> dict[str, Stage]:
    """The stages by name, in their order. `arguments`: as of --build-arg. Raises ValueError for what it lacks."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    stages: dict[str, Stage] = {}
    given, name = dict(arguments or {}), ""
    variables: dict[str, str] = {}
    for line in filter(str.strip, joined.splitlines()):
        keyword, _, rest = line.partition(" ")
        if keyword not in _KEYWORDS:
            raise ValueError(f"a Dockerfile's {keyword} is not known here: {line}")
        if keyword == "ARG":
            variable, _, default = rest.partition("=")
            variables[variable] = given.get(variable, default)
        elif keyword == "FROM":
            image, _, name = rest.partition(" AS ")
            stages[name] = Stage(name, _filled(image, variables))
        else:
            if keyword == "HEALTHCHECK":
                options, _, rest = rest.partition("CMD ")
                flags = tuple(_FLAG.findall(options))
            else:
                flags = tuple(_FLAG.findall(rest[: _flags_end(rest)]))
                rest = rest[_flags_end(rest) :]
            text = rest if keyword in ("RUN", "ENV") else _filled(rest, variables)  # their shell, or Settings, fills it
            stage = stages[name]
            stages[name] = replace(stage, instructions=(*stage.instructions, Instruction(keyword, flags, text)))
    return stages


def _flags_end(rest: str) -> int:
    end = 0
    while found := _FLAG.match(rest, end):
        end = found.end()
    return end


def _filled(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}|\$(\w+)", lambda found: variables.get(found[1] or found[2], ""), text)


def lineage(stages: Mapping[str, Stage], target: str) -> list[Stage]:
    """A stage and those that it is built on, the lowest first."""
    found = [stages[target]]
    while found[0].base in stages:
        found.insert(0, stages[found[0].base])
    return found


def settings_of(stages: Mapping[str, Stage], target: str, base: Settings) -> Settings:
    """What a stage has been set to at its end. `base`: of the image below all stages."""
    now = base
    for stage in lineage(stages, target):
        for instruction in stage.instructions:
            now = after(now, instruction)
    return now


def after(now: Settings, instruction: Instruction) -> Settings:
    """The settings after an instruction."""
    match instruction.keyword:
        case "ENV":
            pairs = (word.partition("=") for word in shlex.split(instruction.text))
            return replace(now, env={**now.env, **{name: _filled(value, now.env) for name, _, value in pairs}})
        case "WORKDIR":
            return replace(now, workdir=str(Path(now.workdir, instruction.text)))
        case "USER":
            return replace(now, user=instruction.text)
        case "ENTRYPOINT":
            return replace(now, entrypoint=instruction.command, command=())
        case "CMD":
            return replace(now, command=instruction.command)
        case "HEALTHCHECK":
            return replace(now, health=instruction.command)
        case "VOLUME":
            return replace(now, volumes=(*now.volumes, *instruction.words))
        case _:
            return now


def copies(stage: Stage) -> Iterator[tuple[str | None, tuple[str, ...], str]]:
    """Origin stage (None: the build context), sources and target of each COPY of a stage."""
    for instruction in stage.instructions:
        if instruction.keyword == "COPY":
            *sources, target = instruction.words
            yield dict(instruction.flags).get("from"), tuple(sources), target


def context(root: Path) -> list[str]:
    """The files and links that .dockerignore leaves in the build context, as paths from the root."""
    rules = [line for line in (root / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    tops = {rule[1:].split("/")[0] for rule in rules if rule.startswith("!")}
    assert rules[0] == "*", "everything is left out but what is named; else this would walk .venv"
    paths = (path for top in sorted(tops) for path in [root / top, *(root / top).rglob("*")])
    files = (path for path in paths if path.is_file() or path.is_symlink())  # a link is copied as one
    return [name for path in files if _is_sent(name := path.relative_to(root).as_posix(), rules)]


def sent_of(source: str, sent: Sequence[str]) -> list[str]:
    """The files that a COPY takes of its source, a file or a folder."""
    return [name for name in sent if name == source or name.startswith(f"{source.rstrip('/')}/")]


def _is_sent(name: str, rules: Sequence[str]) -> bool:
    """The last rule that a path, or a folder above it, matches decides."""
    is_sent, parts = True, name.split("/")
    ways = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    for rule in rules:
        pattern = rule.removeprefix("!")
        tail = pattern.removeprefix("**/")
        names = parts if pattern != tail else ways
        if any(fnmatch.fnmatchcase(way, tail) for way in names):
            is_sent = rule.startswith("!")
    return is_sent


class Walk:
    """Builds stages as layers of overlayfs over a folder that stands for the base image, and starts what is in them.

    `env`: what a RUN gets beside the stage's own, such as a proxy. Mounts are made in a namespace that ends with its
    command.
    """

    def __init__(
        self, root: Path, folder: Path, base: Path, stages: Mapping[str, Stage], *, env: Mapping[str, str]
    ) -> None:
        self._root, self._folder, self._base, self._stages = root, folder, base, stages
        self._env = env
        self._layers: dict[str, list[Path]] = {}

    def build(self, target: str, base: Settings) -> list[Path]:
        """The layers of a stage, the lowest first; builds the stages that it needs. Raises CalledProcessError."""
        if target not in self._stages:
            return [self._base]
        if target in self._layers:
            return self._layers[target]
        stage = self._stages[target]
        below = self.build(stage.base, base)
        layer, work = self._folder / target, self._folder / f"{target}.work"
        layer.mkdir(parents=True)
        work.mkdir()
        now = settings_of(self._stages, stage.base, base) if stage.base in self._stages else base
        for instruction in stage.instructions:
            match instruction.keyword:
                case "RUN":
                    self._run(instruction, now, below, layer, work)
                case "COPY":
                    self._copy(instruction, now, below, layer, work, base)
                case _:
                    now = after(now, instruction)
            if instruction.keyword == "WORKDIR":
                _in_namespace([_overlay(below, layer, work), f'mkdir -p "$at{now.workdir}"'])
        self._layers[target] = [*below, layer]
        return self._layers[target]

    def _run(self, instruction: Instruction, now: Settings, below: Sequence[Path], layer: Path, work: Path) -> None:
        assert not instruction.flags, f"RUN {instruction.flags} is not known here"
        resolver = ': >>"$at/etc/resolv.conf" && mount --bind /etc/resolv.conf "$at/etc/resolv.conf"'
        command = _entered(now, instruction.command, {**self._env, **now.env})
        _in_namespace([_overlay(below, layer, work), *_DEVICES, resolver, command])

    def _copy(
        self, instruction: Instruction, now: Settings, below: Sequence[Path], layer: Path, work: Path, base: Settings
    ) -> None:
        *sources, target = instruction.words
        origin = dict(instruction.flags).get("from")
        to = Path(now.workdir, target)
        if origin is not None:
            source = _overlay(self.build(origin, base), at="$from")
            copy = f'mkdir -p "$at{to}" && cp -a "$from{sources[0]}/." "$at{to}"'
            _in_namespace([source, _overlay(below, layer, work), copy])
            return
        staged = self._folder / "context"
        shutil.rmtree(staged, ignore_errors=True)
        for source in sources:
            names = sent_of(source, context(self._root))
            assert names, f"COPY {source}: .dockerignore leaves nothing of it in the build context"
            for name in names:
                place = staged / (Path(name).relative_to(source) if name != source else Path(name).name)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self._root / name, place, follow_symlinks=False)
        is_folder = target.endswith("/") or (len(sources) == 1 and (self._root / sources[0]).is_dir())
        assert is_folder, f"COPY to the file {target} is not known here"
        copy = f'mkdir -p "$at{to}" && cp -a --no-preserve=ownership {shlex.quote(str(staged))}/. "$at{to}"'
        _in_namespace([_overlay(below, layer, work), copy])

    def start(
        self, target: str, settings: Settings, arguments: Sequence[str], *, env: Mapping[str, str], keep: Path, shm: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `ENTRYPOINT arguments` as `docker run --read-only --tmpfs /tmp --shm-size SHM -v ...` would.

        `keep`: folder with the volumes, which outlasts the container. Capabilities are dropped with root.
        """
        layers = self._layers[target]
        volumes: list[str] = []
        for volume in settings.volumes:
            place = keep / volume.strip("/")
            is_new = not place.exists()
            place.mkdir(parents=True, exist_ok=True)
            quoted = shlex.quote(str(place))
            if is_new:  # an engine begins a volume with what the image has there
                volumes += [f'cp -a "$at{volume}/." {quoted}', f'chown --reference="$at{volume}" {quoted}']
            volumes += [f'mount --bind {quoted} "$at{volume}"']
        tmpfs = "rw,noexec,nosuid,nodev"  # as docker's --tmpfs and /dev/shm
        own = [
            f'mount -t tmpfs -o {tmpfs},mode=1777 tmp "$at/tmp"',
            f'mount -t tmpfs -o {tmpfs},size={shm} shm "$at/dev/shm"',
        ]
        command = _entered(settings, (*settings.entrypoint, *arguments), {**settings.env, **env})
        return _in_namespace([_overlay(layers), *_DEVICES, *own, *volumes, command], check=False)


_DEVICES = (
    'mount -t proc proc "$at/proc"',
    'mount -t tmpfs -o mode=755 dev "$at/dev"',
    'for name in null zero full random urandom; do : >"$at/dev/$name"; mount --bind "/dev/$name" "$at/dev/$name"; done',
    'mkdir "$at/dev/shm" && ln -s /proc/self/fd "$at/dev/fd"',
)


def _overlay(layers: Sequence[Path], upper: Path | None = None, work: Path | None = None, *, at: str = "$at") -> str:
    """The mount of layers, the lowest first; read-only without an upper one."""
    lower = ":".join(str(layer) for layer in reversed(layers))
    writable = f",upperdir={upper},workdir={work}" if upper else ""
    return f'mount -t overlay overlay -o {shlex.quote(f"lowerdir={lower}{writable}")} "{at}"'


def _entered(settings: Settings, command: Sequence[str], env: Mapping[str, str]) -> str:
    """The command in the root that is mounted at $at, as its user, with this environment alone."""
    user, pairs = settings.user, [f"{name}={value}" for name, value in env.items()]
    inside = ["env", "-i", "-C", settings.workdir, *pairs, *command]
    return f'chroot --userspec={user}:{user} --groups= "$at" {shlex.join(inside)}'


def _in_namespace(steps: Sequence[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run shell lines with mounts and processes of their own; `$at` and `$from` are empty folders."""
    places = "mount -t tmpfs none /mnt && mkdir /mnt/at /mnt/from && at=/mnt/at from=/mnt/from"
    script = "\n".join(["set -eu", places, *steps])
    return subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=check, timeout=3600,
    )  # fmt: skip
