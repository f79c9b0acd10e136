"""The configuration of a run. Each field documents its meaning, unit and when to change it; validators never edit."""

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
from zeroband.config.outer import CustomConfig, DdpConfig, DemoConfig, DilocoConfig, Outer, SparseLocoConfig
from zeroband.config.section import NAME_PATTERN, NODE_LOCAL, OwnSection, Secret, Section
from zeroband.config.store_url import NODES, address_of_nodes, addresses_in, are_of_nodes, parse_store_urls
from zeroband.config.time_outs import TIME_OUT_NAMES, TimeOuts
from zeroband.config.training import FLOAT8_MULTIPLE, TrainConfig


class RunSection(Section):
    """The run and its files."""

    id: str = Field(default="default", pattern=NAME_PATTERN)
    """Name of the run, equal on all nodes and part of all keys in the store. auto: a new name at each start, such as
    2026-11-24-brave-otter, for a run of one node or its first node. Not set: auto without [outer], else default."""
    token: Secret | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Secret shared by the run's nodes; the store gets only a hash. Set it in ZERO_BAND_RUN__TOKEN or run.token_file:
    every user of a machine can read command lines. None: anyone who reaches the store may join."""
    token_file: Path | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """File with run.token in one line, readable only by its user (chmod 600). None: use run.token."""
    operator: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{43}$")
    """Key of the run's operator, as printed by `zeroband ctl operator`: the run follows only orders signed with it.
    None: anyone with run.token may give orders."""
    operator_token: Secret | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Secret behind run.operator, for `zeroband ctl` and a page that takes orders. Nodes do not need it and should not
    have it. Set it in ZERO_BAND_RUN__OPERATOR_TOKEN, not on a command line."""
    dir: Path = Field(default=Path("runs"), json_schema_extra=NODE_LOCAL)
    """This node writes metrics, events and the resolved configuration to `<dir>/<run.id>/<node id>/`."""
    start_over: bool = Field(default=False, json_schema_extra=NODE_LOCAL)
    """Move metrics and events of another run in that folder to its subfolder `before-<n>/`. False: refuse to start
    there. Files of the same run are always continued."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial weights, the order of the data, and each rank's random draws, such as dropout."""

    @model_validator(mode="after")
    def _has_one_token(self) -> RunSection:
        if self.token is not None and self.token_file is not None:
            raise ValueError("run.token and run.token_file are both set; drop one of them")
        return self


class NodeSection(OwnSection):
    """This machine."""

    id: str | None = Field(default=None, pattern=NAME_PATTERN)
    """Name of this machine, unique in the run and unchanged for its life. None: the host name."""
    advertise_host: str | None = None
    """Address at which other nodes reach this one. None: the address on the route to the store."""
    advertise_port: PositiveInt | None = Field(default=None, le=65535)
    """Port at which other nodes reach this one, if a router or container forwards it. None: node.port."""
    bind_host: str | None = None
    """Address to listen on. None: the advertised one if this machine has it, else all addresses."""
    site: str | None = Field(default=None, pattern=NAME_PATTERN)
    """Name of this node's site, equal on nodes with a fast network between them. They sum their contributions locally,
    and one of them exchanges with the other sites; a sparse payload travels once to each site. None: see comm.sites."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; a node needs only one. 0: any free port, or 29600 if the node holds a store (store.url =
    "nodes"). Set it if a firewall must allow it."""
    dial_out_only: bool = False
    """Open no port, and use only connections that this node dials. Not required: peers notice an unreachable node by
    themselves, but this saves them the attempt. Needs comm.backend = "native"."""
    shm_dir: Path = Path("/dev/shm")
    """Memory file system for the canonical state: 16 bytes per parameter (int4 and DDP 20, eager updates 24, DeMo 12),
    and up to 16 more with ckpt.path."""


