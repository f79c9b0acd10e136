"""The schema of a run. Every field says its meaning, unit and when to change it; validators raise and never edit."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Any, Literal, cast, get_args
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, SecretStr, field_validator, model_validator

from zeroband.config.data import DataConfig
from zeroband.config.evaluation import EvalConfig
from zeroband.config.model import LlamaConfig, Model, TransformersConfig
from zeroband.config.optim import OptimConfig
from zeroband.config.outer import CustomConfig, DemoConfig, DilocoConfig, Outer, SparseLocoConfig
from zeroband.config.section import NAME_PATTERN, NODE_LOCAL, OwnSection, Secret, Section
from zeroband.config.store_url import NODES, address_of_nodes, addresses_in, are_of_nodes, parse_store_urls
from zeroband.config.time_outs import TIME_OUT_NAMES, TimeOuts
from zeroband.config.training import FLOAT8_MULTIPLE, TrainConfig


class RunSection(Section):
    """Which run this is, and where its files go."""

    id: str = Field(default="default", pattern=NAME_PATTERN)
    """Name of the run, the same on every node; all keys in the store carry it. auto: a new one at each start, such as
    2026-11-24-brave-otter, for a run of one node or for its founder. Not set: auto without [outer]; default with it,
    since all nodes have to name the same."""
    token: Secret | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Secret shared by the run's nodes; only its hash reaches the store. None: all who reach the store may join. Not
    on a command line, which every user of the machine sees: in ZERO_BAND_RUN__TOKEN, or in run.token_file."""
    token_file: Path | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """File that holds run.token in one line, readable by this user only (chmod 600). None: run.token is as set."""
    operator: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{43}$")
    """Key of the run's operator, as `zeroband ctl operator` prints it: orders to the run count only if signed with it.
    None: all who have run.token may give orders."""
    operator_token: Secret | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Secret of the operator, of which run.operator is made; for `zeroband ctl` and the page that takes orders. Nodes
    need it not, and should not have it. Not on a command line: in ZERO_BAND_RUN__OPERATOR_TOKEN."""
    dir: Path = Field(default=Path("runs"), json_schema_extra=NODE_LOCAL)
    """Where this node writes `<dir>/<run.id>/<node id>/`: metrics, events, the resolved config."""
    start_over: bool = Field(default=False, json_schema_extra=NODE_LOCAL)
    """Move metrics and events that another run left in that folder aside, into `before-<n>/` in it. False: refuse to
    start there, since files of two runs never mix; those of the same run are continued in any case."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial weights, of the order of the data, and of what models draw, such as dropout, on each rank."""

    @model_validator(mode="after")
    def _has_one_token(self) -> RunSection:
        if self.token is not None and self.token_file is not None:
            raise ValueError("run.token and run.token_file are both set; drop one of them")
        return self


class NodeSection(OwnSection):
    """This machine in the run."""

    id: str | None = Field(default=None, pattern=NAME_PATTERN)
    """Name of this machine for the life of the run, which no other machine of the run may have. None: host name."""
    advertise_host: str | None = None
    """Address under which other nodes reach this one. None: the address that the route to the store uses."""
    advertise_port: PositiveInt | None = Field(default=None, le=65535)
    """Port under which they reach it, where a router or container forwards another one to it. None: node.port."""
    bind_host: str | None = None
    """Address that this node listens on. None: the advertised one where this machine has it, else all of them."""
    site: str | None = Field(default=None, pattern=NAME_PATTERN)
    """Name of the place of this node, the same on all nodes that have a fast network between them: these sum up what
    they learned there, and one of them speaks for all to the other sites; a sparse payload goes once to each of those.
    None: as comm.sites says."""
    port: int = Field(default=0, ge=0, le=65535)
    """The one port that this node listens on. 0: any that is free, and 29600 where the node holds a store (store.url =
    "nodes"); set it where a firewall has to let it through."""
    dial_out_only: bool = False
    """Open no port, and take part through connections that this node dials. A node that others cannot dial finds that
    out without this setting, which spares them the attempt. Needs comm.backend = "native"."""
    shm_dir: Path = Path("/dev/shm")
    """Where the canonical state lives, mapped by all local ranks: needs 16 bytes for each parameter (int4 and DDP 20,
    eager updates 24, DeMo 12), and up to 16 more with ckpt.path."""


