"""What deploy/ gives to schedulers, in their own tools' eyes where these are here; and nodes started as it says.

By hand: ./scripts/test.sh -m soak tests/integration/test_deploy.py -s
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from zeroband.config import load_config
from zeroband.elastic.store.local_server import find_redis_server
from zeroband.node.launch import parse

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "zeroband-node@.service"
KUBERNETES = "1.32.0"
OVERLAYS = ("cpu", "gpu")

SBATCH_OPTIONS = {
    "array": r"\d+-\d+",
    "exclusive": "",
    "gpus-per-node": r"\d+",
    "job-name": r"\w+",
    "mem": r"0",
    "no-kill": "",
    "nodes": r"\d+",
    "ntasks": r"1",
    "ntasks-per-node": r"1",
    "open-mode": r"append",
    "output": r"zeroband-%(j|A_%a)\.log",
    "requeue": "",
    "signal": r"B:USR1@\d+",
    "time": r"24:00:00",
}
"""What stands behind #SBATCH, and the values that make sense here."""


def node_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """The only container of a Job's pods."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def unit_of(path: Path) -> dict[str, list[str]]:
    """The settings of a unit file, in order, each with all its values."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def launch_lines() -> dict[str, list[str]]:
    """The arguments of `zeroband launch` that each way of starting a node gives it."""
    (job,) = documents(DEPLOY / "kubernetes" / "base" / "nodes.yaml")
    lines = {
        "kubernetes": node_of(job)["args"],
        "systemd": shlex.split(unit_of(UNIT)["ExecStart"][0])[1:],
        "compose": yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["node"]["command"],
        "compose gpu": yaml.safe_load((DEPLOY / "compose" / "gpu.yaml").read_text())["services"]["node"]["command"],
    }
    for path in (DEPLOY / "slurm" / "job.sbatch", DEPLOY / "slurm" / "array.sbatch", DEPLOY / "skypilot" / "node.yaml"):
        (options,) = re.findall(r" (--nproc-per-node=.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        lines[path.name] = ["launch", *shlex.split(options.removesuffix(" &"))]
    return lines


def test_each_way_starts_the_launcher_with_arguments_that_it_takes() -> None:
    """Variables that name a preset, and what `sbatch` is given, stand for @14M here; any other one for 1."""
    for way, (command, *arguments) in launch_lines().items():
        given = [re.sub(r"@?\$(\w+|@|[({][^)}]*[)}])", lambda m: "@14M" if "@" in m[0] else "1", a) for a in arguments]
        asked = parse([argument.replace("=gpu", "=1") for argument in given])
        assert (command, asked.ranks, asked.command[-1]) == ("launch", 1, "@14M"), way
        assert asked.exit_code_left == (0 if way in ("systemd", "compose", "compose gpu") else 75), way


def test_settings_of_all_files_are_settings_of_a_node(tmp_path: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "compose.yaml", *DEPLOY.rglob("*.*"))]
    told = {name for text in texts for name in re.findall(r"\bZERO_BAND_\w+", text)} - {"ZERO_BAND_SECTION__KEY"}
    assert len(told) >= 8
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "token").chmod(0o600)
    known = {
        "ZERO_BAND_STORE__URL": "redis://localhost:6379",
        "ZERO_BAND_ELASTIC__START_NODES": "2",
        "ZERO_BAND_NODE__PORT": "29600",
        "ZERO_BAND_RUN__TOKEN_FILE": str(tmp_path / "token"),
    }
    environ = {name: known.get(name, "x") for name in told - {"ZERO_BAND_RUN__TOKEN"}}  # one of two, with the file
    load_config(["@14M"], environ=environ)


