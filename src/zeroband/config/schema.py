"""The schema of a run. Every field says its meaning, unit and when to change it; validators raise and never edit."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt, SecretStr, field_validator, model_validator

from zeroband.config.outer import DemoConfig, DilocoConfig, Outer, SparseLocoConfig
from zeroband.config.section import NAME_PATTERN, NODE_LOCAL, Secret, Section
from zeroband.config.store_url import parse_store_url
from zeroband.config.time_outs import TIME_OUT_NAMES, TimeOuts


class RunSection(Section):
    """Which run this is, and where its files go."""

    id: str = Field(default="default", pattern=NAME_PATTERN)
    """Name of the run, the same on every node; all keys in the store carry it."""
    token: Secret | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Secret shared by the run's nodes; only its hash reaches the store. None: whoever reaches the store may join. Not
    on a command line, which every user of the machine sees: in ZERO_BAND_RUN__TOKEN, or in run.token_file."""
    token_file: Path | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """File that holds run.token in one line, readable by this user only (chmod 600). None: run.token is as set."""
    dir: Path = Field(default=Path("runs"), json_schema_extra=NODE_LOCAL)
    """Where this node writes `<dir>/<run.id>/<node id>/`: metrics, events, the resolved config."""
    start_over: bool = Field(default=False, json_schema_extra=NODE_LOCAL)
    """Move metrics and events that another run left in that folder aside, into `before-<n>/` in it. False: refuse to
    start there, since files of two runs never mix; those of the same run are continued in any case."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial weights and of the order of the data."""

    @model_validator(mode="after")
    def _has_one_token(self) -> RunSection:
        if self.token is not None and self.token_file is not None:
            raise ValueError("run.token and run.token_file are both set; drop one of them")
        return self


class NodeSection(Section):
    """This machine in the run."""

    id: str | None = Field(default=None, pattern=NAME_PATTERN, json_schema_extra=NODE_LOCAL)
    """Name of this machine for the life of the run, which no other machine of the run may have. None: host name."""
    advertise_host: str | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Address under which other nodes reach this one. None: the address that the route to the store uses."""
    advertise_port: PositiveInt | None = Field(default=None, le=65535, json_schema_extra=NODE_LOCAL)
    """Port under which they reach it, where a router or container forwards another one to it. None: node.port."""
    bind_host: str | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Address that this node listens on. None: the advertised one where this machine has it, else all of them."""
    port: int = Field(default=0, ge=0, le=65535, json_schema_extra=NODE_LOCAL)
    """The one port that this node listens on. 0: any that is free; set it where a firewall has to let it through."""
    shm_dir: Path = Field(default=Path("/dev/shm"), json_schema_extra=NODE_LOCAL)
    """Where the canonical state lives, mapped by all local ranks: needs 16 bytes for each parameter (int4 and DDP 20,
    eager updates 24, DeMo 12), and up to 16 more with ckpt.path."""


class ModelConfig(Section):
    """The decoder."""

    d_model: PositiveInt = 256
    """Width of the residual stream."""
    n_layers: PositiveInt = 4
    """Number of decoder blocks."""
    n_heads: PositiveInt = 4
    """Query heads; d_model must be a multiple of it."""
    n_kv_heads: PositiveInt | None = None
    """Key and value heads (grouped-query attention). None: as many as query heads."""
    d_ff: PositiveInt | None = None
    """Hidden width of SwiGLU. None: 8/3 of d_model, rounded up to a multiple of 64."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary position embedding; larger for long contexts."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of RMSNorm."""
    tie_embeddings: bool = False
    """Share the embedding with the output head; saves parameters in small models."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.d_model % self.n_heads:
            raise ValueError(f"model.d_model={self.d_model} is not a multiple of model.n_heads={self.n_heads}")
        if self.d_model // self.n_heads % 2:
            size = self.d_model // self.n_heads
            raise ValueError(f"model.d_model / model.n_heads = {size} is odd; rotary embedding needs an even head size")
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            raise ValueError(f"model.n_heads={self.n_heads} is not a multiple of model.n_kv_heads={self.n_kv_heads}")
        return self

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def head_size(self) -> int:
        return self.d_model // self.n_heads

    @property
    def ff_width(self) -> int:
        return self.d_ff or -(-self.d_model * 8 // 3 // 64) * 64


class TextSource(Section):
    """Plain text files."""

    type: Literal["text"] = "text"
    paths: tuple[str, ...] = Field(default=(), json_schema_extra=NODE_LOCAL)
    """Files, globs or fsspec URLs; one document each. Empty: this machine's Python standard library."""
    binary: bool = False
    """Take bytes that are no text in UTF-8 as they are, for models of bytes; needs data.tokenizer = "byte". False: they
    are refused."""


