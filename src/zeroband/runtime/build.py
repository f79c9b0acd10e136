"""What the trainer trains with, alone or among others: model, data, inner optimizer, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroband.checks.plain_paths import plain_paths
from zeroband.config.load import shared_items
from zeroband.config.outer import CustomConfig, DdpConfig, DemoConfig
from zeroband.config.placement import Placement
from zeroband.config.schema import RunConfig
from zeroband.data.index import SampleIndex
from zeroband.data.loader import Loader
from zeroband.data.tokenizer import Tokenizer, tokenizer_of
from zeroband.data.tokens import Corpus, prepare
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.rounds.elastic_device_mesh import on_first_rank
from zeroband.export.hub_files import start_from
from zeroband.model.attention import attention_on
from zeroband.model.init import init_weights
from zeroband.model.optim import InnerOptimizer, StepRule
from zeroband.model.transformer import Transformer
from zeroband.node.faults import FaultPoints
from zeroband.node.identity import node_dir_of, node_id_of
from zeroband.node.mesh import LocalMesh, compiles, make_room, parallelize
from zeroband.observe.log import get_logger
from zeroband.outer.custom import CustomAlgorithm, load_algorithm
from zeroband.runtime.node_parts import NodeParts, TrainedOn
from zeroband.runtime.profile import StepProfiler
from zeroband.state.flat import FlatLayout

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainerParts(NodeParts):
    """What the trainer needs to train alone."""

    tokenizer: Tokenizer
    loader: Loader
    data_fingerprint: str
    model: Transformer
    placement: Placement
    inner: InnerOptimizer
    profiler: StepProfiler

    def trained_on(self) -> TrainedOn:
        config, tokenizer = self.config, self.tokenizer
        corpus = Corpus(
            config.data,
            config.run.seed,
            fingerprint=self.data_fingerprint,
            tokenizer_fingerprint=tokenizer.fingerprint,
        )
        model = {**config.model.model_dump(mode="json"), "vocab_size": tokenizer.padded_vocab_size}
        return TrainedOn(model, config.data.tokenizer, corpus.to_record())


def build_trainer(config: RunConfig, local: LocalMesh, departure: Departure) -> TrainerParts:
    """Data, model and inner optimizer of this rank. Called by all local ranks."""
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    tokenizer = tokenizer_of(config.data)
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
        even_micro_batches=compiles(config.train, local.device),
        pins=local.device.type == "cuda",
    )
    with torch.device("meta"):
        attend, _ = attention_on(local.device, getattr(torch, config.train.dtype), config.model)
        model = Transformer(config.model, tokenizer.padded_vocab_size, attend)
    if local.rank == 0:
        for finding in plain_paths(config, local.device):
            _log.warning(str(finding))
    placed = parallelize(model, config.train, local)
    make_room(model, local)
    init_weights(model, config.run.seed)
    weights = _weights_to_start_from(config, model, tokenizer, local)
    custom = load_algorithm(config.outer) if isinstance(config.outer, CustomConfig) else None
    # at every step the inner state is the nodes' common one, whatever the number of their ranks
    is_exact = isinstance(config.outer, DdpConfig) or (custom is not None and custom.is_every_step)
    rule: StepRule = "sign" if isinstance(config.outer, DemoConfig) else "adamw"
    inner = InnerOptimizer(model, config.optim, total_steps=config.train.total_steps, slice_exact=is_exact, rule=rule)
    return TrainerParts(
        config=config,
        node_id=node_id_of(config),
        node_dir=node_dir_of(config),
        shared=_shared(config, model, custom, data=tokens.fingerprint, weights=weights),
        local=local,
        tokenizer=tokenizer,
        loader=loader,
        data_fingerprint=tokens.fingerprint,
        model=model,
        placement=placed,
        inner=inner,
        profiler=StepProfiler(config.train.profile, node_dir_of(config), rank=local.rank, device=local.device),
        departure=departure,
        faults=FaultPoints(config.fault.inject if local.rank == 0 else ()),
    )


def _shared(
    config: RunConfig, model: Transformer, custom: CustomAlgorithm | None, *, data: str, weights: str
) -> dict[str, str]:
    """`data`, `weights`: fingerprints of the tokens, and of the files that the weights came from."""
    return {
        **{key: str(value) for key, value in shared_items(config).items()},
        "model (names and shapes)": FlatLayout.of(model).digest(),
        "data (tokens)": data,
        "train.init_from (weights)": weights,
        **({} if custom is None else {"outer.algorithm (file)": custom.digest}),
    }


def _weights_to_start_from(config: RunConfig, model: Transformer, tokenizer: Tokenizer, local: LocalMesh) -> str:
    """Load the weights of `train.init_from`. Returns the fingerprint of their files, empty without any."""
    if config.train.init_from is None:
        return ""
    files = start_from(model, config.train.init_from, used_ids=tokenizer.vocab_size)
    return on_first_rank(local, files.fingerprint)


def _log_progress(tokens: int) -> None:
    _log.info("preparing data", extra={"fields": {"tokens": tokens}})
