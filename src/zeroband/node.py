"""What a node trains with, alone or among others: model, data, inner optimizer, from its configuration."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

import torch

from zeroband.checkpoint.hub_files import start_from
from zeroband.config.outer import DdpConfig, DemoConfig
from zeroband.config.schema import RunConfig
from zeroband.data.index import SampleIndex
from zeroband.data.loader import Loader
from zeroband.data.tokenizer import Tokenizer, open_tokenizer
from zeroband.data.tokens import prepare
from zeroband.elastic.departure import Departure
from zeroband.elastic.mesh import on_first_rank
from zeroband.faults import FaultPoints
from zeroband.model.init import init_weights
from zeroband.model.transformer import Transformer
from zeroband.observe.log import get_logger
from zeroband.optim import InnerOptimizer, StepRule
from zeroband.outer.losses import StepLoss
from zeroband.parallel import LocalMesh, make_room, parallelize

_log = get_logger(__name__)


@dataclass(frozen=True)
class NodeParts:
    """What a node needs to train alone."""

    config: RunConfig
    node_id: str
    node_dir: Path
    """`<run.dir>/<run.id>/<node id>`."""
    local: LocalMesh
    tokenizer: Tokenizer
    loader: Loader
    data_fingerprint: str
    weights_fingerprint: str
    """Of the files that the weights came from; empty where they are random."""
    model: Transformer
    inner: InnerOptimizer
    departure: Departure
    faults: FaultPoints
    step_loss: StepLoss = field(default_factory=StepLoss)
    """Of the newest inner step, for the outer algorithm."""


def node_id_of(config: RunConfig) -> str:
    """The name of this machine for the life of the run."""
    return config.node.id or socket.gethostname()


def node_dir_of(config: RunConfig) -> Path:
    """`<run.dir>/<run.id>/<node id>`, where this node writes."""
    return config.run.dir / config.run.id / node_id_of(config)


def build_node(config: RunConfig, local: LocalMesh, departure: Departure) -> NodeParts:
    """Data, model and inner optimizer of this rank. Called by all local ranks."""
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    tokenizer = open_tokenizer(config.data.tokenizer)
    tokens = prepare(config.data, config.run.seed, _log_progress if local.rank == 0 else None)
    index = SampleIndex(len(tokens), config.data.seq_length, config.run.seed, config.data.hold_out)
    loader = Loader(
        tokens,
        index,
        batch_size=config.train.batch_size,
        micro_bs=config.train.micro_bs,
        local_rank=local.rank,
        local_world_size=local.world_size,
        document_mask=config.data.document_mask,
    )
    with torch.device("meta"):
        model = Transformer(config.model, tokenizer.padded_vocab_size)
    parallelize(model, config.train, local)
    make_room(model, local)
    init_weights(model, config.run.seed)
    weights = _weights_to_start_from(config, model, tokenizer, local)
    is_ddp = isinstance(config.outer, DdpConfig)  # its state must be equal on nodes with other numbers of ranks
    rule: StepRule = "sign" if isinstance(config.outer, DemoConfig) else "adamw"
    inner = InnerOptimizer(model, config.optim, total_steps=config.train.total_steps, slice_exact=is_ddp, rule=rule)
    return NodeParts(
        config=config,
        node_id=node_id_of(config),
        node_dir=node_dir_of(config),
        local=local,
        tokenizer=tokenizer,
        loader=loader,
        data_fingerprint=tokens.fingerprint,
        weights_fingerprint=weights,
        model=model,
        inner=inner,
        departure=departure,
        faults=FaultPoints(config.fault.inject if local.rank == 0 else ()),
    )


def _weights_to_start_from(config: RunConfig, model: Transformer, tokenizer: Tokenizer, local: LocalMesh) -> str:
    """Load the weights of `train.init_from`. Returns the fingerprint of their files, empty without any."""
    if config.train.init_from is None:
        return ""
    files = start_from(model, config.train.init_from, used_ids=tokenizer.vocab_size)
    return on_first_rank(local, files.fingerprint)


def _log_progress(tokens: int) -> None:
    _log.info("preparing data", extra={"fields": {"tokens": tokens}})