class JsonlSource(Section):
    """JSON Lines files."""

    type: Literal["jsonl"]
    paths: tuple[str, ...] = Field(min_length=1, json_schema_extra=NODE_LOCAL)
    """Files, globs or fsspec URLs of JSON Lines (`.gz` and `.zst` by their ending); one document each line."""
    field: str = "text"
    """Key that holds the document."""


class ParquetSource(Section):
    """Parquet files."""

    type: Literal["parquet"]
    paths: tuple[str, ...] = Field(min_length=1, json_schema_extra=NODE_LOCAL)
    """Files, globs or fsspec URLs of Parquet; one document each row."""
    column: str = "text"
    """Column that holds the document."""
    binary: bool = False
    """Take bytes that are no text in UTF-8 as they are, for models of bytes; needs data.tokenizer = "byte". False: they
    are refused."""


class HuggingFaceSource(Section):
    """A dataset by its name on the Hugging Face Hub, or a folder of one."""

    type: Literal["huggingface"]
    name: str
    """Name or local path for `datasets.load_dataset`; needs the extra `hf`."""
    subset: str | None = None
    """Configuration of the data set."""
    split: str = "train"
    """Split of the data set."""
    column: str = "text"
    """Column that holds the document."""
    binary: bool = False
    """Take bytes that are no text in UTF-8 as they are, for models of bytes; needs data.tokenizer = "byte". False: they
    are refused."""


class SyntheticSource(Section):
    """Text that is made up, for tests and simulations."""

    type: Literal["synthetic"]
    documents: PositiveInt = 1000
    """How many documents the seed makes."""
    mean_length: PositiveInt = 512
    """Mean length of a document in bytes."""


class SyntheticTokensSource(Section):
    """Token ids that are made up, to measure speed: no tokenizer, no download, nothing to prepare or to store."""

    type: Literal["synthetic-tokens"]
    tokens: PositiveInt = 1_000_000_000
    """How many ids the seed makes, of data.vocab_size, ends of documents among them."""
    mean_document_length: PositiveInt = 500
    """Mean length of a document in tokens; short ones are frequent, long ones rare."""


BytesSource = TextSource | ParquetSource | HuggingFaceSource
"""Sources whose documents may be bytes that are no text."""

DocumentSource = TextSource | JsonlSource | ParquetSource | HuggingFaceSource | SyntheticSource
"""Sources of text, which a tokenizer makes into ids."""

Source = Annotated[DocumentSource | SyntheticTokensSource, Field(discriminator="type")]


class DataConfig(Section):
    """What is trained on."""

    source: Source = TextSource()
    """Where the documents come from."""
    tokenizer: str = "byte"
    """`byte` (257 ids: the bytes and end of document), or the name or path of a Hugging Face tokenizer (extra `hf`)."""
    vocab_size: int | None = Field(default=None, ge=2)
    """Ids that the model has room for, at least those of the tokenizer; decides the model's size together with [model],
    and what synthetic-tokens draw from. None: as many as the tokenizer has."""
    seq_length: PositiveInt = 1024
    """Tokens in one sample."""
    document_mask: bool = True
    """Attention does not cross the border between two documents packed into one sample."""
    cache_dir: Path | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Where the tokenised documents are kept between runs. None: `zeroband` in the user's cache folder."""
    hold_out: float = Field(default=0.005, ge=0, lt=0.5)
    """Share of the samples kept back from training, for evaluation."""

    @model_validator(mode="after")
    def _bytes_are_for_byte_models(self) -> DataConfig:
        if isinstance(self.source, BytesSource) and self.source.binary and self.tokenizer != "byte":
            raise ValueError(
                f'data.source.binary=true needs data.tokenizer = "byte", not {self.tokenizer!r}: other tokenizers take '
                "text alone"
            )
        return self

    @model_validator(mode="after")
    def _made_up_ids_are_of_a_vocabulary(self) -> DataConfig:
        if isinstance(self.source, SyntheticTokensSource) and self.vocab_size is None:
            raise ValueError(
                "data.source.type='synthetic-tokens' needs data.vocab_size, the number of ids to draw from, such as "
                "32000: no tokenizer is opened for them"
            )
        return self


Decay = Annotated[float, Field(ge=0, lt=1)]


class AdamWConfig(Section):
    """AdamW."""

    lr: PositiveFloat = 4e-4
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the first and the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled decay of matrices and embeddings."""
    decay_vectors: bool = False
    """Whether norms and other vectors are decayed, too, as in DeMo's source."""


