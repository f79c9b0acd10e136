"""Builds the trainer's parts from its configuration: model, data and inner optimizer."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zeroband.checkpoint.own_state import seed_random_state
from zeroband.checks.machine import slow_fallbacks
from zeroband.config.data import DataConfig
from zeroband.config.outer import CustomConfig, DdpConfig, DemoConfig
from zeroband.config.schema import RunConfig
from zeroband.config.shared import shared_items
from zeroband.config.training import Placement, TrainConfig
from zeroband.data.dataset import Dataset, open_dataset
from zeroband.data.ledger import SHARED
from zeroband.data.loader import Loader
from zeroband.data.tokenizer import Tokenizer, tokenizer_of, with_template
from zeroband.data.tokens import Corpus
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.rounds.elastic_device_mesh import on_first_rank
from zeroband.elastic.store.interface import REMARK
from zeroband.errors import ConfigError
from zeroband.export.hub_files import start_from
from zeroband.model.attention import activate_flash_3
from zeroband.model.blueprint import Blueprint
from zeroband.model.language_model import LanguageModel
from zeroband.model.optim import InnerOptimizer
from zeroband.model.registry import blueprint_of, require_answers
from zeroband.model.transformer import Transformer
from zeroband.node.faults import FaultPoints
from zeroband.node.identity import node_dir_of, node_id_of
from zeroband.node.mesh import LocalMesh, allocate, broadcast_json, compiles, gather_json, parallelize
from zeroband.node.sharding import Parameters
from zeroband.observe.log import get_logger
from zeroband.outer.custom import CustomAlgorithm, load_algorithm
from zeroband.runtime.node_parts import ModelDescription, NodeParts, OpenPort
from zeroband.runtime.profile import StepProfiler
from zeroband.state.flat import FlatLayout

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainerParts(NodeParts):
    """The parts of a trainer."""

    tokenizer: Tokenizer
    loader: Loader
    data_fingerprint: str
    blueprint: Blueprint
    model: LanguageModel
    placement: Placement
    inner: InnerOptimizer
    profiler: StepProfiler

    @property
    def sample_tokens(self) -> int:
        return self.config.data.seq_length

    def describe_model(self) -> ModelDescription:
        config, tokenizer = self.config, self.tokenizer
        corpus = Corpus(
            with_template(config.data, tokenizer).for_record,
            config.run.seed,
            fingerprint="" if config.data.private else self.data_fingerprint,
            tokenizer_fingerprint=tokenizer.fingerprint,
            tokenizer_release=tokenizer.release,
        )
        return ModelDescription(self.blueprint.to_record(), config.data.tokenizer, corpus.to_record())


def build_trainer(
    config: RunConfig, local: LocalMesh, departure: Departure, port: OpenPort | None = None
) -> TrainerParts:
    """Build this rank's data, model and inner optimizer. Called by all local ranks. `port`: already open, if any."""
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    tokenizer = tokenizer_of(config.data)
    dataset = open_dataset(
        config.data,
        config.run.seed,
        _log_progress if local.rank == 0 else None,
        local_rank=local.local_rank,
        local_world_size=local.ranks_here,
    )
    loader = loader_of(dataset, config.data, config.train, local)
    blueprint, model, placed, agreed = _build_model(config, tokenizer, local)
    parameters = model.trained()
    custom = load_algorithm(config.outer) if isinstance(config.outer, CustomConfig) else None
    is_exact = _has_common_steps(config, custom)
    return TrainerParts(
        config=config,
        node_id=node_id_of(config),
        node_dir=node_dir_of(config),
        shared={
            **_shared_items(config, dataset, tokenizer),
            **agreed,
            **({} if custom is None else {"outer.algorithm (file)": custom.digest}),
            **({"train.device (rounds the nodes' common step)": local.device.type} if is_exact else {}),
        },
        local=local,
        tokenizer=tokenizer,
        loader=loader,
        data_fingerprint=dataset.fingerprint,
        blueprint=blueprint,
        model=model,
        parameters=parameters,
        placement=placed,
        inner=_build_inner(config, parameters, model, local, slice_exact=is_exact),
        profiler=StepProfiler(config.train.profile, node_dir_of(config), rank=local.rank, device=local.device),
        departure=departure,
        port=port,
        corpus=_corpus_of(config, dataset.fingerprint),
        faults=FaultPoints(config.fault.inject if local.rank == 0 else ()),
    )


