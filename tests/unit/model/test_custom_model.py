"""A model from a file of the user's: what its forward pass may take and give, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.model.foreign import trained_with

from zeroband.errors import ConfigError
from zeroband.export.directory import whole_parameters
from zeroband.model import generate
from zeroband.model.generate import evaluating
from zeroband.model.loss import IGNORE_INDEX, next_token_loss
from zeroband.model.parallel import require_cuts
from zeroband.model.registry import blueprint_of_record
from zeroband.node.mesh import LocalMesh, init_local_mesh
from zeroband.runtime.build import TrainerParts
from zeroband.runtime.loop import forward_backward

OWN_MODEL = Path(__file__).resolve().parents[3] / "examples" / "own_model.py"

FORMS = {
    "logits": "def forward(self, tokens):\n        return self.head(self.body(tokens))",
    "tuple": (
        "def forward(self, tokens, targets=None):\n"
        "        logits = self.head(self.body(tokens))\n"
        "        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())\n"
        "        return logits if targets is None else logits, loss"
    ),
    "names": "def forward(self, tokens):\n        return {'logits': self.head(self.body(tokens))}",
    "loss": (
        "def forward(self, tokens, targets):\n"
        "        return F.cross_entropy(self.head(self.body(tokens)).flatten(0, 1), targets.flatten())"
    ),
}

BODY = """\
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.body = nn.Embedding(vocab_size, 16)
        self.head = nn.Linear(16, vocab_size)

    {forward}


def build(config):
    return Model(config.vocab_size)
