"""Conversations as tokens: held against transformers' own mask, on a tokenizer that is made here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zeroband.config.data import ChatSource, DataConfig, MixtureSource, TextSource
from zeroband.data.chat import DOCUMENT_START, TARGET, ChatEncoder, EncodedChat, pack, prompt_of
from zeroband.data.dataset import Dataset, SourceSamples
from zeroband.data.index import SampleIndex, flat_layout
from zeroband.data.loader import IGNORED, Loader
from zeroband.data.sources import Conversation, conversations
from zeroband.data.token_store import TokenStore
from zeroband.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer, tokenizer_of, with_template
from zeroband.data.tokens import is_prepared, prepare
from zeroband.errors import ConfigError

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, which most models are published with."""

MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The same text, and the places of the assistant in it."""

FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Leaves out of earlier messages what the assistant thought."""

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wie heißt → auf Deutsch?"},
    {"role": "assistant", "content": " Pfeil 𝄞  "},
    {"role": "user", "content": "And <|im_end|> is?"},
    {"role": "assistant", "content": "An end.\n\nOf a turn."},
]


def make_tokenizer(out: Path, *, trims: bool = False) -> Path:
    """A byte-level BPE with some merges and the special tokens of ChatML. `trims`: spaces are left out of offsets."""
    import tokenizers

    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer, backend.decoder = level, tokenizers.decoders.ByteLevel()
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trims)
    alphabet = sorted(level.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["user assistant system \n\n An end. Of a turn."] * 20, trainer)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    fast.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def backend(folder: Path) -> Any:
    """The tokenizer as transformers has it, once it has rendered a template."""
    backend = transformers.AutoTokenizer.from_pretrained(str(folder))
    backend.apply_chat_template(TALK, chat_template=PLAIN, tokenize=False)
    return backend


def opened(folder: Path | str, template: str | None) -> Tokenizer:
    source = ChatSource(type="chat", paths=("chats.jsonl",), template=template)
    return tokenizer_of(DataConfig(source=source, tokenizer=str(folder)))


def encode(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]] = TALK) -> list[EncodedChat]:
    return ChatEncoder(tokenizer).encode(Conversation(list(messages), None, "chats.jsonl:1"))


def learned(chat: EncodedChat) -> list[bool]:
    return ((chat.marks & TARGET) != 0).tolist()


