"""A twin of the trainer's inner loop from other people's parts: transformers' Llama, torch's AdamW and clipping.

The twin gets the weights once and the samples as rows of tokens; which document a token belongs to, positions, masks,
the mean over targets, the learning rate and which parameters decay are worked out here from the descriptions.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from zeroband.config import RunConfig
from zeroband.elastic.membership.departure import Departure
from zeroband.model.parallel import clip_grad_norm_
from zeroband.node.mesh import LocalMesh, init_local_mesh
from zeroband.runtime.build import TrainerParts, build_trainer
from zeroband.runtime.loop import forward_backward

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

pytestmark = pytest.mark.slow

STEPS, TOTAL, WARMUP, LR, CLIP, LENGTH, BATCH = 40, 60, 5, 3e-3, 1.0, 48, 6
END_OF_DOCUMENT = 256
CONFIG = f"""
[model]
type = "llama"
d_model = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
d_ff = 48

[data]
seq_length = {LENGTH}
source = {{ type = "synthetic", documents = 400, mean_length = 30 }}

[train]
total_steps = {TOTAL}
batch_size = {BATCH}
micro_bs = 4
dtype = "float32"
threads = 1

[optim]
warmup_steps = {WARMUP}
clip_norm = {CLIP}
adamw = {{ lr = {LR}, betas = [0.9, 0.95], weight_decay = 0.1 }}
schedule = {{ type = "cosine", final_ratio = 0.1 }}
"""


Samples = tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def local() -> Iterator[LocalMesh]:
    threads = torch.get_num_threads()
    mesh = init_local_mesh(environ={})
    yield mesh
    mesh.close()
    torch.set_num_threads(threads)  # train.threads set it


def ours_of(local: LocalMesh, tmp_path: Path, *, document_mask: bool) -> TrainerParts:
    config = tomllib.loads(CONFIG)
    config["data"] |= {"cache_dir": tmp_path, "document_mask": document_mask}
    return build_trainer(RunConfig.model_validate(config), local, Departure(grace_s=1.0))


def samples_of(parts: TrainerParts) -> list[Samples]:
    """Return tokens and targets of each step, both (b, t)."""
    parts.loader.assign([(0, STEPS * BATCH)])
    steps = [parts.loader.next_step() for _ in range(STEPS)]
    return [(torch.cat([b.tokens for b in step]), torch.cat([b.targets for b in step])) for step in steps]


def train_ours(parts: TrainerParts) -> tuple[list[float], list[float]]:
    """Return loss and norm of the gradient of each step."""
    parts.loader.assign([(0, STEPS * BATCH)])
    losses, norms = list[float](), list[float]()
    for _ in range(STEPS):
        passed = forward_backward(parts)
        losses.append(passed.nats.item() / passed.tokens)
        norms.append(clip_grad_norm_(parts.model, parts.config.optim.clip_norm).item())
        parts.inner.step()
        parts.inner.zero_grad()
    return losses, norms


# -- the twin -------------------------------------------------------------------------------------------------------


def llama_with(weights: dict[str, Tensor]) -> torch.nn.Module:
    """Return transformers' Llama with these weights. They have its names, but for a leading `model.`."""
    vocabulary, width = weights["embed_tokens.weight"].shape
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        attn_implementation="eager",
        use_cache=False,
    )
    llama = transformers.LlamaForCausalLM(config).float()
    renamed = {name if name == "lm_head.weight" else f"model.{name}": w.clone() for name, w in weights.items()}
    llama.load_state_dict(renamed, strict=True)
    return llama.train()


def documents_of(tokens: Tensor) -> Tensor:
    """Number the documents of each row: an end-of-document token begins the next one."""
    return (tokens == END_OF_DOCUMENT).cumsum(dim=1)


def positions_of(documents: Tensor) -> Tensor:
    """Count the tokens of each document from 0."""
    rows = [[row[:at].count(document) for at, document in enumerate(row)] for row in documents.tolist()]
    return torch.tensor(rows)


def loss_of(llama: torch.nn.Module, samples: Samples, *, document_mask: bool) -> Tensor:
    """Return the mean cross entropy over the targets; each sees the tokens before it, or those of its document."""
    tokens, targets = samples
    documents = documents_of(tokens) if document_mask else torch.zeros_like(tokens)
    sees = (documents[:, :, None] == documents[:, None, :]) & torch.ones(LENGTH, LENGTH).tril().bool()
    added = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[:, None]
    logits = llama(input_ids=tokens, attention_mask=added, position_ids=positions_of(documents)).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rate_of(step: int) -> float:
    """Return the part of the peak at a step from 0: linear growth, then half a cosine down to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - WARMUP) / (TOTAL - WARMUP))) / 2


def train_twin(llama: torch.nn.Module, samples: list[Samples], *, document_mask: bool) -> list[float]:
    matrices = [p for p in llama.parameters() if p.dim() > 1]
    vectors = [p for p in llama.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, rate_of)
    losses: list[float] = []
    for batch in samples:
        loss = loss_of(llama, batch, document_mask=document_mask)
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(llama.parameters(), CLIP)
        adamw.step()
        adamw.zero_grad()
        schedule.step()
    return losses


@pytest.mark.parametrize("document_mask", [True, False])
def test_trainer_learns_what_transformers_and_torch_learn(
    local: LocalMesh, tmp_path: Path, document_mask: bool
) -> None:
    parts = ours_of(local, tmp_path, document_mask=document_mask)
    samples = samples_of(parts)
    assert all(documents_of(tokens).max() > 0 for tokens, _ in samples), "no two documents are in one sample"
    for tokens, targets in samples:
        assert torch.equal(targets[:, :-1][targets[:, :-1] >= 0], tokens[:, 1:][targets[:, :-1] >= 0])
    llama = llama_with({name: p.detach() for name, p in parts.model.named_parameters()})
    theirs = train_twin(llama, samples, document_mask=document_mask)
    ours, norms = train_ours(parts)
    assert min(norms) < CLIP < max(norms), "some gradients are clipped, and some are not"
    assert abs(ours[0] - theirs[0]) < 1e-6
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 2e-6
    assert ours[-1] < ours[0] - 0.5