class CommConfig(Section):
    """The data path between nodes."""

    backend: Literal["native", "gloo"] = "native"
    """Data path between nodes. native: encoded, sealed, on one port. gloo: float32 in the clear, for trusted ones."""
    codec: Literal["fp32", "bf16", "fp16", "int8", "int4"] | None = None
    """How the native path encodes what it averages. None: int8 for pseudo-gradients, fp32 for DDP's gradients."""
    encryption: bool = True
    """Seal what the native path and recovery send, by keys agreed on with run.token; off only in trusted networks."""
    streams: PositiveInt | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """TCP connections of the native path to each other node. None: as many as make it faster."""
    rate_control: bool = True
    """Send to several nodes over a slow access link at one even pace, which is found by trying, where transfers take a
    second and more; needs comm.streams = None. False: as fast as TCP finds each link to be."""
    sites: Literal["auto", "named", "off"] = "auto"
    """Which nodes are of one site and share what they send to others, on the native path. named: those with one
    node.site. auto: the same, or, where no node names one, those whose links to one another were measured to be much
    faster than all others, if those are slow. off: each node sends for itself."""
    threads: PositiveInt | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Threads of the native path on this node. None: one for each eight cores, at least one, at most four."""
    lanes: PositiveInt = 1
    """gloo: process groups between nodes, one part of the flat state each; 4-8 fill a 1 Gbit/s link of 100 ms."""
    chunk_mb: PositiveFloat = 16.0
    """gloo: megabytes of a lane that are reduced at a time; a node shows progress with every one of them."""

    @model_validator(mode="after")
    def _gloo_encodes_nothing(self) -> CommConfig:
        if self.backend == "gloo" and self.codec not in (None, "fp32"):
            raise ValueError(
                f'comm.codec={self.codec!r} needs comm.backend = "native": gloo sends float32; drop comm.codec, or set '
                'it to "fp32"'
            )
        return self


class StoreConfig(Section):
    """The run's Redis, or several of which it uses one at a time."""

    url: Secret | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Redis of the run: `redis://`, `rediss://` or `unix://`, or that which Sentinel names:
    `redis+sentinel://HOST:26379,.../SERVICE`, `rediss+sentinel://`. Several, as a list or with blanks between
    them: when the one in use dies, the members go on with another. nodes: each node holds one, and store.peers says
    where some are. None: this node trains alone, without [outer]."""
    peers: tuple[str, ...] = Field(default=(), json_schema_extra=NODE_LOCAL)
    """With store.url = "nodes": some nodes of the run, as HOST or HOST:PORT, where PORT is their node.port. Those who
    found it name the same ones, themselves among them, and wait for all; who comes later needs one that is up."""

    @field_validator("url", mode="before")
    @classmethod
    def _may_be_a_list(cls, url: object) -> object:
        return " ".join(map(str, cast("list[object]", url))) if isinstance(url, list) else url

    @field_validator("url")
    @classmethod
    def _names_a_redis(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None and url.get_secret_value() != NODES:
            if NODES in url.get_secret_value().split():
                raise ValueError('store.url="nodes" stands alone, without addresses; name nodes in store.peers')
            parse_store_urls(url.get_secret_value())
        return url

    @model_validator(mode="after")
    def _peers_are_of_nodes(self) -> StoreConfig:
        asks_for_peers = self.url is not None and self.url.get_secret_value() == NODES
        if asks_for_peers and not self.peers:
            raise ValueError(
                'store.url="nodes" needs store.peers: some nodes of the run, such as ["host-a", "host-b:29601"]; the '
                "first node of all names itself"
            )
        if self.peers and not asks_for_peers:
            raise ValueError('store.peers are for store.url="nodes"; drop them, or the other addresses')
        if asks_for_peers:
            try:
                parse_store_urls(address_of_nodes(self.peers))
            except ValueError:
                raise ValueError(f"store.peers={list(self.peers)}: each is HOST or HOST:PORT") from None
        return self

    @property
    def address(self) -> str | None:
        """Where the run's stores are, as `RedisStore` takes it; None: the run has none."""
        url = None if self.url is None else self.url.get_secret_value()
        return address_of_nodes(self.peers) if url == NODES else url

    def with_peer(self, place: str) -> StoreConfig:
        """Return this with one store more, the last one, for the node that holds it. `place`: HOST:PORT."""
        peers = (*(self.peers or tuple(self.address.partition("://")[2].split(",") if self.address else ())), place)
        return self.model_copy(update={"url": SecretStr(NODES), "peers": tuple(dict.fromkeys(peers))})

    @property
    def are_of_nodes(self) -> bool:
        """Whether the members hold the stores themselves."""
        return self.address is not None and are_of_nodes(self.address)

    @property
    def are_several(self) -> bool:
        """Whether the run has several stores."""
        return self.address is not None and (self.are_of_nodes or len(addresses_in(self.address)) > 1)