def said(tokenizer: Any, chat: EncodedChat) -> str:
    return tokenizer.decode(chat.ids[np.array(learned(chat))].tolist())


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_mask_and_ids_are_those_of_transformers(folder: Path, backend: Any, template: str) -> None:
    oracle = backend.apply_chat_template(
        TALK, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    (chat,) = encode(opened(folder, template))
    assert chat.ids.tolist() == oracle["input_ids"]
    assert learned(chat) == [bool(mark) for mark in oracle["assistant_masks"]]
    assert 8 < sum(learned(chat)) < len(chat.ids) - 20
    assert np.flatnonzero(chat.marks & DOCUMENT_START).tolist() == [0]


def test_mask_does_not_depend_on_what_a_tokenizer_calls_the_place_of_a_space(folder: Path, tmp_path: Path) -> None:
    said = "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}"
    trimmed = opened(make_tokenizer(tmp_path, trims=True), said)
    messages = [{"role": "assistant", "content": "  spaces on both sides   "}, *TALK]
    ((chat,), (other,)) = encode(opened(folder, said), messages), encode(trimmed, messages)
    assert learned(chat) == learned(other)


SPOKEN = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
NAMED = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def test_what_is_learned_is_what_the_assistant_says_with_the_end_of_each_turn(folder: Path, backend: Any) -> None:
    (chat,) = encode(opened(folder, PLAIN))
    assert said(backend, chat) == " Pfeil 𝄞  <|im_end|>An end.\n\nOf a turn.<|im_end|>"
    (longer,) = encode(opened(folder, PLAIN), [*TALK, {"role": "user", "content": "Thanks"}])
    assert longer.ids.tolist() == chat.ids.tolist(), "messages behind the last answer are left out"
    asked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    (named,) = encode(opened(folder, NAMED), asked)
    assert said(backend, named) == " y\n", "an end that is no token of its own is learned whole"
    (alone,) = encode(opened(folder, SPOKEN), [{"role": "assistant", "content": "xyz"}])
    assert learned(alone) == [False, True, True], "the first token is never learned"


def test_tools_are_handed_to_the_template(folder: Path, backend: Any) -> None:
    asked = Conversation([{"role": "assistant", "content": "x"}], [{"name": "clock"}], "chats.jsonl:1")
    (chat,) = ChatEncoder(opened(folder, "{{ tools[0].name }}" + SPOKEN)).encode(asked)
    assert backend.decode(chat.ids.tolist()) == "clockx"


def test_template_that_forgets_thoughts_gives_each_answer_as_it_is_asked_for(folder: Path, backend: Any) -> None:
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "<think>add</think>2"},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "<think>again</think>4"},
    ]
    first, second = encode(opened(folder, FORGETFUL), messages)
    assert said(backend, first) == "<think>add</think>2<|im_end|>"
    assert said(backend, second) == "<think>again</think>4<|im_end|>"
    asked = backend.apply_chat_template(
        messages[:3], chat_template=FORGETFUL, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert second.ids.tolist()[: len(asked)] == asked
    assert not any(learned(second)[: len(asked)])


CURIOUS = "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}" + PLAIN
"""Looks at the first message, which an empty conversation does not have."""


@pytest.mark.parametrize("template", [PLAIN, CURIOUS, MARKED])
def test_conversation_may_begin_with_the_assistant(folder: Path, backend: Any, template: str) -> None:
    messages = [
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
    ]
    (whole,) = encode(opened(folder, template), messages)
    assert said(backend, whole) == "Hello!<|im_end|>2<|im_end|>"
    (alone,) = encode(opened(folder, template), messages[:1])
    assert said(backend, alone) == "Hello!<|im_end|>"


def test_thoughts_that_the_template_does_not_write_are_told_of(folder: Path) -> None:
    writes = PLAIN.replace("m['content']", "(m.get('reasoning_content') or '') + m['content']")
    for template, expected in ((PLAIN, ["b:1"]), (writes, [])):
        encoder = ChatEncoder(opened(folder, template))
        for where, thought in (("a:1", ""), ("b:1", " I add. "), ("c:1", None)):
            answer = {"role": "assistant", "content": "2", "reasoning_content": thought}
            encoder.encode(Conversation([{"role": "user", "content": "1+1"}, answer], None, where))
        assert encoder.dropped_reasoning == expected


def test_corpus_of_thoughts_that_are_not_written_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [{"role": "assistant", "content": "2", "reasoning_content": thought} for thought in ("", "I", "add")]
    rows = [json.dumps({"messages": [{"role": "user", "content": "1+1"}, answer]}) for answer in answers]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    source = ChatSource(type="chat", paths=(f"{tmp_path}/a.jsonl",))
    prepare(DataConfig(source=source, seq_length=64, cache_dir=tmp_path / "cache"), 0).close()
    (told,) = [record.__dict__["fields"] for record in caplog.records if "reasoning_content" in record.message]
    assert (told["count"], told["first"]) == (2, f"{tmp_path}/a.jsonl:2")


def test_bytes_have_their_own_template_and_are_exported_with_it(tmp_path: Path) -> None:
    tokenizer = opened("byte", None)
    (chat,) = encode(tokenizer, [{"role": "user", "content": "é"}, {"role": "assistant", "content": "→!"}])
    assert chat.ids.tolist() == [*"<|user|>\né\n<|assistant|>\n→!".encode(), 256]
    assert learned(chat) == [False] * (len(chat.ids) - 5) + [True] * 5
    tokenizer.save(tmp_path, seq_length=64)
    backend = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    oracle = backend.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    (chat,) = encode(tokenizer)
    assert (chat.ids.tolist(), learned(chat)) == (oracle["input_ids"], [bool(m) for m in oracle["assistant_masks"]])


def test_exported_tokenizer_has_the_template_of_training(folder: Path, tmp_path: Path) -> None:
    opened(folder, PLAIN).save(tmp_path, seq_length=64)
    assert open_tokenizer(str(tmp_path)).own_chat_template == PLAIN


def test_prompt_is_what_a_user_says_and_ends_where_the_assistant_does(folder: Path, backend: Any) -> None:
    prompt = prompt_of(opened(folder, PLAIN), "Hi")
    assert backend.decode(prompt.ids.tolist()) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.end == backend.convert_tokens_to_ids("<|im_end|>")
    assert prompt_of(ByteTokenizer(), "Hi").ids.tolist() == [72, 105]


def mixture(*templates: str | None) -> DataConfig:
    """Text, and chats that are written by these templates."""
    chats = [ChatSource(type="chat", paths=(f"{n}.jsonl",), template=text) for n, text in enumerate(templates)]
    named = [MixtureSource(name=f"chat-{n}", weight=1, source=chat) for n, chat in enumerate(chats)]
    return DataConfig(sources=(MixtureSource(name="text", weight=2, source=TextSource()), *named))


def test_template_may_lie_in_a_file_and_its_text_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(PLAIN)
    alone = DataConfig(source=ChatSource(type="chat", paths=("chats.jsonl",), template=str(path)))
    recorded = [with_template(data, tokenizer_of(data)) for data in (alone, mixture(str(path), PLAIN))]
    path.unlink()
    assert [tokenizer_of(data).chat_template for data in recorded] == [PLAIN, PLAIN]
    parts = {name: tokenizer_of(part).chat_template for name, part in recorded[1].parts.items()}
    assert parts == {"text": None, "chat-0": PLAIN, "chat-1": PLAIN}
    assert tokenizer_of(mixture(None)).chat_template == ByteTokenizer.own_chat_template
    assert tokenizer_of(mixture()).chat_template is None


def test_template_that_is_missing_or_another_for_each_source_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.sources: the chats of chat-0, chat-1 use different templates"):
        tokenizer_of(mixture(PLAIN, None))
    with pytest.raises(ConfigError, match=r"no chat template.*chats\.jsonl.*set data\.source\.template"):
        opened(folder, None)
    with pytest.raises(ConfigError, match=r"data\.source\.template='absent\.jinja' is neither"):
        opened(folder, "absent.jinja")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('only users begin') }}", "cannot render this conversation: only users begin"),
        ("{% for m in messages %}", "cannot render this conversation"),
        ("{{ messages[0]['content'] + 1 }}", "cannot render this conversation"),
        ("{{ messages|length }}", r"renders message 3 differently from its.*data\.source\.template"),
        ("{% generation %}{% endgeneration %}{{ 'x' }}", "renders no text of the assistant"),
    ],
)
def test_template_that_cannot_be_used_is_refused_with_the_line(folder: Path, template: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.source: chats\.jsonl:1: the chat template {said}"):
        encode(opened(folder, template))


def found(tmp_path: Path, *rows: Any, **settings: Any) -> list[Conversation]:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return list(conversations(ChatSource(type="chat", paths=(str(path),), **settings)))


def test_conversations_have_roles_whatever_their_keys(tmp_path: Path) -> None:
    shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    (one,) = found(tmp_path, {"talk": shared, "tools": [{"name": "t"}]}, field="talk")
    assert one.messages == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert (one.tools, one.where) == ([{"name": "t"}], f"{tmp_path}/chats.jsonl:1")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "user", "content": "a"}], "no message of the assistant.*drop the line"),
        ([], "no message of the assistant"),
        ("text", "no message of the assistant"),
        (["text"], "message 1 has no role"),
        ([{"content": "a"}], "message 1 has no role"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": None}], "message 2 has no role or"),
    ],
)
def test_line_that_is_no_conversation_is_refused(tmp_path: Path, messages: Any, said: str) -> None:
    good = {"messages": [{"role": "assistant", "content": "a"}]}
    with pytest.raises(ConfigError, match=rf"data\.source: {tmp_path}/chats\.jsonl:2: {said}"):
        found(tmp_path, good, {"messages": messages})