"""


PLAIN = BODY.format(forward=FORMS["logits"])


@pytest.fixture(scope="module")
def local() -> Iterator[LocalMesh]:
    mesh = init_local_mesh(environ={})
    yield mesh
    mesh.close()


def section(file: Path, **changes: Any) -> dict[str, Any]:
    return {"type": "custom", "file": str(file), **changes}


def written(folder: Path, text: str) -> Path:
    file = folder / "model.py"
    file.write_text(text)
    return file


Own = Callable[..., TrainerParts]


@pytest.fixture
def own(local: LocalMesh, tmp_path: Path) -> Own:
    """own(text): a node with the model of a file that says this, which knows nothing of documents."""

    def own(text: str, **sections: Any) -> TrainerParts:
        data = {"document_mask": False, "hold_out": 0.0}
        return trained_with(section(written(tmp_path, text)), local, tmp_path, **{"data": data, **sections})

    return own


def first_step(node: TrainerParts) -> tuple[float, list[torch.Tensor]]:
    node.loader.assign([(0, 4)])
    passed = forward_backward(node)
    gradients = [parameter.grad for _, parameter in node.parameters.named_parameters()]
    assert all(gradient is not None for gradient in gradients)
    return passed.nats.item() / passed.tokens, [gradient.clone() for gradient in gradients if gradient is not None]


@pytest.mark.parametrize("form", ["tuple", "names", "loss"])
def test_logits_and_losses_in_every_form_train_alike(form: str, own: Own) -> None:
    steps = [first_step(own(BODY.format(forward=FORMS[name]))) for name in ("logits", form)]
    losses, gradients = zip(*steps, strict=True)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert losses[0] == pytest.approx(5.8, abs=0.3)


@pytest.mark.parametrize(("form", "tells"), [("logits", True), ("tuple", False), ("loss", False)])
def test_losses_of_targets_are_told_where_they_are_made_here(form: str, tells: bool, own: Own) -> None:
    node = own(BODY.format(forward=FORMS[form]))
    node.loader.assign([(0, 4)])
    batch = node.loader.next_step()[0]
    loss = node.model(batch.tokens, None, batch.targets, 0.0, True)
    assert tells is not node.model.has_own_loss
    assert (loss.per_target is not None) is tells
    if tells:
        assert loss.per_target.shape == (batch.targets.numel(),)
        assert loss.per_target.sum().item() == pytest.approx(loss.cross_entropy.item(), rel=1e-5)


def test_example_knows_documents_and_is_sampled_from(local: LocalMesh, tmp_path: Path) -> None:
    node = trained_with(section(OWN_MODEL, settings=("width=16", "layers=3")), local, tmp_path)
    assert len(node.model.blocks) == 3
    node.loader.assign([(0, 4)])
    (batch, _) = node.loader.next_step()
    with evaluating(node.model):
        logits = node.model(batch.tokens, batch.cu_seqlens)
        (border,) = [b for b in batch.cu_seqlens.tolist() if 0 < b < 32][:1]
        alone = node.model(batch.tokens[:1, border:], torch.tensor([0, 32 - border], dtype=torch.int32))
        crossing = node.model(batch.tokens)
        loss = node.model(batch.tokens, batch.cu_seqlens, batch.targets)
    following = next((b for b in batch.cu_seqlens.tolist() if border < b < 32), 32)
    torch.testing.assert_close(logits[:1, border:following], alone[:, : following - border])
    assert not torch.allclose(crossing[:1, border:following], alone[:, : following - border])
    expected = next_token_loss(logits, batch.targets)
    torch.testing.assert_close(loss.cross_entropy, expected.cross_entropy)
    text = generate(node.model, torch.tensor([1, 2]), max_new_tokens=3, temperature=0, seed=0, context=32)
    assert text.shape == (5,)


def test_rows_without_a_target_teach_nothing(own: Own) -> None:
    model = own(BODY.format(forward=FORMS["loss"])).model
    tokens = torch.arange(8)[None]
    loss = model(tokens, None, torch.full_like(tokens, IGNORE_INDEX))
    loss.objective.backward()
    assert (loss.objective.item(), loss.targets.item()) == (0.0, 0)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_seed_alone_decides_the_first_weights(local: LocalMesh, tmp_path: Path) -> None:
    torch.manual_seed(11)
    first = trained_with(section(OWN_MODEL), local, tmp_path)
    torch.manual_seed(12)
    second = trained_with(section(OWN_MODEL), local, tmp_path)
    other = trained_with(section(OWN_MODEL), local, tmp_path, run={"seed": 5})
    named = [dict(node.parameters.named_parameters()) for node in (first, second, other)]
    assert all(torch.equal(named[0][name], named[1][name]) for name in named[0])
    assert not torch.equal(named[0]["embedding.weight"], named[2]["embedding.weight"])


def test_tied_weights_are_one_parameter(own: Own) -> None:
    tied = "nn.Linear(16, vocab_size, bias=False)\n        self.head.weight = self.body.weight"
    node = own(PLAIN.replace("nn.Linear(16, vocab_size)", tied))
    assert [name for name, _ in node.parameters.named_parameters()] == ["body.weight"]
    module: Any = node.model.module
    first_step(node)
    assert module.head.weight is module.body.weight and module.body.weight.grad.abs().sum() > 0


def test_record_in_a_checkpoint_makes_the_same_model(local: LocalMesh, tmp_path: Path) -> None:
    node = trained_with(section(OWN_MODEL, settings=("width=8",)), local, tmp_path)
    record = node.blueprint.to_record()
    again = blueprint_of_record(record, seq_length=32)
    assert again.to_record() == record
    built = again.build(whole_parameters(node.parameters, keeps=True).__getitem__, torch.device("cpu"))
    ids = torch.arange(8)[None]
    with evaluating(node.model):
        assert torch.equal(built(ids), node.model(ids))


def test_file_with_another_content_has_another_fingerprint(local: LocalMesh, tmp_path: Path) -> None:
    same, other = tmp_path / "same.py", tmp_path / "other.py"
    same.write_text(OWN_MODEL.read_text())
    other.write_text(OWN_MODEL.read_text() + "# not the same\n")
    nodes = [trained_with(section(file), local, tmp_path) for file in (OWN_MODEL, same, other)]
    assert nodes[0].shared == nodes[1].shared
    assert {key for key in nodes[0].shared if nodes[0].shared[key] != nodes[2].shared[key]} == {"model.file (content)"}


def test_buffers_that_are_saved_have_a_fingerprint(own: Own) -> None:
    shared = []
    for value in ("0.0", "1.0"):
        buffer = f"self.register_buffer('bias', torch.tensor({value}))\n        self.head ="
        node = own(PLAIN.replace("self.head =", buffer))
        assert node.model.module.bias.item() == float(value)
        shared.append(node.shared["model (buffers)"])
    assert shared[0] != shared[1]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1\n", r"has no function build\(config\)"),
        ("def build(config):\n    raise KeyError('width')\n", r"build\(config\) raised KeyError\('width'\)"),
        ("def build(config):\n    return 3\n", r"build\(config\) returned int; it must return a torch\.nn\.Module"),
        ("import nowhere\n", r"cannot be imported: ModuleNotFoundError"),
        (
            BODY.format(forward="def forward(self, tokens):\n        return tokens / 0.5"),
            r"gave a tensor of shape \(1, 8\)",
        ),
        (BODY.format(forward="def forward(self, tokens):\n        return None"), "gave neither logits nor a loss"),
        (BODY.format(forward="def forward(self):\n        return None"), r"the module raised TypeError"),
        (PLAIN.replace("Linear(16, vocab_size)", "Linear(16, 200)"), r"of shape \(1, 8, 200\).*320 or more"),
        (
            PLAIN.replace("Model(config.vocab_size)", "Model(config.vocab_size).half()"),
            r"parameter body\.weight is torch\.float16; build the model in float32",
        ),
        (
            PLAIN.replace("self.head =", "self.norm = nn.BatchNorm1d(4)\n        self.head ="),
            r"norm is a BatchNorm1d with running statistics",
        ),
        (
            PLAIN.replace("Model(config.vocab_size)", "Model(config.vocab_size).requires_grad_(False)"),
            "no parameter of the model has requires_grad",
        ),
    ],
)
def test_file_that_builds_nothing_to_train_is_refused(text: str, complaint: str, own: Own, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        own(text)
    assert f"model.file={str(tmp_path / 'model.py')!r}" in str(refused.value)


@pytest.mark.parametrize(
    ("form", "sections", "complaint"),
    [
        ("logits", {"data": {}}, "does not isolate the documents of a row; set data.document_mask=false"),
        ("loss", {"observe": {"sample_prompt": "a"}}, "sample_prompt needs logits"),
        ("loss", {"optim": {"z_loss": 1e-4}}, r"optim\.z_loss=0\.0001 needs logits"),
    ],
)
def test_run_that_asks_more_of_a_model_than_it_gives_is_refused(
    form: str, sections: dict[str, Any], complaint: str, own: Own
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        own(BODY.format(forward=FORMS[form]), **sections)


def test_settings_that_are_no_pairs_are_refused(local: LocalMesh, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'width' is no KEY=VALUE"):
        trained_with(section(OWN_MODEL, settings=("width",)), local, tmp_path)


LAYERS = "self.layers = nn.ModuleList([nn.Linear(2, 2)])\n        "


@pytest.mark.parametrize(
    ("added", "complaint"),
    [
        ("", "no nn.ModuleList of layers, so 2 ranks cannot shard it"),
        (LAYERS, None),
        (
            f"{LAYERS}self.scale = nn.Parameter(torch.ones(()))\n        ",
            r"parameter module\.scale is a scalar, which ranks cannot shard; give it shape \(1,\)",
        ),
    ],
)
def test_model_that_ranks_cannot_share_out_is_refused(
    added: str, complaint: str | None, own: Own, local: LocalMesh
) -> None:
    model = own(PLAIN.replace("self.head =", f"{added}self.head =", 1)).blueprint.on_meta()
    with nullcontext() if complaint is None else pytest.raises(ConfigError, match=complaint):
        require_cuts(model, replace(local, world_size=2))


FROZEN = PLAIN.replace(
    "self.head =",
    "self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)\n"
    "        self.register_buffer('drawn', torch.randn(2))\n        self.head =",
    1,
)


def test_frozen_values_of_the_seed_come_back_with_a_checkpoint(own: Own, tmp_path: Path) -> None:
    text = FROZEN.replace("self.head(self.body(tokens))", "self.head(self.body(tokens) * self.frozen)")
    node = own(text, run={"seed": 7})
    record = json.loads(json.dumps(node.blueprint.to_record()))
    read = whole_parameters(node.parameters, keeps=True).__getitem__
    ids = torch.arange(8)[None]
    with evaluating(node.model):
        wanted = node.model(ids)
    for blueprint in (node.blueprint, blueprint_of_record(record, seq_length=32)):
        assert torch.equal(blueprint.build(read, torch.device("cpu"))(ids), wanted)
    written(tmp_path, text.replace("torch.randn(16)", "torch.ones(16)"))
    with pytest.raises(ConfigError, match=r"model \(frozen parameters\) differ from those that this model was trained"):
        blueprint_of_record(record, seq_length=32).build(read, torch.device("cpu"))


def test_layers_may_share_a_buffer_and_be_used_again(own: Own) -> None:
    shared = (
        "mask = torch.full((2,), 3.0)\n        block = nn.Linear(2, 2)\n        block.register_buffer('mask', mask)\n"
    )
    again = "        other = nn.Linear(2, 2)\n        other.register_buffer('mask', mask)\n"
    layers = "        self.layers = nn.ModuleList([block, other, block])\n        self.head ="
    node = own(PLAIN.replace("self.head =", f"{shared}{again}{layers}", 1))
    module: Any = node.model.module
    assert len(node.model.blocks) == 2
    assert all(layer.mask.tolist() == [3.0, 3.0] for layer in module.layers)