class ElasticConfig(Section):
    """Nodes that come and go."""

    min_nodes: PositiveInt = 1
    """The run waits while fewer nodes than this are alive."""
    start_nodes: PositiveInt = Field(default=1, json_schema_extra=NODE_LOCAL)
    """Nodes to wait for before the first step; later ones join on the way."""
    start_timeout_s: PositiveFloat = Field(default=300.0, json_schema_extra=NODE_LOCAL)
    """Time after which the run starts with the nodes that are there, if they are at least min_nodes. A joiner gives up
    when for so long it got nothing more of the state; a fetch may take longer, and goes on where it was cut off."""
    journal_s: PositiveFloat = Field(default=4 * 3600.0, json_schema_extra=NODE_LOCAL)
    """What a round did is kept for so long, for nodes that join: longer than the state takes over the slowest link of a
    joiner, and the rounds of that time after it. The newest round is always kept."""
    journal_gb: PositiveFloat = Field(default=100.0, json_schema_extra=NODE_LOCAL)
    """Most of the disk of `run.dir` that those rounds take, in gigabytes: about one byte of each parameter and round
    with `comm.codec = "int8"`. With less, nodes on slow links do not get in."""


class FaultConfig(Section):
    """When a silent node counts as lost, and all that follows from it."""

    detect_s: float = Field(default=5.0, ge=0.5, le=600)
    """Longest silence of a node before the others go on without it; every other time-out follows from it."""
    lease_s: PositiveFloat | None = None
    """Life of a lease that is not renewed, and of a link that does not answer; at most detect_s. None: detect_s."""
    renew_s: PositiveFloat | None = None
    """Pause between two renewals of the lease; at most a third of it. None: a fifth of it."""
    watch_s: PositiveFloat | None = None
    """Pause between two looks at the other members during a transfer; at most half of detect_s. None: a tenth of it, at
    most 0.25."""
    hung_s: PositiveFloat | None = None
    """A trainer without progress for so long loses its lease; above the longest stall of a healthy one, such as its
    longest micro-batch, and above detect_s. None: 24 times detect_s, at least 300."""
    gloo_timeout_s: PositiveFloat | None = None
    """gloo's own time-out, which never decides: a transfer is given up after 2 detect_s without a byte. At least
    hung_s. None: 120 times detect_s, at least 600 and twice hung_s."""
    store_s: PositiveFloat | None = None
    """How long a node waits at its boundary for a Redis that is away, before it gives up; at least detect_s. None: 120
    times detect_s, at least 3600."""
    grace_s: PositiveFloat = Field(default=25.0, json_schema_extra=NODE_LOCAL)
    """A node that is asked to leave (SIGTERM, SIGUSR1) waits so long for the others to take what it learned; below the
    time after which SIGKILL follows (torchrun and Slurm 30 s, `docker stop` 10 s unless told otherwise)."""
    inject: tuple[str, ...] = Field(default=(), json_schema_extra=NODE_LOCAL)
    """Faults for this node to have on purpose, in tests: `opened@3=SIGKILL`; `opened@+3=...`: after 3 of its rounds."""

    @property
    def time_outs(self) -> TimeOuts:
        """Return every time-out; those that were not set follow from detect_s."""
        return TimeOuts.following(self.detect_s, {name: getattr(self, name) for name in TIME_OUT_NAMES})

    @model_validator(mode="after")
    def _are_ordered(self) -> FaultConfig:
        self.time_outs.require_order()
        return self


class WandbConfig(OwnSection):
    """Weights & Biases."""

    project: str = "zeroband"
    """Project to log to."""
    mode: Literal["online", "offline"] = "offline"
    """offline writes to disk only; `wandb sync` uploads later."""