def chat_of(size: int) -> EncodedChat:
    marks = np.full(size, TARGET)
    marks[0] = DOCUMENT_START
    return EncodedChat(np.arange(size, dtype=np.uint32), marks)


def test_pack_cuts_no_conversation_that_fits_into_a_sample() -> None:
    sizes = [5, 4, 9, 1, 8, 20, 3, 2, 9]
    ids, marks = (np.concatenate(parts) for parts in zip(*pack(map(chat_of, sizes), 8, 99), strict=True))
    starts = np.flatnonzero((marks & DOCUMENT_START != 0) & (ids != 99)).tolist()
    assert len(starts) == len(sizes)
    for start, size in zip(starts, sizes, strict=True):
        assert ids[start : start + size].tolist() == list(range(size))
        assert size > 9 or (start + size - 2) // 8 == start // 8 or size == 1
    beside = ids == 99
    assert not (marks[beside] & TARGET).any()
    assert 0 < beside.sum() < 8 * 3


# -- the store and its loader ---------------------------------------------------------------------------------------

T = 32
LONG = "no room is left for any answer in the samples of this question"
ANSWERED = [("a", "bc"), ("d", "e"), (LONG, "f"), ("g", "hi")]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., DataConfig]:
    """config(*talks, **settings): conversations of a question and an answer each, in bytes."""

    def config(*talks: tuple[str, str], **settings: Any) -> DataConfig:
        rows = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in talks or ANSWERED]
        path = tmp_path / "talks.jsonl"
        path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
        source = ChatSource(type="chat", paths=(str(path),), **settings)
        return DataConfig(source=source, cache_dir=tmp_path / "cache", seq_length=T)

    return config