class CosineSchedule(Section):
    """Half a cosine from the peak down."""

    type: Literal["cosine"] = "cosine"
    final_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


class LinearSchedule(Section):
    """A straight line from the peak down."""

    type: Literal["linear"]
    final_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


class WarmupStableDecaySchedule(Section):
    """The peak, held until the last part of the run, then a straight line down."""

    type: Literal["wsd"]
    decay_ratio: float = Field(default=0.2, gt=0, le=1)
    """Share of all steps spent in the final decay."""
    final_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


LrSchedule = Annotated[CosineSchedule | LinearSchedule | WarmupStableDecaySchedule, Field(discriminator="type")]


class OptimConfig(Section):
    """The inner optimizer and its schedule."""

    adamw: AdamWConfig = AdamWConfig()
    """The inner optimizer."""
    schedule: LrSchedule = CosineSchedule()
    """Learning rate after warm-up; counts inner steps."""
    warmup_steps: int = Field(default=1000, ge=0)
    """Inner steps over which the learning rate grows linearly to its peak."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest global norm of the gradient. None: no clipping."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared log-partition term that keeps logits small; 1e-4 where training diverges."""


ActivationCheckpointing = Literal["none", "selective", "full"]
Float8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]

_FLOAT8_MULTIPLE = 16
"""Tensor cores multiply in float8 where all three sizes of a product are multiples of this."""


class ProfileConfig(Section):
    """A trace of some inner steps, for chrome://tracing and Perfetto."""

    steps: tuple[PositiveInt, PositiveInt] = Field(default=(10, 15), json_schema_extra=NODE_LOCAL)
    """The first and the last step of it, counted from 1 as in metrics.jsonl; a few, each makes megabytes."""

    @model_validator(mode="after")
    def _is_a_range(self) -> ProfileConfig:
        first, last = self.steps
        if first > last:
            raise ValueError(f"train.profile.steps=[{first}, {last}] ends before it begins; set [{last}, {first}]")
        return self