class PrometheusConfig(OwnSection):
    """What a Prometheus, or the probes of an orchestrator, may ask this node: /metrics, /healthz, /readyz."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on. All who reach it may read the figures, so leave it or keep it inside your network;
    0.0.0.0 in a container."""
    port: int = Field(default=9400, ge=0, le=65535)
    """Port to listen on. 0: any that is free, which the log names, and a file in `<run.dir>/.prometheus`."""


_LOOPBACK = ("localhost", "127.0.0.1", "::1")
AlertKind = Literal["node_lost", "run_stalled", "loss_spike", "disk", "checkpoint", "run_failed", "run_finished"]


class WebhookConfig(OwnSection):
    """Messages about what needs a person, to Slack or another service that takes JSON by POST."""

    url: Secret | None = None
    """Where to post, https:// only but for loopback. A secret: in ZERO_BAND_OBSERVE__WEBHOOK__URL. None: refused at the
    start."""
    events: tuple[AlertKind, ...] = Field(default=("node_lost", "run_stalled", "loss_spike", "disk"), min_length=1)
    """What to tell of."""
    stalled_s: PositiveFloat = 900.0
    """Time without a step after which a run that is not paused counts as stalled, in seconds; well above a round's."""

    @field_validator("url")
    @classmethod
    def _is_private(cls, url: Secret | None) -> Secret | None:
        parts = urlsplit("https:" if url is None else url.get_secret_value())
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
            raise ValueError("observe.webhook.url is a secret: it begins with https://, or http:// of this machine")
        return url


class TensorboardConfig(Section):
    """TensorBoard's event files, in `tensorboard/` of the node's folder: `tensorboard --logdir <run.dir>`."""


class TrackioConfig(OwnSection):
    """trackio, a tracker that keeps its records on this machine: `trackio show`."""

    project: str = Field(default="zeroband", min_length=1)
    """Project to log to."""
    space_id: str | None = Field(default=None, min_length=1)
    """Space of Hugging Face's to log to, `user/space`. None: in trackio's folder on this machine, nothing is sent."""


class ObserveConfig(OwnSection):
    """What is shown and kept of the training."""

    log_every_steps: PositiveInt = 10
    """Inner steps between two lines on the console; metrics.jsonl has all steps."""
    publish: bool = True
    """Show what this node records, the newest 2 MiB, in the run's store, so that a run is watched from anywhere."""
    prometheus: PrometheusConfig | None = None
    """/metrics, /healthz and /readyz over HTTP. None: off."""
    webhook: WebhookConfig | None = None
    """Messages about what needs a person. None: off."""
    wandb: WandbConfig | None = None
    """Weights & Biases sink. None: off."""
    tensorboard: TensorboardConfig | None = None
    """TensorBoard sink. None: off."""
    trackio: TrackioConfig | None = None
    """trackio sink. None: off."""
    sample_prompt: str | None = Field(default=None, min_length=1)
    """Text to continue at the end of the run, written to `sample.txt`. None: no sample."""
    sample_tokens: PositiveInt = 256
    """Length of that continuation in tokens."""
    report: bool = True
    """Write `report.html` into the run directory when the last node in it has ended, also by a failure or since it was
    asked to leave. `zeroband report` writes it at any time."""
    board: bool = False
    """Serve the run's page, on this machine only, as long as this node's trainer runs (`zeroband board`); one for all
    nodes that share a run directory."""
    board_port: PositiveInt = Field(default=8420, le=65535)
    """Port of that page; where it is taken, one of the next ones, which the log names."""


_STEPS_BETWEEN = 500
_USUAL = ("s3", "gs", "file")
_ALIKE = 0.5
"""Likeness of two schemes from which one may be a slip for the other: `s4` and `s3` have it."""


def require_folder_or_url(path: str) -> None:
    """Raise ValueError for what would be taken for a folder with a strange name, or is no storage that we know."""
    scheme, colon, rest = path.partition(":")
    if not colon or "/" in scheme or rest.startswith(":"):  # a folder, or one storage in front of another
        return
    if not rest.startswith("//"):
        raise ValueError(
            f"ckpt.path={path!r} is no URL, which has `://` ({scheme}://...); write /{rest.lstrip('/')} for that "
            f"folder, or ./{path} for one of such a name"
        )
    if scheme == "file" and not rest.startswith("///"):
        raise ValueError(f"ckpt.path={path!r}: a file URL has three slashes: file:///{rest.lstrip('/')}")
    known: Any = importlib.import_module("fsspec.registry")  # has no types
    schemes = {*known.known_implementations, *known.registry}
    if scheme not in schemes:
        nearest = [
            name for name in (*_USUAL, *schemes) if difflib.SequenceMatcher(None, scheme, name).ratio() >= _ALIKE
        ]
        hint = f"did you mean {nearest[0]}://" if nearest else f"usual are {', '.join(f'{name}://' for name in _USUAL)}"
        raise ValueError(f"ckpt.path={path!r}: {scheme}:// is no storage that is known here; {hint}")