def reader(store: TokenStore, *, batch_size: int, rank: int = 0, ranks: int = 1) -> Loader:
    return Loader(
        Dataset([SourceSamples("", store, SampleIndex(flat_layout(len(store), T), 0, 0.0))]),
        batch_size=batch_size,
        micro_bs=2,
        local_rank=rank,
        local_world_size=ranks,
        document_mask=True,
    )


def test_one_pass_learns_every_answer_once_and_nothing_else(config: Callable[..., DataConfig]) -> None:
    store = prepare(config(), 0)
    n = SampleIndex(flat_layout(len(store), T), 0, 0.0).n_samples
    one = reader(store, batch_size=n)
    one.assign([(0, n)])
    batches = one.next_step()
    rows = [row[row != IGNORED].tolist() for batch in batches for row in batch.targets]
    one.close()
    assert sorted(i for row in rows for i in row) == sorted([*b"bcefhi", *[256] * 4])
    assert one.targets_in_step == store.manifest.learned == 10
    assert (store.manifest.documents, store.manifest.cut_documents) == (4, 1)
    assert [] in rows, "the long question has samples of its own"


def test_documents_begin_where_conversations_do_and_not_where_a_turn_ends(config: Callable[..., DataConfig]) -> None:
    turn = "<|user|>\naaaaaaaaaa\n<|assistant|>\nb"
    store = prepare(config(("a" * 10, "b<|endoftext|>c"), ("d", "e")), 0)
    assert len(turn) + 3 > T + 1, "the first one is cut, so that the second follows it at once"
    whole = store.read(0, len(store)).tolist()
    assert whole.count(256) == 3
    second = len(turn) + 3
    assert np.flatnonzero(store.document_starts(0, store.read(0, len(store)))).tolist() == [0, second]
    one = reader(store, batch_size=2)
    one.assign([(0, 2)])
    (batch,) = one.next_step()
    one.close()
    assert batch.cu_seqlens is not None
    order = [int(row[0]) for row in batch.tokens]
    first_row = order.index(ord("<"))
    expected = {first_row * T, (1 - first_row) * T, (1 - first_row) * T + second - T}
    assert set(batch.cu_seqlens.tolist()[:-1]) == expected


def test_targets_of_a_step_are_those_of_all_ranks(config: Callable[..., DataConfig]) -> None:
    store = prepare(config(), 0)
    counted, held = set[int](), 0
    for rank in range(2):
        one = reader(store, batch_size=4, rank=rank, ranks=2)
        one.assign([(0, 4)])
        held += sum(int((batch.targets != IGNORED).sum()) for batch in one.next_step())
        counted.add(one.targets_in_step)
        one.close()
    assert counted == {held} and held > 0


def test_cache_entry_is_of_its_template_and_length_and_whole(config: Callable[..., DataConfig]) -> None:
    data = config()
    first = prepare(data, 0)
    assert is_prepared(data, 0) and prepare(data, 0).fingerprint == first.fingerprint
    assert prepare(data, 0).is_target(0, len(first)).sum() == 10
    assert not is_prepared(data.model_copy(update={"seq_length": T + 1}), 0)
    (marks,) = data.cache_dir.glob("*.marks") if data.cache_dir else ()
    marks.write_bytes(marks.read_bytes()[:-1])
    assert not is_prepared(data, 0)
    assert not is_prepared(config(template=SPOKEN), 0)


def test_fingerprint_covers_what_is_learned(config: Callable[..., DataConfig]) -> None:
    said = "{{% for m in messages %}}{begin}{{{{ '\n' + m.content }}}}{end}{{% endfor %}}"
    texts = [
        said.format(begin="{% if m.role == 'assistant' %}{% generation %}", end="{% endgeneration %}{% endif %}"),
        said.format(begin="{% if true %}{% generation %}", end="{% endgeneration %}{% endif %}"),
    ]
    texts[0] += "{% for m in messages %}{% if m.role == 'user' %}{{ '\n' + m.content }}{% endif %}{% endfor %}"
    stores = [prepare(config(("a", "a"), template=text), 0) for text in texts]
    ids = [store.read(0, len(store)).tolist() for store in stores]
    assert ids[0] == ids[1] and stores[0].fingerprint != stores[1].fingerprint