def test_each_scheduler_waits_longer_than_a_node_takes_to_leave() -> None:
    (job,) = documents(DEPLOY / "kubernetes" / "base" / "nodes.yaml")
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["node"]
    signals = [re.search(r"B:USR1@(\d+)", path.read_text()) for path in (DEPLOY / "slurm").glob("*.sbatch")]
    waits_s = [
        job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"],
        int(unit_of(UNIT)["TimeoutStopSec"][0]),
        int(compose["stop_grace_period"].removesuffix("s")),
        *(int(found[1]) for found in signals if found),
    ]
    assert len(waits_s) == 5 and min(waits_s) >= load_config([], {}).fault.grace_s + 3


# -- Slurm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((DEPLOY / "slurm").iterdir()), ids=lambda path: path.name)
def test_script_parses_and_asks_slurm_for_what_there_is(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=30)
    asked = re.findall(r"^#SBATCH (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert bool(asked) == (path.suffix == ".sbatch")
    for option in asked:
        match = re.fullmatch(r"--([\w-]+)(?:=(.*))?", option)
        assert match is not None and re.fullmatch(SBATCH_OPTIONS[match[1]], match[2] or ""), option
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(path)], check=True, timeout=30)


# -- Kubernetes -----------------------------------------------------------------------------------------------------


def test_kubernetes_schemas_take_every_document_of_the_base() -> None:
    base = DEPLOY / "kubernetes" / "base"
    kinds: list[str] = []
    for name in yaml.safe_load((base / "kustomization.yaml").read_text())["resources"]:
        for document in documents(base / name):
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
            kinds.append(document["kind"])
    assert sorted(kinds) == ["Job", "NetworkPolicy", "NetworkPolicy", "PodDisruptionBudget", "Service", "StatefulSet"]


def kustomize(folder: Path) -> subprocess.CompletedProcess[str]:
    """Render an overlay, with kubectl's own kustomize."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl")
    command = ["kubectl", "kustomize", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def render(tmp_path: Path, overlay: str) -> list[dict[str, Any]]:
    """Render an overlay with a secret of its own."""
    shutil.copytree(DEPLOY / "kubernetes", tmp_path / "kubernetes")
    (tmp_path / "kubernetes" / "base" / "secret.env").write_text(f"token={'a' * 64}\npassword={'b' * 64}\n")
    done = kustomize(tmp_path / "kubernetes" / "overlays" / overlay)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_renders_to_what_kubernetes_takes(tmp_path: Path, overlay: str) -> None:
    rendered = render(tmp_path, overlay)
    assert len(rendered) == 8
    for document in rendered:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    by_kind = {document["kind"]: document for document in rendered}
    job, settings = by_kind["Job"]["spec"], by_kind["ConfigMap"]["data"]
    pod, node = job["template"]["spec"], node_of(by_kind["Job"])
    assert job["completions"] == job["parallelism"] == int(settings["ZERO_BAND_ELASTIC__START_NODES"])
    assert (ROOT / "configs" / f"{settings['CONFIG']}.toml").is_file()
    assert node["image"] == {"cpu": "zeroband:cpu", "gpu": "zeroband:cuda"}[overlay]
    assert ("nvidia.com/gpu" in node["resources"]["limits"]) == (overlay == "gpu")
    assert (settings["RANKS"] == "gpu") == (overlay == "gpu")
    mounts = {mount["name"]: mount["mountPath"] for mount in node["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
    (shm,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
    assert (mounts["shm"], shm["medium"]) == ("/dev/shm", "Memory") and shm["sizeLimit"]
    assert node["securityContext"]["readOnlyRootFilesystem"] and pod["securityContext"]["runAsUser"] == 1000


def test_overlay_without_a_secret_of_ones_own_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY / "kubernetes", tmp_path / "kubernetes", ignore=shutil.ignore_patterns("secret.env"))
    done = kustomize(tmp_path / "kubernetes" / "overlays" / "cpu")
    assert done.returncode != 0 and "secret.env" in done.stderr


# -- compose, systemd, SkyPilot -------------------------------------------------------------------------------------


def compose_command() -> list[str]:
    """Compose as it is here: the client's plugin, or the older program."""
    if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"]