class CkptConfig(Section):
    """Checkpoints on disk or in an object store."""

    path: str | None = Field(default=None, min_length=1, json_schema_extra=NODE_LOCAL)
    """Folder or fsspec URL (`s3://BUCKET/...`) for checkpoints, written below `<path>/<run.id>/`. None: none are."""

    @field_validator("path")
    @classmethod
    def _is_folder_or_url(cls, path: str | None) -> str | None:
        if path is not None:
            require_folder_or_url(path)
        return path

    every_rounds: PositiveInt | None = None
    """Rounds between two checkpoints. None: 1, or 500 where a round is one inner step, as with DDP and for a node
    alone. The end of a run is always kept."""
    keep_last: PositiveInt = 3
    """Number of the newest checkpoints that stay; older ones are removed when a newer one is complete."""
    keep_every: PositiveInt | None = None
    """Checkpoints of rounds that are a multiple of this stay for ever. None: none do."""
    shared: Literal["auto"] | bool = "auto"
    """Whether the path is one folder for all nodes, which write one checkpoint into it together, each a share. auto:
    they find out as they come in; a node that sees another folder writes whole checkpoints there. True: a node that
    sees another folder than the members is refused. False: each node writes whole ones to its own path."""
    peer_wait_s: PositiveFloat = 60.0
    """Longest silence of a node's writer before the node that completes a checkpoint goes without its share, and writes
    the rest itself. If that one is silent for twice as long, the next node completes it. Nodes that the run lost, and
    nodes whose storage fails, are not waited for."""
    retry_s: PositiveFloat = Field(default=300.0, json_schema_extra=NODE_LOCAL)
    """How long one file is tried again when the storage fails, before the checkpoint is given up."""

    def rounds_between(self, *, are_rounds_steps: bool) -> int:
        """Rounds from one checkpoint to the next; the same on all nodes."""
        return self.every_rounds or (_STEPS_BETWEEN if are_rounds_steps else 1)


class ResumeConfig(OwnSection):
    """Where a run begins again."""

    step: int | None = Field(default=None, ge=0)
    """Inner step of the checkpoint to go on from. None: the newest that verifies, or a new run where there is none."""
    path: str | None = Field(default=None, min_length=1)
    """Checkpoints of another run, `<its ckpt.path>/<its run.id>` or one `step_N` folder in it, to begin with. Used
    until this run has its own checkpoints, unless a step is named. None: this run's own."""
    trust: bool = False
    """Take checkpoints that run.token does not vouch for: saved without a token, or with another one. Anyone who can
    write to their folder then decides what this run goes on from."""


class RollbackConfig(Section):
    """Going back because of the loss, which the nodes decide once for all of them. Needs [outer] and ckpt.path."""

    on_spike: float | None = Field(default=2.0, gt=1)
    """Loss of a round, over all nodes, as a multiple of the running mean of the rounds before it. None: never."""
    on_non_finite: bool = True
    """A round in which no node had a finite loss and a finite update; a single such node is left out anyway."""
    skip_data: bool = True
    """The samples learned from since the checkpoint are not learned from again: with the same samples the same nodes
    would repeat every bit. Off: they are, which suffices where the hardware was at fault."""
    most: PositiveInt = 3
    """Times in a row to the same checkpoint; then the run stands still, as after `zeroband ctl pause`."""


ExportDtype = Literal["bfloat16", "float32"]
EXPORT_DTYPES: tuple[ExportDtype, ...] = get_args(ExportDtype)


class ExportConfig(OwnSection):
    """Where the export goes, and how exact it is."""

    path: Path | None = None
    """Folder to make; one that is there already is left alone. None: `<run.dir>/<run.id>/<node id>/export`."""
    dtype: ExportDtype = "bfloat16"
    """Type of the weights in it; float32 keeps them bit for bit."""