class CommConfig(Section):
    """The data path between nodes."""

    backend: Literal["native", "gloo"] = "native"
    """native: encoded and encrypted, on one port. gloo: plain float32, for trusted networks."""
    codec: Literal["fp32", "bf16", "fp16", "int8", "int4"] | None = None
    """Encoding of averaged values on the native path. None: int8 for pseudo-gradients, fp32 for DDP's gradients."""
    encryption: bool = True
    """Encrypt the native path and recovery with keys derived from run.token. Disable it only in trusted networks."""
    streams: PositiveInt | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """TCP connections of the native path to each other node. None: as many as improve the throughput."""
    rate_control: bool = True
    """Send to several nodes over a slow access link at one even rate, found by probing, if transfers take a second or
    more; needs comm.streams = None. False: leave the rate to TCP."""
    sites: Literal["auto", "named", "off"] = "auto"
    """Which nodes form a site and share their traffic to others, on the native path. named: nodes with equal node.site.
    auto: the same, or, if no node has a site, nodes whose links to each other are measured to be much faster than slow
    links to the rest. off: each node sends for itself."""
    threads: PositiveInt | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Threads of the native path on this node. None: one per eight cores, at least one and at most four."""
    lanes: PositiveInt = 1
    """gloo: process groups between nodes, each for one part of the flat state; 4 to 8 fill a 1 Gbit/s link of 100 ms.
    """
    chunk_mb: PositiveFloat = 16.0
    """gloo: megabytes of a lane to reduce at a time; each chunk counts as progress of the node."""

    @model_validator(mode="after")
    def _gloo_encodes_nothing(self) -> CommConfig:
        if self.backend == "gloo" and self.codec not in (None, "fp32"):
            raise ValueError(
                f'comm.codec={self.codec!r} needs comm.backend = "native": gloo sends float32; drop comm.codec, or set '
                'it to "fp32"'
            )
        return self


class StoreConfig(Section):
    """The run's Redis, or several of which one is in use."""

    url: Secret | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Address of the run's Redis: `redis://`, `rediss://`, `unix://`, or through Sentinel
    `redis+sentinel://HOST:26379,.../SERVICE` or `rediss+sentinel://`. Several, as a list or separated by blanks: if the
    one in use fails, the members continue with another. nodes: each node holds a store, and store.peers names some of
    them. None: this node trains alone, without [outer]."""
    peers: tuple[str, ...] = Field(default=(), json_schema_extra=NODE_LOCAL)
    """With store.url = "nodes": some nodes of the run, as HOST or HOST:PORT with their node.port. The first nodes all
    list the same ones, themselves included, and wait for all of them; a later node needs one that is up."""

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
        """The run's stores, as `RedisStore` takes them; None without a store."""
        url = None if self.url is None else self.url.get_secret_value()
        return address_of_nodes(self.peers) if url == NODES else url

    def with_peer(self, place: str) -> StoreConfig:
        """Return this with another store at the end, that of the calling node. `place`: HOST:PORT."""
        peers = (*(self.peers or tuple(self.address.partition("://")[2].split(",") if self.address else ())), place)
        return self.model_copy(update={"url": SecretStr(NODES), "peers": tuple(dict.fromkeys(peers))})

    @property
    def are_of_nodes(self) -> bool:
        """Whether the members hold the stores."""
        return self.address is not None and are_of_nodes(self.address)

    @property
    def are_several(self) -> bool:
        """Whether the run has several stores."""
        return self.address is not None and (self.are_of_nodes or len(addresses_in(self.address)) > 1)


class ElasticConfig(Section):
    """Nodes that join and leave during the run."""

    min_nodes: PositiveInt = 1
    """The run pauses while fewer nodes than this are alive."""
    start_nodes: PositiveInt = Field(default=1, json_schema_extra=NODE_LOCAL)
    """Nodes to wait for before the first step; others may join later."""
    start_timeout_s: PositiveFloat = Field(default=300.0, json_schema_extra=NODE_LOCAL)
    """Time after which the run starts with at least min_nodes nodes. Also, a joiner gives up after this time without
    progress; a fetch may take longer, and resumes after interruptions."""
    journal_s: PositiveFloat = Field(default=4 * 3600.0, json_schema_extra=NODE_LOCAL)
    """Time for which a node keeps each round's update for joiners. Set it above the time to fetch the state over a
    joiner's slowest link and to replay the rounds of that time. The newest round is always kept."""
    journal_gb: PositiveFloat = Field(default=100.0, json_schema_extra=NODE_LOCAL)
    """Most disk space of those updates in `run.dir`, in gigabytes: about one byte per parameter and round with
    `comm.codec = "int8"`. If it is too small, nodes on slow links cannot join."""


