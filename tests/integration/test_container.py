"""The container: what the Dockerfile copies and sets, and, without an engine, its stages walked in chroots of Debian.

The walk is by hand, as root: ./scripts/test.sh -m soak tests/integration/test_container.py -s
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.containers import Settings, Stage, Walk, context, copies, lineage, read_stages, sent_of, settings_of

from zeroband.config import load_config
from zeroband.node.launch import parse
from zeroband.observe.facts import FolderFacts
from zeroband.observe.status import RunReader

ROOT = Path(__file__).resolve().parents[2]
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BASE = Settings(env={"PATH": SYSTEM_PATH})
TARGETS = ("cpu", "cuda")

RUNS: Mapping[str, tuple[str, ...]] = {
    "checkpoint/writer_process.py": ("python",),
    "elastic/guardian/child.py": ("python",),
    "elastic/store/local_server.py": ("redis-server",),
    "kernels/compiler.py": ("g++", "gcc"),
    "node/processes.py": ("python",),
    "observe/words.py": (),  # its own command
    "runtime/run_summary.py": ("python",),
    "runtime/report.py": ("git",),
    "node/gpus.py": ("nvidia-smi",),
    "tools/cluster/network.py": ("ip",),
    "tools/join.py": ("python",),
    "tools/store.py": (),  # what its user names
}
"""What each file of the package starts, or looks for because torch starts it."""

TORCH_RUNS = ("g++", "gcc", "ldconfig", "openssl")
"""inductor and Triton, to compile, to find the driver, and for the digest of a header."""

FROM_BASE = {"ldconfig", "python"}

FROM_OUTSIDE = {
    "nvidia-smi": "NVIDIA's container toolkit lays it in, for NVIDIA_DRIVER_CAPABILITIES=utility",
    "git": "names the commit of a clone, which an image is not",
    "ip": "simulated links need root and network namespaces, which a container of ours does not have",
}

PROGRAMS = {*TORCH_RUNS, *(name for names in RUNS.values() for name in names)}


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    return read_stages((ROOT / "Dockerfile").read_text(encoding="utf-8"))


def copied(stages: Mapping[str, Stage], target: str) -> set[str]:
    """The files of the clone that are in an image below its working folder, those of the stages it copies from too."""
    found: set[str] = set()
    for stage in lineage(stages, target):
        for origin, sources, _ in copies(stage):
            found |= copied(stages, origin) if origin else {n for s in sources for n in sent_of(s, context(ROOT))}
    return found


def test_every_source_of_a_copy_is_in_the_build_context_and_nothing_else(stages: Mapping[str, Stage]) -> None:
    sent, taken = context(ROOT), set[str]()
    for stage in stages.values():
        for origin, sources, _ in copies(stage):
            assert origin is None or origin in stages
            for source in sources if origin is None else ():
                assert sent_of(source, sent), f"COPY {source}: .dockerignore leaves nothing of it"
                taken.update(sent_of(source, sent))
    assert [name for name in sent if name not in taken or name.endswith((".so", ".pyc"))] == []


@pytest.mark.parametrize("target", TARGETS)
def test_image_has_the_sources_the_presets_and_the_examples(stages: Mapping[str, Stage], target: str) -> None:
    wanted = [p for top in ("src/zeroband", "configs", "examples") for p in (ROOT / top).rglob("*")]
    kept = {".py", ".toml", ".cpp", ".h", ".inl"}
    names = {path.relative_to(ROOT).as_posix() for path in wanted if path.suffix in kept}
    assert names - copied(stages, target) == set()


@pytest.mark.parametrize("target", TARGETS)
def test_node_writes_to_volumes_only_and_is_not_root(stages: Mapping[str, Stage], target: str) -> None:
    settings = settings_of(stages, target, BASE)
    assert settings.user not in ("", "0", "root")
    places = [settings.env[name] for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR")]
    places += [settings.env["TORCHINDUCTOR_CACHE_DIR"], f"{settings.workdir}/{load_config([], {}).run.dir}"]
    volumes = [Path(volume) for volume in settings.volumes]
    assert [place for place in places if not any(Path(place).is_relative_to(volume) for volume in volumes)] == []


@pytest.mark.parametrize("target", TARGETS)
def test_container_starts_commands_that_exist_on_files_that_it_has(stages: Mapping[str, Stage], target: str) -> None:
    settings, files = settings_of(stages, target, BASE), copied(stages, target)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert settings.entrypoint[0] in scripts and settings.health[0] in scripts
    assert importlib.util.find_spec(f"zeroband.tools.{settings.health[1]}") is not None
    *_, configuration = parse(settings.command[1:]).command
    assert settings.command[0] == "launch" and f"configs/{configuration.removeprefix('@')}.toml" in files


def test_each_program_that_the_package_starts_is_accounted_for(stages: Mapping[str, Stage]) -> None:
    starts = re.compile(r"\b(subprocess\.(Popen|run|check_output|check_call|call)|shutil\.which|os\.exec\w+)\(")
    package = ROOT / "src" / "zeroband"
    found = {p.relative_to(package).as_posix() for p in package.rglob("*.py") if starts.search(p.read_text())}
    assert found == set(RUNS), "say in RUNS what it starts"
    installed = " ".join(i.text for s in lineage(stages, "cuda") for i in s.instructions if i.keyword == "RUN").split()
    wanted = PROGRAMS - set(FROM_OUTSIDE) - FROM_BASE - {"gcc"}  # g++ depends on it
    assert wanted - set(installed) == set()
    assert "utility" in settings_of(stages, "cuda", BASE).env["NVIDIA_DRIVER_CAPABILITIES"]


def test_reader_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="ADD"):
        read_stages("FROM a AS b\nADD x y\n")


def test_reader_joins_lines_and_fills_arguments() -> None:
    text = (
        "ARG A=x:1\nFROM ${A} AS one\n# hadolint\nENV P=/p:$PATH \\\n    Q=2\nFROM one AS two\nCOPY --from=one /a /b\n"
    )
    stages = read_stages(text, {"A": "y:2"})
    assert [(stage.name, stage.base) for stage in stages.values()] == [("one", "y:2"), ("two", "one")]
    assert settings_of(stages, "two", Settings(env={"PATH": "/bin"})).env == {"PATH": "/bin", "P": "/p:/bin", "Q": "2"}
    assert list(copies(stages["two"])) == [("one", ("/a",), "/b")]


# -- built by an engine, where there is one -------------------------------------------------------------------------


def has_engine() -> bool:
    asked = ["docker", "info", "--format", "{{.ServerVersion}}"]
    return shutil.which("docker") is not None and subprocess.run(asked, capture_output=True, timeout=60).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_engine_builds_an_image_in_which_the_doctor_finds_no_fault() -> None:
    if not has_engine():
        pytest.skip("no Docker engine answers")
    python = "{}.{}".format(*sys.version_info)  # for which wheelhouse/ may hold a wheel
    arguments = ["--build-arg", f"BASE=python:{python}-slim-bookworm", "--build-arg", "PIP_EXTRA_INDEX_URL"]
    subprocess.run(["docker", "build", "--target", "cpu", *arguments, "-t", "zeroband-test", "."], cwd=ROOT, check=True)
    run = ["docker", "run", "--rm", "--read-only", "--tmpfs", "/tmp", "zeroband-test"]
    subprocess.run([*run, "doctor", "@debug/normal", "--train.compile"], check=True)


# -- walked in chroots, by hand -------------------------------------------------------------------------------------

TRAIN = ("launch", "--nproc_per_node=1", "@debug/normal")
SMALL = (
    "--model.d_model=64",
    "--model.n_layers=1",
    "--train.batch_size=4",
    "--train.micro_bs=2",
    "--data.seq_length=64",
)

WRITES_DOWN_PROGRAMS = """
import shutil, sys
def note(event, arguments):
    if event == "subprocess.Popen":
        with open("/cache/programs", "a") as file:
            program = str(arguments[0])
            file.write(f"{program} {shutil.which(program)}\\n")