@pytest.mark.slow
@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "deploy/compose/gpu.yaml")], ids=len)
def test_compose_takes_its_files(files: Sequence[str]) -> None:
    command = compose_command()
    if shutil.which(command[0]) is None:
        pytest.skip("no compose")
    named = [word for file in files for word in ("-f", file)]
    done = subprocess.run([*command, *named, "config"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    node = yaml.safe_load(done.stdout)["services"]["node"]
    assert node["command"][0] == "launch" and node["read_only"] is True
    assert node["deploy"]["replicas"] == int(node["environment"]["ZERO_BAND_ELASTIC__START_NODES"])


@pytest.mark.slow
def test_compose_takes_the_profile_that_watches() -> None:
    command = compose_command()
    if shutil.which(command[0]) is None:
        pytest.skip("no compose")
    asked = [*command, "--profile", "observe", "config", "--services"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {*done.stdout.split()} == {"redis", "node", "prometheus", "grafana"}


def test_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    unit = tmp_path / UNIT.name
    program = Path(sys.executable).parent / "zeroband"
    unit.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/zeroband/.venv/bin/zeroband", str(program)))
    verified = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "zeroband-node@first.service")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (verified.returncode, verified.stderr) == (0, "")
    secure = ["systemd-analyze", "security", "--offline=true", "--threshold=40", str(unit)]
    rated = subprocess.run(secure, capture_output=True, text=True, timeout=60, check=False)
    assert rated.returncode == 0, rated.stdout[-500:]


def test_unit_starts_again_what_another_start_can_help() -> None:
    unit = unit_of(UNIT)
    assert (unit["Restart"], unit["RestartPreventExitStatus"], unit["KillMode"]) == (["on-failure"], ["2 3"], ["mixed"])


def test_task_of_skypilot_is_one_node_whose_secrets_are_not_in_it() -> None:
    task = yaml.safe_load((DEPLOY / "skypilot" / "node.yaml").read_text(encoding="utf-8"))
    assert task["num_nodes"] == 1 and task["resources"]["use_spot"] is True
    assert task["secrets"] == {"ZERO_BAND_STORE__URL": None, "ZERO_BAND_RUN__TOKEN": None}
    assert task["resources"]["ports"] == [int(task["envs"]["ZERO_BAND_NODE__PORT"])]
    subprocess.run(["bash", "-n"], input=task["setup"] + task["run"], text=True, check=True, timeout=30)


SKY = """
import json, sys, yaml, sky
from sky.utils import common_utils, schemas

config = yaml.safe_load(open(sys.argv[1]))
common_utils.validate_schema(config, schemas.get_task_schema(), "task: ")
common_utils.validate_schema(config["resources"], schemas.get_resources_schema(), "resources: ")
config["resources"].pop("accelerators")  # looked up in a catalogue, which it fetches
task = sky.Task.from_yaml_config(config, secrets_overrides=[(name, "x") for name in config["secrets"]])
(resources,) = task.resources
print(json.dumps([task.num_nodes, resources.use_spot, resources.ports, resources.job_recovery, sorted(task.secrets)]))
"""


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_skypilots_own_loader_takes_the_task(tmp_path: Path) -> None:
    """In an environment of its own: it brings a hundred packages."""
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(["uv", "pip", "install", "-q", "--python", str(python), "skypilot"], check=True, timeout=800)
    env = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    task = str(DEPLOY / "skypilot" / "node.yaml")
    loaded = subprocess.run([str(python), "-c", SKY, task], env=env, capture_output=True, text=True, timeout=300)
    assert loaded.returncode == 0, loaded.stderr
    recovery = {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75], "strategy": None}
    secret = ["ZERO_BAND_RUN__TOKEN", "ZERO_BAND_STORE__URL"]
    assert json.loads(loaded.stdout.splitlines()[-1]) == [1, True, ["29600"], recovery, secret]


# -- nodes that are started as the files say ------------------------------------------------------------------------

TINY = {
    "MODEL__D_MODEL": "32",
    "MODEL__N_LAYERS": "1",
    "MODEL__N_HEADS": "2",
    "MODEL__D_FF": "64",
    "DATA__SEQ_LENGTH": "32",
    "DATA__SOURCE__TYPE": "synthetic",
    "TRAIN__TOTAL_STEPS": "1000000",
    "TRAIN__BATCH_SIZE": "4",
    "TRAIN__MICRO_BS": "4",
    "TRAIN__THREADS": "1",
    "FAULT__DETECT_S": "2",
    "FAULT__INJECT": '["inner@+0=TAKES0.1"]',
    "ELASTIC__START_NODES": "4",
}
RUN, TOKEN, PASSWORD = "first-try", "a" * 64, "b" * 64
DEADLINE_S = 240.0


def as_systemd(folder: Path, store: str) -> tuple[list[str], dict[str, str]]:
    """A command and its environment, as the unit and the example of its settings have them."""
    (folder / "token").write_text(TOKEN + "\n")
    (folder / "token").chmod(0o400)
    unit = unit_of(UNIT)
    places = {"%i": RUN, "%d": str(folder), "%S": str(folder), "%C": str(folder)}
    settings = " ".join(unit["Environment"])
    for specifier, value in places.items():
        settings = settings.replace(specifier, value)
    example = re.sub("#.*", "", (DEPLOY / "systemd" / "node.env").read_text(encoding="utf-8"))
    environ = dict(pair.split("=", 1) for text in (settings, example) for pair in shlex.split(text))
    environ["ZERO_BAND_STORE__URL"] = environ["ZERO_BAND_STORE__URL"].replace(
        ":PASSWORD@10.0.0.1:6379", f":{PASSWORD}@{store}"
    )
    environ |= {"RANKS": "1", "CONFIG": "debug/diloco", "ZERO_BAND_NODE__ID": "systemd"}
    environ["ZERO_BAND_NODE__ADVERTISE_HOST"] = "127.0.0.2"
    line = re.sub(r"\$\{(\w+)\}", lambda match: environ[match[1]], unit["ExecStart"][0])
    return line.replace("/opt/zeroband/.venv/bin", str(Path(sys.executable).parent)).split(), environ


def as_kubernetes(folder: Path, store: str) -> tuple[list[str], dict[str, str]]:
    """A pod's command and its environment; the kubelet's part of it is done here."""
    rendered = render(folder, "cpu")
    by_kind = {document["kind"]: document for document in rendered}
    secret = {key: base64.b64decode(value).decode() for key, value in by_kind["Secret"]["data"].items()}
    node = node_of(by_kind["Job"])
    environ: dict[str, str] = dict(by_kind["ConfigMap"]["data"])
    fields = {"status.podIP": "127.0.0.3", "metadata.annotations['batch.kubernetes.io/job-completion-index']": "0"}

    def filled(text: str) -> str:
        return re.sub(r"\$\((\w+)\)", lambda match: environ[match[1]], text)

    for variable in node["env"]:
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            assert source["secretKeyRef"]["name"] == by_kind["Secret"]["metadata"]["name"]
            environ[variable["name"]] = secret[source["secretKeyRef"]["key"]]
        elif "fieldRef" in source:
            environ[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
        else:
            environ[variable["name"]] = filled(variable["value"])
    assert environ["ZERO_BAND_STORE__URL"].endswith("@zeroband-store:6379")
    environ["ZERO_BAND_STORE__URL"] = environ["ZERO_BAND_STORE__URL"].replace("zeroband-store:6379", store)
    return ["zeroband", *(filled(argument) for argument in node["args"])], environ


def as_skypilot(folder: Path, store: str) -> tuple[list[str], dict[str, str]]:
    """A task's commands and its environment."""
    task = yaml.safe_load((DEPLOY / "skypilot" / "node.yaml").read_text(encoding="utf-8"))
    environ = {**task["envs"], "CONFIG": "debug/diloco", "NODE": "skypilot"}
    environ |= {"SKYPILOT_NODE_IPS": "127.0.0.4\n", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    environ |= dict.fromkeys(task["secrets"], TOKEN)
    environ["ZERO_BAND_STORE__URL"] = f"redis://:{PASSWORD}@{store}"
    return ["bash", "-euo", "pipefail", "-c", task["run"]], environ


def as_compose(folder: Path, store: str) -> tuple[list[str], dict[str, str]]:
    """The command of a node and its environment; compose's network has no password."""
    node = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]["node"]

    def filled(text: str) -> str:
        return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)

    environ = {name: filled(value) for name, value in node["environment"].items()}
    environ |= {"ZERO_BAND_OBSERVE__PROMETHEUS__PORT": "0"}  # its network is not this machine's
    environ |= {"ZERO_BAND_NODE__ID": "compose", "ZERO_BAND_RUN__ID": RUN, "ZERO_BAND_RUN__TOKEN": TOKEN}
    environ["ZERO_BAND_STORE__URL"] = environ["ZERO_BAND_STORE__URL"].replace("redis:6379", f":{PASSWORD}@{store}")
    return ["zeroband", *map(filled, node["command"])], environ


WAYS = {"systemd": as_systemd, "node0": as_kubernetes, "skypilot": as_skypilot, "compose": as_compose}
"""How each node, by its id, is started."""

CODES = {"systemd": 0, "node0": 75, "skypilot": 75, "compose": 0}
"""With which each ends where its scheduler takes its machine away."""


@pytest.fixture
def store() -> Iterator[str]:
    """The store as deploy/kubernetes starts it, by the shell of its container: its host and port."""
    (_, service) = documents(DEPLOY / "kubernetes" / "base" / "store.yaml")
    (script,) = node_of(service)["args"]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    here = script.replace("redis-server -", f"{find_redis_server()} - --bind 127.0.0.1 --port {port}")
    assert here != script
    environ = {**os.environ, "REDISCLI_AUTH": PASSWORD}
    server = subprocess.Popen(["sh", "-c", here], env=environ, stdout=subprocess.DEVNULL)
    yield f"127.0.0.1:{port}"
    server.terminate()
    server.wait(20)


def events(folder: Path, node: str, kind: str) -> list[dict[str, Any]]:
    file = folder / "runs" / RUN / node / "events.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_nodes_that_are_started_in_every_way_train_one_model_and_leave_as_asked(tmp_path: Path, store: str) -> None:
    common = {name: value for name, value in os.environ.items() if not name.startswith("ZERO_BAND")}
    common |= {f"ZERO_BAND_{name}": value for name, value in TINY.items()}
    common |= {"ZERO_BAND_RUN__DIR": str(tmp_path / "runs"), "ZERO_BAND_DATA__CACHE_DIR": str(tmp_path / "cache")}
    common |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    nodes: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        for node, way in WAYS.items():
            (tmp_path / node).mkdir()
            command, environ = way(tmp_path / node, store)
            output = stack.enter_context((tmp_path / f"{node}.log").open("wb"))
            environ = {**environ, **{name: common[name] for name in common}}
            nodes[node] = subprocess.Popen(
                command, cwd=tmp_path, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            stack.callback(nodes[node].wait, 60)
            stack.callback(nodes[node].kill)

        def logs() -> str:
            return "\n".join(path.read_text(encoding="utf-8")[-2000:] for path in tmp_path.glob("*.log"))

        end_s = time.monotonic() + DEADLINE_S
        while not all(sum(len(e["members"]) == 4 for e in events(tmp_path, n, "round_committed")) >= 3 for n in WAYS):
            assert time.monotonic() < end_s and all(node.poll() is None for node in nodes.values()), logs()
            time.sleep(0.2)
        for node, process in nodes.items():
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == CODES[node], logs()
            (left,) = events(tmp_path, node, "left")
            assert left["reason"].startswith("left as asked")