class FaultConfig(Section):
    """When a silent node counts as lost, and the time-outs that follow from it."""

    detect_s: float = Field(default=5.0, ge=0.5, le=600)
    """Longest silence of a node before the others continue without it; all other time-outs follow from it."""
    lease_s: PositiveFloat | None = None
    """Lifetime of a lease without renewal, and of a link without an answer; at most detect_s. None: detect_s."""
    renew_s: PositiveFloat | None = None
    """Interval between renewals of the lease; at most a third of lease_s. None: a fifth of it."""
    watch_s: PositiveFloat | None = None
    """Interval between checks of the other members during a transfer; at most half of detect_s. None: a tenth of it, at
    most 0.25."""
    hung_s: PositiveFloat | None = None
    """A trainer without progress for this time loses its lease. Set it above the longest pause of a healthy trainer,
    such as its longest micro-batch, and above detect_s. None: 24 times detect_s, at least 300."""
    gloo_timeout_s: PositiveFloat | None = None
    """gloo's own time-out, as a last resort: transfers already end after 2 detect_s without a byte. At least hung_s.
    None: 120 times detect_s, at least 600 and twice hung_s."""
    store_s: PositiveFloat | None = None
    """Longest wait of a node at its boundary for an unreachable Redis; at least detect_s. None: 120 times detect_s, at
    least 3600."""
    grace_s: PositiveFloat = Field(default=25.0, json_schema_extra=NODE_LOCAL)
    """Longest wait of a leaving node (SIGTERM, SIGUSR1) until the others have its last contribution. Set it below the
    time until SIGKILL: 30 s with torchrun and Slurm, 10 s with `docker stop` by default."""
    inject: tuple[str, ...] = Field(default=(), json_schema_extra=NODE_LOCAL)
    """Faults to inject into this node for tests: `opened@3=SIGKILL`, or `opened@+3=...` after 3 of its own rounds."""

    @property
    def time_outs(self) -> TimeOuts:
        """All time-outs; those that are not set follow from detect_s."""
        return TimeOuts.following(self.detect_s, {name: getattr(self, name) for name in TIME_OUT_NAMES})

    @model_validator(mode="after")
    def _are_ordered(self) -> FaultConfig:
        self.time_outs.require_order()
        return self


class WandbConfig(OwnSection):
    """Weights & Biases."""

    project: str = "zeroband"
    """Project name."""
    mode: Literal["online", "offline"] = "offline"
    """offline writes to disk only; upload later with `wandb sync`."""


class PrometheusConfig(OwnSection):
    """HTTP endpoints for Prometheus and an orchestrator's probes: /metrics, /healthz, /readyz."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on. Anyone who reaches it can read the figures, so keep it inside your network; 0.0.0.0 in a
    container."""
    port: int = Field(default=9400, ge=0, le=65535)
    """Port to listen on. 0: any free port, named in the log and in a file of `<run.dir>/.prometheus`."""


_LOOPBACK = ("localhost", "127.0.0.1", "::1")
AlertKind = Literal["node_lost", "run_stalled", "loss_spike", "disk", "checkpoint", "run_failed", "run_finished"]


class WebhookConfig(OwnSection):
    """Alerts to Slack or another service that takes JSON by POST."""

    url: Secret | None = None
    """Address to post to, https:// except on loopback. A secret: set it in ZERO_BAND_OBSERVE__WEBHOOK__URL. None is
    refused at the start."""
    events: tuple[AlertKind, ...] = Field(default=("node_lost", "run_stalled", "loss_spike", "disk"), min_length=1)
    """Alerts to send."""
    stalled_s: PositiveFloat = 900.0
    """Seconds without a step after which a run that is not paused counts as stalled; set it well above a round's."""

    @field_validator("url")
    @classmethod
    def _is_private(cls, url: Secret | None) -> Secret | None:
        parts = urlsplit("https:" if url is None else url.get_secret_value())
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
            raise ValueError("observe.webhook.url is a secret: it begins with https://, or http:// of this machine")
        return url


class TensorboardConfig(Section):
    """TensorBoard's event files in `tensorboard/` of the node's folder: `tensorboard --logdir <run.dir>`."""


class TrackioConfig(OwnSection):
    """trackio, a tracker with local records: `trackio show`."""

    project: str = Field(default="zeroband", min_length=1)
    """Project name."""
    space_id: str | None = Field(default=None, min_length=1)
    """Hugging Face Space to log to, `user/space`. None: trackio's folder on this machine, and nothing is sent."""