sys.addaudithook(note)
"""

HEALTH = """
zeroband launch --nproc_per_node=1 @debug/normal --run.id=health &
launcher=$!
until zeroband health; do sleep 1; kill -0 $launcher || exit 11; done
rank=$(cat /proc/$launcher/task/$launcher/children)
kill -STOP $rank; ! zeroband health || exit 12
kill -CONT $rank; zeroband health || exit 13
kill -KILL $rank; wait; ! zeroband health || exit 14
"""


@dataclass(frozen=True)
class Container:
    """The walked image of the target `cpu`, started as with --read-only and with volumes that are kept."""

    walk: Walk
    settings: Settings
    volumes: Path

    def run(self, *arguments: str, shell: bool = False, **env: str) -> subprocess.CompletedProcess[str]:
        settings = replace(self.settings, entrypoint=("sh", "-euc") if shell else self.settings.entrypoint)
        env = {"OMP_NUM_THREADS": "1", **env}
        done = self.walk.start("cpu", settings, arguments, env=env, keep=self.volumes, shm="1g")
        print(done.stdout)
        return done


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory, stages: dict[str, Stage]) -> Iterator[Container]:
    """Debian's Python stands in for the base image's.

    Its headers are laid in without the packages that they depend on: python:*-slim has them, and those of libc not.
    """
    for program in ("debootstrap", "unshare"):
        if os.geteuid() != 0 or shutil.which(program) is None:
            pytest.skip(f"a chroot needs root and {program}")
    folder = tmp_path_factory.mktemp("image")
    base = folder / "base"
    packages = "--include=python3,python3-pip,ca-certificates,netbase,tzdata"
    subprocess.run(["debootstrap", "--variant=minbase", packages, "bookworm", base], check=True, timeout=1800)
    get = "cd /root && apt-get update -q && apt-get download -q libpython3.11-dev"
    unpack = "dpkg-deb --fsys-tarfile libpython3*.deb | tar -x -C / ./usr/include && rm libpython3*.deb"
    subprocess.run(["chroot", base, "sh", "-c", f"{get} && {unpack}"], check=True, timeout=600)
    no_services = base / "usr/sbin/policy-rc.d"  # as in Docker's images: installing a server does not start it
    no_services.write_text("#!/bin/sh\nexit 101\n")
    no_services.chmod(0o755)
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")  # behind a proxy, its own is among them
    if certificates.exists():
        shutil.copy(certificates, base / "etc/ssl/certs")
    passed_on = ("PIP_", "UV_", "SSL_", "HTTP_", "HTTPS_", "NO_PROXY")
    env = {name: value for name, value in os.environ.items() if name.upper().startswith(passed_on)}
    walk = Walk(ROOT, folder / "layers", base, stages, env={**env, "HOME": "/root"})
    try:
        walk.build("cpu", BASE)
    except subprocess.CalledProcessError as error:
        pytest.fail(error.stdout)
    yield Container(walk, settings_of(stages, "cpu", BASE), folder / "volumes")
    shutil.rmtree(folder)  # 5 GB


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_doctor_finds_no_fault_in_the_container(container: Container) -> None:
    done = container.run("doctor", "@debug/normal", "--train.compile")
    assert done.returncode == 0 and "FAIL" not in done.stdout
    assert re.search(r"^ok +native library", done.stdout, re.M)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_root_is_read_only_its_programs_are_there_and_c_is_compiled_as_triton_does(container: Container) -> None:
    for place, is_writable in (("/app", False), ("/cache", True), ("/app/runs", True), ("/tmp", True)):
        assert (container.run(f"touch {place}/x", shell=True).returncode == 0) == is_writable, place
    wanted = sorted(PROGRAMS - set(FROM_OUTSIDE))
    assert container.run(f"which {' '.join(wanted)}", shell=True).returncode == 0
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        pytest.skip("no triton here, whose driver this compiles")
    shutil.copytree(Path(triton.origin).parent / "backends" / "nvidia", container.volumes / "app/runs/nvidia")
    headers = "$(python -c 'import sysconfig; print(sysconfig.get_path(\"include\"))')"
    compile_driver = f"gcc -shared -fPIC -I include -I {headers} driver.c -o /cache/driver.so"
    compiled = container.run(f"cd runs/nvidia && {compile_driver}", shell=True)
    assert compiled.returncode == 0  # without -lcuda, which the driver brings


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_compiled_steps_run_and_every_program_that_is_started_is_found(container: Container) -> None:
    container.run("mkdir -p /cache/audit", shell=True)
    (container.volumes / "cache/audit/sitecustomize.py").write_text(WRITES_DOWN_PROGRAMS)
    steps = ("--train.compile", "--train.total_steps=3", "--run.id=compiled")
    done = container.run(*TRAIN, *SMALL, *steps, PYTHONPATH="/cache/audit")
    assert done.returncode == 0 and "run_finished step=3" in done.stdout
    assert any((container.volumes / "cache/inductor").rglob("*.so"))
    lines = sorted(set((container.volumes / "cache/programs").read_text().splitlines()))
    print("\n".join(lines))
    assert any(Path(line.split()[0]).name == "g++" for line in lines)
    assert [line for line in lines if line.endswith(" None")] == []
    assert {Path(line.split()[0]).name for line in lines} <= PROGRAMS


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_two_containers_and_a_third_with_their_store_train_one_model(container: Container) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = f"redis-server --bind 127.0.0.1 --port {port} --requirepass secret --save '' --appendonly no"
    until_asked = f"{store} & until [ -e runs/over ]; do sleep 0.2; done"
    node = (*TRAIN[:-1], "@debug/diloco", *SMALL, "--elastic.start_nodes=2", "--run.id=two")
    env = {"ZERO_BAND_STORE__URL": f"redis://:secret@127.0.0.1:{port}", "ZERO_BAND_RUN__TOKEN": "0123456789abcdef" * 2}
    with ThreadPoolExecutor() as pool:
        server = pool.submit(container.run, until_asked, shell=True)
        nodes = [pool.submit(container.run, *node, f"--node.id=n{number}", **env) for number in range(2)]
        codes = [started.result().returncode for started in nodes]
        (container.volumes / "app/runs/over").touch()
        assert (codes, server.result().returncode) == ([0, 0], 0)
    view = RunReader(FolderFacts(container.volumes / "app/runs/two")).read()
    assert [(seen.node_id, seen.state) for seen in view.nodes] == [("n0", "finished"), ("n1", "finished")]
    assert set(view.members) == {"n0", "n1"} and view.round and not view.disagreements


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_health_check_tells_a_trainer_from_a_stopped_and_a_dead_one(container: Container) -> None:
    assert container.run(*container.settings.health[1:]).returncode == 1
    assert container.run(HEALTH, shell=True).returncode == 0