def loader_of(dataset: Dataset, data: DataConfig, train: TrainConfig, local: LocalMesh) -> Loader:
    """Build the loader of this rank's rows. `data`: opened the dataset. Called by all local ranks."""
    return Loader(
        dataset,
        batch_size=train.batch_size,
        micro_bs=train.micro_bs,
        local_rank=local.rank,
        local_world_size=local.world_size,
        document_mask=data.document_mask,
        even_micro_batches=compiles(train, local),
        pins=local.device.type == "cuda",
    )


def _shared_items(config: RunConfig, dataset: Dataset, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the values that all nodes must share, and the tokenizer's release as a remark."""
    ids = "data.tokenizer (ids)"
    return {
        **{key: str(value) for key, value in shared_items(config).items()},
        **({} if config.data.private else dataset.fingerprints),
        ids: tokenizer.fingerprint,
        **({f"{REMARK}{ids}": tokenizer.release} if tokenizer.release else {}),
    }


def _corpus_of(config: RunConfig, fingerprint: str) -> str:
    """Return the name of this node's corpus in the run.

    The name of a private corpus changes with its documents. It is a hash keyed by run.token: without the token, it
    does not reveal whether the text is a known one.
    """
    if not config.data.private:
        return SHARED
    token, node_id = config.run.token, node_id_of(config)
    key = RunKey.of(None if token is None else token.get_secret_value(), "private data").secret
    digest = hashlib.blake2b(f"{node_id}/{fingerprint}".encode(), digest_size=8, key=key).hexdigest()
    return f"{node_id}/{digest}"


def _has_common_steps(config: RunConfig, custom: CustomAlgorithm | None) -> bool:
    """Whether all nodes share the inner state at every step, whatever the number of their ranks.

    Their device types must agree, since AdamW's kernels round differently.
    """
    return isinstance(config.outer, DdpConfig) or (custom is not None and custom.is_every_step)


def _build_model(
    config: RunConfig, tokenizer: Tokenizer, local: LocalMesh
) -> tuple[Blueprint, LanguageModel, Placement, Mapping[str, str]]:
    """Build the model, sharded over the local ranks and initialised; returns also what nodes must agree on.

    Called by all local ranks.
    """
    seed_random_state(config.run.seed, node_id_of(config), local.rank)
    blueprint = blueprint_of(config.model, tokenizer, config.data.seq_length)
    dtype = getattr(torch, config.train.dtype)
    model = blueprint.on_meta(local.device, dtype)
    if isinstance(model, Transformer) and (said := activate_flash_3(local.device, dtype, model.config)):
        _log.info("FlashAttention 3 is installed", extra={"fields": {"rank": local.rank, "it_is": said}})
    require_answers(config, model)
    findings = gather_json([str(finding) for finding in slow_fallbacks(config, local.device)], local)
    if local.rank == 0:
        for finding in dict.fromkeys(itertools.chain(*findings)):  # different GPUs lack different things
            _log.warning(finding)
    placed = parallelize(model, config.train, local)
    allocate(model, local)
    values = broadcast_json(blueprint.give_values(model, config.run.seed, local), local)
    require_answers(config, model)  # some models know only with their values whether they separate documents
    weights = ""
    if config.train.init_from is not None:
        assert isinstance(model, Transformer), "the configuration has seen to it"
        files = start_from(model, config.train.init_from, used_ids=tokenizer.vocab_size)
        weights = on_first_rank(local, files.fingerprint)
    agreed = {
        "model (names and shapes)": FlatLayout.of(model.trained()).digest(),
        "train.init_from (weights)": weights,
        **blueprint.shared,
        **values,
    }
    return blueprint, model, placed, agreed


def _build_inner(
    config: RunConfig, parameters: Parameters, model: LanguageModel, local: LocalMesh, *, slice_exact: bool
) -> InnerOptimizer:
    """Build the inner optimizer. Called by all local ranks. Raises ConfigError for low-bit moments that nodes share."""
    if slice_exact and config.optim.state_dtype != "float32":
        raise ConfigError(
            f"optim.state_dtype={config.optim.state_dtype!r} is for moments of a node's own, and nodes share those of "
            "an outer.algorithm that steps with every inner step: drop it"
        )
    return InnerOptimizer(
        parameters,
        config.optim,
        total_steps=config.train.total_steps,
        module=model,
        slice_exact=slice_exact,
        rule="sign" if isinstance(config.outer, DemoConfig) else "adamw",
        compiled=compiles(config.train, local),
    )


def _log_progress(tokens: int) -> None:
    _log.info("preparing data", extra={"fields": {"tokens": tokens}})