class ObserveConfig(OwnSection):
    """Logs, metrics and reports of the training."""

    log_every_steps: PositiveInt = 10
    """Inner steps between console lines; metrics.jsonl has all steps."""
    publish: bool = True
    """Publish this node's newest records, up to 2 MiB, in the run's store, so that the run can be watched from
    anywhere."""
    prometheus: PrometheusConfig | None = None
    """/metrics, /healthz and /readyz over HTTP. None: off."""
    webhook: WebhookConfig | None = None
    """Alerts by webhook. None: off."""
    wandb: WandbConfig | None = None
    """Weights & Biases sink. None: off."""
    tensorboard: TensorboardConfig | None = None
    """TensorBoard sink. None: off."""
    trackio: TrackioConfig | None = None
    """trackio sink. None: off."""
    sample_prompt: str | None = Field(default=None, min_length=1)
    """Text to continue with the trained model at the end of the run, written to `sample.txt`. None: no sample."""
    sample_tokens: PositiveInt = 256
    """Length of the sample in tokens."""
    report: bool = True
    """Write `report.html` into the run directory when its last node ends, also after a failure or a request to leave.
    `zeroband report` writes it at any time."""
    board: bool = False
    """Serve the run's page on this machine while this node's trainer runs (`zeroband board`); one page for all nodes
    that share a run directory."""
    board_port: PositiveInt = Field(default=8420, le=65535)
    """Port of that page; if it is taken, one of the next, which the log names."""


_STEPS_BETWEEN = 500
_USUAL = ("s3", "gs", "file")
_ALIKE = 0.5
"""Similarity from which one scheme may be a typo of another, as of `s4` and `s3`."""


def require_folder_or_url(path: str) -> None:
    """Raise ValueError for an unknown storage, and for a URL that would be taken for a folder."""
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
    """Folder or fsspec URL (`s3://BUCKET/...`) of checkpoints, written below `<path>/<run.id>/`. None: no checkpoints.
    """

    @field_validator("path")
    @classmethod
    def _is_folder_or_url(cls, path: str | None) -> str | None:
        if path is not None:
            require_folder_or_url(path)
        return path

    every_rounds: PositiveInt | None = None
    """Rounds between checkpoints. None: 1, or 500 if a round is one inner step, as with DDP and for a single node. The
    end of a run is always saved."""
    keep_last: PositiveInt = 3
    """Newest checkpoints to keep; older ones are removed once a newer one is complete."""
    keep_every: PositiveInt | None = None
    """Also keep all checkpoints of rounds that are a multiple of this. None: no others."""
    shared: Literal["auto"] | bool = "auto"
    """Whether all nodes use one folder, into which they write one checkpoint together, each a share. auto: they find
    out when they join; a node with another folder writes whole checkpoints there. True: refuse a node with another
    folder. False: each node writes whole checkpoints to its own path."""
    peer_wait_s: PositiveFloat = 60.0
    """Longest silence of a node's writer before the node that completes a checkpoint writes the missing share. If that
    node is silent for twice as long, the next one completes the checkpoint. Lost nodes, and nodes whose storage fails,
    are not waited for."""
    retry_s: PositiveFloat = Field(default=300.0, json_schema_extra=NODE_LOCAL)
    """How long to retry one file of a failing storage before giving up the checkpoint."""

    def rounds_between(self, *, are_rounds_steps: bool) -> int:
        """Return the rounds between checkpoints, equal on all nodes."""
        return self.every_rounds or (_STEPS_BETWEEN if are_rounds_steps else 1)


class ResumeConfig(OwnSection):
    """The checkpoint to resume from."""

    step: int | None = Field(default=None, ge=0)
    """Inner step of the checkpoint. None: the newest that verifies, or a new run without one."""
    path: str | None = Field(default=None, min_length=1)
    """Checkpoints of another run, `<its ckpt.path>/<its run.id>` or one `step_N` folder in it, to start from. Used
    until this run has its own checkpoints, unless a step is given. None: this run's own."""
    trust: bool = False
    """Accept checkpoints that run.token does not authenticate: saved without a token, or with another one. Anyone who
    can write to their folder then controls the state of this run."""