class TrainConfig(Section):
    """Length and shape of the training."""

    total_steps: PositiveInt = 88_000
    """Inner steps of the whole run."""
    init_from: Path | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Directory of a Llama in Hugging Face's layout to start from, the same content on every node; [model] describes
    the same model. None: random weights of run.seed."""
    batch_size: PositiveInt = 512
    """Sequences of one node in one inner step, over all its ranks and micro-batches."""
    micro_bs: PositiveInt = Field(default=64, json_schema_extra=NODE_LOCAL)
    """Sequences of one rank in one forward pass; lower it when memory runs out."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute type; master parameters, gradients' reduction and optimizer are always float32."""
    activation_checkpointing: ActivationCheckpointing = Field(default="none", json_schema_extra=NODE_LOCAL)
    """Activations that the backward pass makes again. selective: all but products of matrices and attention, a few
    percent slower, half the memory; full: each block, about 30 % slower, the least memory; none: fastest."""
    compile: bool | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """torch.compile each block and the loss: faster on GPUs after a first step of a minute or two; no gain on CPU.
    None: on GPUs."""
    reshard_after_forward: bool | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """FSDP2 frees gathered parameters between forward and backward: less memory, more traffic inside the node. None:
    on GPUs, unless keeping them fits easily; on CPUs, yes."""
    reduce_gradients: Literal["step", "micro_batch"] | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """When the ranks of a node add up their gradients. step: once, and until then each rank holds all of them in
    float32; micro_batch: after each one, into its own shard. None: on GPUs, step where that fits easily; on CPUs, step.
    """
    float8: Float8Recipe | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Multiply in float8 in the blocks' linear layers, by torchao's recipe of this name (extra `float8`): tensorwise is
    the fastest, rowwise_with_gw_hp the most exact. Needs compute capability 8.9; faster only with train.compile. It
    rounds a node's own gradients, not what nodes agree on, so nodes with and without it train together. None: off."""
    profile: ProfileConfig | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Trace some steps of each rank, into the node's folder of the run directory. None: none."""
    threads: PositiveInt | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """CPU threads of one rank. None: torch's choice."""

    @model_validator(mode="after")
    def _is_profiled_while_it_trains(self) -> TrainConfig:
        if self.profile is not None and self.profile.steps[1] > self.total_steps:
            first, last = self.profile.steps
            raise ValueError(
                f"train.profile.steps=[{first}, {last}] ends after the last step, train.total_steps={self.total_steps}"
            )
        return self

    @model_validator(mode="after")
    def _float8_rounds_bfloat16(self) -> TrainConfig:
        if self.float8 is not None and self.dtype != "bfloat16":
            raise ValueError(f'train.float8={self.float8!r} needs train.dtype = "bfloat16", not {self.dtype!r}')
        return self


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
    """The run's Redis."""

    url: Secret | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Redis of the run: `redis://`, `rediss://` or `unix://`, or that which Sentinel names:
    `redis+sentinel://HOST:26379,.../SERVICE`, `rediss+sentinel://`. None: this node trains alone, without [outer]."""

    @field_validator("url")
    @classmethod
    def _names_a_redis(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            parse_store_url(url.get_secret_value())
        return url


class ElasticConfig(Section):
    """Nodes that come and go."""

    min_nodes: PositiveInt = 1
    """The run waits while fewer nodes than this are alive."""
    start_nodes: PositiveInt = Field(default=1, json_schema_extra=NODE_LOCAL)
    """Nodes to wait for before the first step; later ones join on the way."""
    start_timeout_s: PositiveFloat = Field(default=300.0, json_schema_extra=NODE_LOCAL)
    """Time after which the run starts with the nodes that are there, if they are at least min_nodes. A joiner gives up
    when for so long it got nothing more of the state; a fetch may take longer, and goes on where it was cut off."""


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
    """A trainer without progress for so long loses its lease; above the longest stall of a healthy one, and above
    detect_s. None: 24 times detect_s, at least 300."""
    transfer_s: PositiveFloat | None = None
    """gloo's own time-out, which never decides: a transfer is given up after 2 detect_s without a byte. At least
    hung_s. None: 120 times detect_s, at least 600 and twice hung_s."""
    store_s: PositiveFloat | None = None
    """How long a node waits at its boundary for a Redis that is away, before it gives up; at least detect_s. None: 120
    times detect_s, at least 3600."""
    grace_s: PositiveFloat = Field(default=25.0, json_schema_extra=NODE_LOCAL)
    """A node that is asked to leave (SIGTERM, SIGUSR1) waits so long for the others to take what it learned; below the
    time after which SIGKILL follows (torchrun and Slurm 30 s, `docker stop` 10 s unless told otherwise)."""
    inject: tuple[str, ...] = Field(default=(), json_schema_extra=NODE_LOCAL)
    """Faults for this node to have on purpose, in tests: `opened@3=SIGKILL`; `opened@+3=...` counts from its first."""

    @property
    def time_outs(self) -> TimeOuts:
        """Return every time-out; those that were not set follow from detect_s."""
        return TimeOuts.following(self.detect_s, {name: getattr(self, name) for name in TIME_OUT_NAMES})

    @model_validator(mode="after")
    def _are_ordered(self) -> FaultConfig:
        self.time_outs.require_order()
        return self


class WandbConfig(Section):
    """Weights & Biases."""

    project: str = Field(default="zeroband", json_schema_extra=NODE_LOCAL)
    """Project to log to."""
    mode: Literal["online", "offline"] = Field(default="offline", json_schema_extra=NODE_LOCAL)
    """offline writes to disk only; `wandb sync` uploads later."""


class ObserveConfig(Section):
    """What is shown and kept of the training."""

    log_every_steps: PositiveInt = Field(default=10, json_schema_extra=NODE_LOCAL)
    """A line on the console every so many inner steps; metrics.jsonl has them all."""
    wandb: WandbConfig | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Weights & Biases sink. None: off."""
    sample_prompt: str | None = Field(default=None, min_length=1, json_schema_extra=NODE_LOCAL)
    """Text to continue at the end of the run, written to `sample.txt`. None: no sample."""
    sample_tokens: PositiveInt = Field(default=256, json_schema_extra=NODE_LOCAL)
    """Length of that continuation in tokens."""


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
    shared: bool = True
    """All nodes see the same path and write one checkpoint together, each a share of it. False: each node writes a
    whole one to a path of its own."""
    peer_wait_s: PositiveFloat = 60.0
    """Longest silence of a node's writer before the node that completes a checkpoint goes without its share, and writes
    the rest itself. If that one is silent for twice as long, the next node completes it. Nodes that the run lost, and
    nodes whose storage fails, are not waited for."""
    retry_s: PositiveFloat = Field(default=300.0, json_schema_extra=NODE_LOCAL)
    """How long one file is tried again when the storage fails, before the checkpoint is given up."""

    def rounds_between(self, *, are_rounds_steps: bool) -> int:
        """Rounds from one checkpoint to the next; the same on all nodes."""
        return self.every_rounds or (_STEPS_BETWEEN if are_rounds_steps else 1)