class RunConfig(Section):
    """A whole run. Rules that span sections live here."""

    run: RunSection = RunSection()
    node: NodeSection = NodeSection()
    model: Model = LlamaConfig()
    """The model: its own variant of keys for each type of it."""
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    outer: Outer | None = None
    """How nodes synchronise; None: this node trains alone."""
    comm: CommConfig = CommConfig()
    store: StoreConfig = StoreConfig()
    elastic: ElasticConfig = ElasticConfig()
    fault: FaultConfig = FaultConfig()
    ckpt: CkptConfig = CkptConfig()
    resume: ResumeConfig | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Go on from a checkpoint when no node holds the run any more; `--resume` alone: from the newest. None: never."""
    rollback: RollbackConfig | None = None
    """Go back to a checkpoint when the loss of all nodes is not finite, or spikes. None: only as operators order."""
    eval: EvalConfig | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Evaluate on this node while it trains. None: it does not; of several nodes one is enough."""
    observe: ObserveConfig = ObserveConfig()
    export: ExportConfig | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """What this node exports at the end of the run. None: nothing."""
    bootstrap: bool = Field(default=False, json_schema_extra=NODE_LOCAL)
    """With store.url = "nodes": begin the run though this node sees no other machine of it. Only where no node of the
    run lives: one that is cut off from the others would begin a second run of the same id."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(default="INFO", json_schema_extra=NODE_LOCAL)
    """Detail of the console."""

    @property
    def least_stores(self) -> int:
        """Different stores that must be there for this node to begin the run: its own one alone is not enough."""
        return 2 if self.store.are_of_nodes and not (self.node.dial_out_only or self.bootstrap) else 1

    @property
    def codec_name(self) -> str:
        """How this run encodes what it averages."""
        if self.comm.backend == "gloo":
            return "fp32"
        return self.comm.codec or ("int8" if isinstance(self.outer, DilocoConfig) else "fp32")

    @model_validator(mode="after")
    def _gloo_dials_both_ways(self) -> RunConfig:
        if self.node.dial_out_only and self.comm.backend == "gloo":
            raise ValueError(
                'node.dial_out_only=True needs comm.backend = "native": with gloo each two nodes dial one another; '
                "open a port here, or change comm.backend on all nodes"
            )
        return self

    @model_validator(mode="after")
    def _store_and_outer_go_together(self) -> RunConfig:
        has_store = self.store.url is not None
        if self.outer is not None and not has_store:
            raise ValueError(
                f"outer.type={self.outer.type!r} joins nodes and needs store.url, for example redis://HOST:6379, or "
                'store.url = "nodes" and store.peers; for a test on this machine alone, `zeroband simulate` starts '
                "its own store"
            )
        if self.outer is None and has_store:
            raise ValueError(
                "store.url is set but there is no [outer] section: every node would train alone; "
                'set outer.type = "diloco" or "ddp", or drop store.url'
            )
        if self.rollback is not None and (self.outer is None or self.ckpt.path is None):
            raise ValueError("[rollback] needs [outer] and ckpt.path: the checkpoints that the nodes go back to")
        return self

    @model_validator(mode="after")
    def _site_is_of_use(self) -> RunConfig:
        if self.node.site is not None and self.comm.backend == "gloo":
            raise ValueError(
                f'node.site={self.node.site!r} needs comm.backend = "native": gloo sends everything between all nodes; '
                "drop node.site"
            )
        if self.node.site is not None and self.comm.sites == "off":
            raise ValueError(f'node.site={self.node.site!r} and comm.sites="off" contradict one another; drop one')
        return self

    @model_validator(mode="after")
    def _made_up_ids_are_no_text(self) -> RunConfig:
        if self.data.is_made_up:
            wanted = {"observe.sample_prompt": self.observe.sample_prompt, "[export]": self.export}
            for key in (key for key, value in wanted.items() if value is not None):
                raise ValueError(
                    f"{key} needs a tokenizer, and the ids of data.source.type='synthetic-tokens' stand for no text; "
                    "drop one of them"
                )
        return self

    @model_validator(mode="after")
    def _has_something_to_evaluate_on(self) -> RunConfig:
        if self.eval is None:
            return self
        named = {source.partition("=")[0] for source in self.eval.sources}
        if twice := sorted(named & {source.name for source in self.data.sources}):
            raise ValueError(
                f"{twice[0]!r} is a name in eval.sources and in data.sources, which are evaluated anyway; "
                "give one of them another name"
            )
        if self.eval.sources and self.data.is_made_up:
            raise ValueError(
                "eval.sources needs a tokenizer, and the ids of data.source.type='synthetic-tokens' stand for no text; "
                "drop one of them"
            )
        if not self.data.hold_out and not self.eval.sources:
            raise ValueError(
                "[eval] has nothing to evaluate on: data.hold_out=0 keeps no sample back and eval.sources is empty; "
                "set one of them"
            )
        return self

    @model_validator(mode="after")
    def _has_rows_to_score_on(self) -> RunConfig:
        is_scored = isinstance(self.outer, DemoConfig | SparseLocoConfig) and self.outer.score is not None
        if is_scored and not self.data.hold_out and not (self.eval and self.eval.sources):
            raise ValueError(
                "outer.score has no held-out rows: data.hold_out=0 keeps none back and eval.sources is empty; set one "
                "of them"
            )
        return self

    @model_validator(mode="after")
    def _payloads_travel_as_they_are(self) -> RunConfig:
        if not isinstance(self.outer, DemoConfig | SparseLocoConfig):
            return self
        if self.comm.codec is not None:
            raise ValueError(
                f"comm.codec={self.comm.codec!r} is for averages, and outer.type={self.outer.type!r} sends payloads: "
                "drop it; outer.values says how their values travel"
            )
        if isinstance(self.outer, DemoConfig) and self.outer.aggregator and self.comm.backend == "gloo":
            raise ValueError('outer.aggregator needs comm.backend = "native": gloo sends everything to everybody')
        return self

    @model_validator(mode="after")
    def _robust_sees_each_contribution(self) -> RunConfig:
        if not isinstance(self.outer, DilocoConfig | CustomConfig) or self.outer.robust is None:
            return self
        if self.comm.backend == "gloo":
            raise ValueError(
                'outer.robust needs comm.backend = "native": gloo adds contributions up on their way, and each has to '
                "be seen alone"
            )
        if self.comm.sites != "off":
            raise ValueError(
                f'outer.robust needs comm.sites = "off", not {self.comm.sites!r}: inside a site contributions are '
                "added up, and each has to be seen alone"
            )
        return self

    @model_validator(mode="after")
    def _muon_has_a_gradient(self) -> RunConfig:
        if self.optim.muon is not None and isinstance(self.outer, DemoConfig):
            raise ValueError('outer.type="demo" steps by signs and has no inner optimizer: drop [optim.muon]')
        return self

    @model_validator(mode="after")
    def _float8_has_sizes_for_it(self) -> RunConfig:
        if self.train.float8 is None:
            return self
        if not isinstance(self.model, LlamaConfig):
            raise ValueError(f"train.float8 is for model.type='llama', not {self.model.type!r}; drop it")
        sizes = {
            "data.seq_length": self.data.seq_length,
            "model.d_model": self.model.d_model,
            "model.d_ff": self.model.ff_width,
            "model.n_kv_heads times the head size": self.model.kv_heads * self.model.head_size,
        }
        for name, size in sizes.items():
            if size % FLOAT8_MULTIPLE:
                raise ValueError(f"train.float8 needs {name} to be a multiple of {FLOAT8_MULTIPLE}, not {size}")
        return self

    @model_validator(mode="after")
    def _weights_are_of_the_model(self) -> RunConfig:
        if self.train.init_from is not None and not isinstance(self.model, LlamaConfig):
            way_out = "set model.name to it" if isinstance(self.model, TransformersConfig) else "load it in `build`"
            raise ValueError(
                f"train.init_from={str(self.train.init_from)!r} is for model.type='llama', not {self.model.type!r}; "
                f"{way_out}"
            )
        return self

    @model_validator(mode="after")
    def _starts_with_enough_nodes(self) -> RunConfig:
        if self.elastic.start_nodes < self.elastic.min_nodes:
            raise ValueError(
                f"elastic.start_nodes={self.elastic.start_nodes} is below elastic.min_nodes={self.elastic.min_nodes}; "
                f"set it to {self.elastic.min_nodes} or more"
            )
        return self