class RollbackConfig(Section):
    """Automatic rollback after a bad loss, decided once for all nodes. Needs [outer] and ckpt.path."""

    on_spike: float | None = Field(default=2.0, gt=1)
    """Roll back if the loss of a round, over all nodes, exceeds this multiple of the running mean of earlier rounds.
    None: never."""
    on_non_finite: bool = True
    """Roll back after a round in which no node had a finite loss and update; a single such node is left out anyway."""
    skip_data: bool = True
    """Skip the samples since the checkpoint: with the same samples, the same nodes would repeat every bit. False: train
    on them again, which suffices after a hardware fault."""
    most: PositiveInt = 3
    """Consecutive rollbacks to the same checkpoint; then the run pauses, as after `zeroband ctl pause`."""


ExportDtype = Literal["bfloat16", "float32"]
EXPORT_DTYPES: tuple[ExportDtype, ...] = get_args(ExportDtype)


class ExportConfig(OwnSection):
    """The export of the trained model."""

    path: Path | None = None
    """Folder to create; an existing one is never overwritten. None: `<run.dir>/<run.id>/<node id>/export`."""
    dtype: ExportDtype = "bfloat16"
    """Type of the exported weights; float32 keeps them bit for bit."""


class RunConfig(Section):
    """A whole run, with the rules that span sections."""

    run: RunSection = RunSection()
    node: NodeSection = NodeSection()
    model: Model = LlamaConfig()
    """The model; its `type` selects the keys."""
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    outer: Outer | None = None
    """How nodes synchronise. None: this node trains alone."""
    comm: CommConfig = CommConfig()
    store: StoreConfig = StoreConfig()
    elastic: ElasticConfig = ElasticConfig()
    fault: FaultConfig = FaultConfig()
    ckpt: CkptConfig = CkptConfig()
    resume: ResumeConfig | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Resume from a checkpoint if no node has the run's state in memory; plain `--resume` takes the newest. None:
    never."""
    rollback: RollbackConfig | None = None
    """Roll back to a checkpoint if the loss of all nodes spikes or is not finite. None: only on an operator's order."""
    eval: EvalConfig | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Evaluate on this node during training; one node of a run is enough. None: no evaluation."""
    observe: ObserveConfig = ObserveConfig()
    export: ExportConfig | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Export of the trained model by this node. None: no export."""
    bootstrap: bool = Field(default=False, json_schema_extra=NODE_LOCAL)
    """With store.url = "nodes": start the run although this node sees no other machine. Use it only if no node of the
    run is alive: a node that is cut off would start a second run with the same id."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(default="INFO", json_schema_extra=NODE_LOCAL)
    """Level of the console log."""

    @property
    def least_stores(self) -> int:
        """Number of stores that must be up for this node to start the run: its own does not suffice."""
        return 2 if self.store.are_of_nodes and not (self.node.dial_out_only or self.bootstrap) else 1

    @property
    def codec_name(self) -> str:
        """Codec of averaged values."""
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
        if self.data.is_synthetic:
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
        if self.eval.sources and self.data.is_synthetic:
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
            raise ValueError('outer.aggregator needs comm.backend = "native": gloo sends everything to all nodes')
        return self

    @model_validator(mode="after")
    def _robust_sees_each_contribution(self) -> RunConfig:
        if not isinstance(self.outer, DilocoConfig | CustomConfig) or self.outer.robust is None:
            return self
        if self.comm.backend == "gloo":
            raise ValueError(
                'outer.robust needs comm.backend = "native": gloo sums contributions in transit, and each must '
                "be visible"
            )
        if self.comm.sites != "off":
            raise ValueError(
                f'outer.robust needs comm.sites = "off", not {self.comm.sites!r}: inside a site contributions are '
                "summed, and each must be visible"
            )
        return self

    @model_validator(mode="after")
    def _muon_has_a_gradient(self) -> RunConfig:
        if self.optim.muon is not None and isinstance(self.outer, DemoConfig):
            raise ValueError('outer.type="demo" steps by signs and has no inner optimizer: drop [optim.muon]')
        return self

    @model_validator(mode="after")
    def _low_bit_moments_are_the_nodes_own(self) -> RunConfig:
        if self.optim.state_dtype == "float32" or not isinstance(self.outer, DdpConfig | DemoConfig):
            return self
        shared = isinstance(self.outer, DdpConfig)
        raise ValueError(
            f"optim.state_dtype={self.optim.state_dtype!r} is for moments of a node's own, and "
            f"outer.type={self.outer.type!r} {'shares them between nodes' if shared else 'has none'}: drop it"
        )

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
