"""Tokenises conversations with a chat template and marks the assistant's tokens as targets.

Templates are rendered by transformers, as at inference.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zeroband.data.readers import BadRow
from zeroband.data.sources import Conversation
from zeroband.data.tokenizer import Ids, Tokenizer
from zeroband.errors import ConfigError, way_to_extra

TARGET, DOCUMENT_START = np.uint8(1), np.uint8(2)
"""Bit flags of a token's mark."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Marks = npt.NDArray[np.uint8]
Span = tuple[int, int]
"""Character range [start, stop)."""


class EncodedChat(NamedTuple):
    """Tokens of a conversation and their marks. Shapes: both (n,)."""

    ids: Ids
    marks: Marks


Message = dict[str, Any]
"""A message of a conversation: its role, its content, and what else the chat template knows."""


class Prompt(NamedTuple):
    """Tokens that the model continues, and the id that ends its answer."""

    ids: Ids
    end: int


class ChatEncoder:
    """Encodes conversations with `Tokenizer.chat_template`.

    Targets are the text between {% generation %} and {% endgeneration %}, if the template has them. Otherwise they are
    what each message of the assistant adds to its generation prompt, up to the token that ends it. For a first message
    of the assistant, which has no prompt, they begin behind the template's generation prompt.
    Raises: ConfigError if transformers is missing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.chat_template is not None, "the [data] section has a chat source"
        self._tokenizer = tokenizer
        self._template = tokenizer.chat_template
        try:
            self._jinja: Any = importlib.import_module("transformers.utils.chat_template_utils")
        except ImportError as e:
            raise ConfigError(f"data.source.type='chat' needs transformers: {way_to_extra('hf')}") from e
        self.dropped_reasoning: list[str] = []
        """Origins of conversations whose `reasoning_content` the template drops."""

    def encode(self, conversation: Conversation) -> list[EncodedChat]:
        """Encode a conversation up to the assistant's last message.

        Usually returns one document. If the template renders earlier messages differently from the last (reasoning
        templates drop old reasoning), each message of the assistant gets a document in which only that message is a
        target, so that training sees the same text as inference.
        Raises: BadRow naming the conversation and the remedy; ConfigError for an unsuitable tokenizer.
        """
        try:
            texts = self._texts(conversation)
            encoded = [self._encode(text, spans) for text, spans in texts]
        except ConfigError:
            raise
        except Exception as e:  # templates raise arbitrary exceptions for messages that they do not support
            raise BadRow(
                f"data.source: {conversation.where}: the chat template cannot render this conversation: {e}; correct "
                "the line, or set data.source.template to a template that can"
            ) from e
        if not any((chat.marks & TARGET).any() for chat in encoded):
            raise BadRow(
                f"data.source: {conversation.where}: the chat template renders no text of the assistant; correct the "
                "line, or the part between {% generation %} and {% endgeneration %} in the template"
            )
        values = [message.get("reasoning_content") for message in conversation.messages]
        reasoning = [value.strip() for value in values if isinstance(value, str) and value.strip()]
        if reasoning and not any(part in text for part in reasoning for text, _ in texts):
            self.dropped_reasoning.append(conversation.where)
        return encoded

    def prompt(self, text: str, before: Sequence[Message] = ()) -> Prompt:
        """Encode a user's message, after earlier ones, with the generation prompt. Raises: ConfigError as `encode`."""
        question = [*before, {"role": "user", "content": text}]
        answered = Conversation([*question, {"role": "assistant", "content": "."}], None, "the prompt")
        last = self.encode(answered)[-1]
        ids, _ = self._tokenizer.encode_chat(self._render(question, answered, add_generation_prompt=True))
        return Prompt(ids, int(last.ids[np.flatnonzero(last.marks & TARGET)[-1]]))

    def _texts(self, conversation: Conversation) -> list[tuple[str, list[Span]]]:
        """Render a conversation as one or more texts with the spans of the assistant."""
        messages = conversation.messages
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if _GENERATION.search(self._template):
            until_last = messages[: turns[-1] + 1]
            (text,), (spans,) = self._render_with_spans(until_last, conversation, return_assistant_tokens_mask=True)
            return [(text, spans)]
        rendered = [self._turn(messages, turn, conversation) for turn in turns]
        whole = rendered[-1][0]
        if all(whole.startswith(text) for text, _ in rendered):
            return [(whole, [span for _, span in rendered])]
        return [(text, [span]) for text, span in rendered]

    def _turn(self, messages: Sequence[Message], turn: int, conversation: Conversation) -> tuple[str, Span]:
        """Render the text up to a message of the assistant, and return the span of that message."""
        text = self._render(messages[: turn + 1], conversation)
        if turn:
            prompt = self._render(messages[:turn], conversation, add_generation_prompt=True)
        else:
            prompt = self._opening(text)
        if not text.startswith(prompt):
            raise BadRow(
                f"data.source: {conversation.where}: the chat template renders message {turn + 1} differently from its "
                "generation prompt, so the assistant's text cannot be located; copy the template, put {% generation %} "
                "and {% endgeneration %} around that text, and set data.source.template to the copy"
            )
        answer = text[len(prompt) :]
        stripped = answer.rstrip()
        ends_with_token = any(stripped.endswith(special) for special in self._tokenizer.special_texts)
        return text, (len(prompt), len(prompt) + len(stripped if ends_with_token else answer))

    def _opening(self, text: str) -> str:
        """Return the part of a text before a first message of the assistant, including its generation prompt.

        Many templates cannot render an empty conversation, so the prompt is taken from one with a user's message.
        """
        user = Conversation([{"role": "user", "content": "."}], None, "")
        without = self._render(user.messages, user)
        with_prompt = self._render(user.messages, user, add_generation_prompt=True)
        prompt = with_prompt.removeprefix(without)
        return text[: text.find(prompt) + len(prompt)] if prompt and prompt in text else with_prompt

    def _render(self, messages: Sequence[Message], conversation: Conversation, **options: bool) -> str:
        (text,), _ = self._render_with_spans(messages, conversation, **options)
        return text

    def _render_with_spans(
        self, messages: Sequence[Message], conversation: Conversation, **options: bool
    ) -> tuple[list[str], list[list[Span]]]:
        return self._jinja.render_jinja_template(
            conversations=[list(messages)],
            tools=conversation.tools,
            chat_template=self._template,
            **options,
            **self._tokenizer.special_names,
        )

    def _encode(self, text: str, spans: Sequence[Span]) -> EncodedChat:
        """Mark tokens that overlap a span as targets, except the first, which nothing predicts."""
        ids, offsets = self._tokenizer.encode_chat(text)
        stops = offsets[:, 1]
        starts = np.minimum(offsets[:, 0], np.concatenate([[0], stops[:-1]]))  # some offsets exclude spaces
        marks = np.zeros(len(ids), dtype=np.uint8)
        for start, stop in spans:
            marks[(starts < stop) & (stops > start)] = TARGET
        marks[:1] = DOCUMENT_START
        return EncodedChat(ids, marks)


def pack(chats: Iterable[EncodedChat], seq_length: int, padding: int) -> Iterator[EncodedChat]:
    """Yield conversations in order, with padding before one that would cross the end of a sample.

    A conversation longer than a sample is not padded, and gets cut.
    """
    position = 0
    for ids, marks in chats:
        room = -position % seq_length  # a sample's last target is the first token of the next sample
        if room < len(ids) - 1 <= seq_length and room:
            padding_marks = np.zeros(room, dtype=np.uint8)
            padding_marks[0] = DOCUMENT_START
            yield EncodedChat(np.full(room, padding, dtype=np.uint32), padding_marks)
            position += room
        yield EncodedChat(ids, marks)
        position += len(ids)


def prompt_of(tokenizer: Tokenizer, text: str, before: Sequence[Message] = ()) -> Prompt:
    """Encode a prompt as in training: as text, or as a user's message if the model was trained on chats.

    `before`: earlier messages of the chat.
    """
    if tokenizer.chat_template is not None:
        return ChatEncoder(tokenizer).prompt(text, before)
    return Prompt(tokenizer.encode(text), tokenizer.end_of_document)