class ResumeConfig(Section):
    """Where a run begins again."""

    step: int | None = Field(default=None, ge=0, json_schema_extra=NODE_LOCAL)
    """Inner step of the checkpoint to go on from. None: the newest that verifies, or a new run where there is none."""
    path: str | None = Field(default=None, min_length=1, json_schema_extra=NODE_LOCAL)
    """Checkpoints of another run, `<its ckpt.path>/<its run.id>` or one `step_N` folder in it, to begin with. Used
    until this run has checkpoints of its own, unless a step is named. None: this run's own."""
    trust: bool = Field(default=False, json_schema_extra=NODE_LOCAL)
    """Take checkpoints that run.token does not vouch for: saved without a token, or with another one. Whoever can write
    to their folder then decides what this run goes on from."""


class RollbackConfig(Section):
    """Going back because of the loss, which the nodes decide once for all of them. Needs [outer] and ckpt.path."""

    on_spike: float | None = Field(default=2.0, gt=1)
    """A round whose loss, over all nodes, is so many times the running mean of the rounds before it. None: never."""
    on_non_finite: bool = True
    """A round in which no node had a finite loss and a finite update; a single such node is left out anyway."""
    skip_data: bool = True
    """The samples learned from since the checkpoint are not learned from again: with the same samples the same nodes
    would repeat every bit. Off: they are, which suffices where the hardware was at fault."""
    most: PositiveInt = 3
    """Times in a row to the same checkpoint; then the run stands still, as after `zeroband ctl pause`."""


ExportDtype = Literal["bfloat16", "float32"]
EXPORT_DTYPES: tuple[ExportDtype, ...] = get_args(ExportDtype)


class ExportConfig(Section):
    """Where the export goes, and how exact it is."""

    path: Path | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Folder to make; one that is there already is left alone. None: `<run.dir>/<run.id>/<node id>/export`."""
    dtype: ExportDtype = Field(default="bfloat16", json_schema_extra=NODE_LOCAL)
    """Type of the weights in it; float32 keeps them bit for bit."""


class RunConfig(Section):
    """A whole run. Rules that span sections live here."""

    run: RunSection = RunSection()
    node: NodeSection = NodeSection()
    model: ModelConfig = ModelConfig()
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
    observe: ObserveConfig = ObserveConfig()
    export: ExportConfig | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """What this node exports at the end of the run. None: nothing."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(default="INFO", json_schema_extra=NODE_LOCAL)
    """Detail of the console."""

    @property
    def codec_name(self) -> str:
        """How this run encodes what it averages."""
        if self.comm.backend == "gloo":
            return "fp32"
        return self.comm.codec or ("int8" if isinstance(self.outer, DilocoConfig) else "fp32")

    @model_validator(mode="after")
    def _store_and_outer_go_together(self) -> RunConfig:
        has_store = self.store.url is not None
        if self.outer is not None and not has_store:
            raise ValueError(
                f"outer.type={self.outer.type!r} joins nodes and needs store.url, for example redis://HOST:6379; for "
                "a test on this machine alone, `zeroband simulate` starts a store of its own"
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
    def _made_up_ids_are_no_text(self) -> RunConfig:
        if isinstance(self.data.source, SyntheticTokensSource):
            wanted = {"observe.sample_prompt": self.observe.sample_prompt, "[export]": self.export}
            for key in (key for key, value in wanted.items() if value is not None):
                raise ValueError(
                    f"{key} needs a tokenizer, and the ids of data.source.type='synthetic-tokens' stand for no text; "
                    "drop one of them"
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
    def _float8_has_sizes_for_it(self) -> RunConfig:
        sizes = {
            "data.seq_length": self.data.seq_length,
            "model.d_model": self.model.d_model,
            "model.d_ff": self.model.ff_width,
            "model.n_kv_heads times the head size": self.model.kv_heads * self.model.head_size,
        }
        for name, size in sizes.items():
            if self.train.float8 is not None and size % _FLOAT8_MULTIPLE:
                raise ValueError(f"train.float8 needs {name} to be a multiple of {_FLOAT8_MULTIPLE}, not {size}")
        return self

    @model_validator(mode="after")
    def _starts_with_enough_nodes(self) -> RunConfig:
        if self.elastic.start_nodes < self.elastic.min_nodes:
            raise ValueError(
                f"elastic.start_nodes={self.elastic.start_nodes} is below elastic.min_nodes={self.elastic.min_nodes}; "
                f"set it to {self.elastic.min_nodes} or more"
            )
        return self
