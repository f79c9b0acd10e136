"""Conversations as tokens: a chat template writes them as text, and what the assistant said is marked to be learned.

Templates are rendered by transformers, as they are when the model is asked. Reads no file of data.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zeroband.data.pieces import BadRow
from zeroband.data.sources import Conversation
from zeroband.data.tokenizer import Ids, Tokenizer
from zeroband.errors import ConfigError, way_to_extra

LEARNED, BEGINS = np.uint8(1), np.uint8(2)
"""Marks of a token, one bit each: it is a target, it begins a document."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Marks = npt.NDArray[np.uint8]
Span = tuple[int, int]
"""Characters of a text, half open."""


class EncodedChat(NamedTuple):
    """The tokens of one conversation. Shapes: both (n,)."""

    ids: Ids
    marks: Marks


class Prompt(NamedTuple):
    """What a model continues, and the id that ends its answer."""

    ids: Ids
    end: int


class ChatEncoder:
    """Writes conversations by the template of a tokenizer, `Tokenizer.chat_template`.

    The assistant's are the places between {% generation %} and {% endgeneration %} where a template has them. Elsewhere
    they are what each of its messages adds to the prompt for it, up to the token that ends it. A conversation may begin
    with one, for which there is no prompt: it begins where the template has the assistant begin.
    Raises: ConfigError where transformers is missing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.chat_template is not None, "of a [data] section with a chat source"
        self._tokenizer = tokenizer
        self._template = tokenizer.chat_template
        try:
            self._jinja: Any = importlib.import_module("transformers.utils.chat_template_utils")
        except ImportError as e:
            raise ConfigError(f"data.source.type='chat' needs transformers: {way_to_extra('hf')}") from e
        self.without_thoughts: list[str] = []
        """Where conversations lie of which the template writes no `reasoning_content`, though they have some."""

    def encode(self, conversation: Conversation) -> list[EncodedChat]:
        """Return the tokens of a conversation up to the assistant's last message.

        One document; several where the template writes earlier messages otherwise than it did when they were the last,
        as those do that leave out what the assistant thought: then each of the assistant's messages ends one, in which
        it alone is learned, and so the model reads in training what it reads when it is asked.
        Raises: BadRow naming where the conversation lies, and the way out; ConfigError for another tokenizer.
        """
        try:
            written = self._written(conversation)
            encoded = [self._encode(text, spans) for text, spans in written]
        except ConfigError:
            raise
        except Exception as e:  # a template raises what it likes on messages that it was not made for
            raise BadRow(
                f"data.source: {conversation.where}: the chat template cannot write this conversation: {e}; correct "
                "the line, or set data.source.template to a template that can"
            ) from e
        if not any((chat.marks & LEARNED).any() for chat in encoded):
            raise BadRow(
                f"data.source: {conversation.where}: the chat template writes nothing that the assistant says; correct "
                "the line, or what is between {% generation %} and {% endgeneration %} in the template"
            )
        told = [message.get("reasoning_content") for message in conversation.messages]
        thoughts = [thought.strip() for thought in told if isinstance(thought, str) and thought.strip()]
        if thoughts and not any(thought in text for thought in thoughts for text, _ in written):
            self.without_thoughts.append(conversation.where)
        return encoded

    def prompt(self, text: str) -> Prompt:
        """What a user says, with the beginning of the assistant's answer. Raises: ConfigError as `encode` does."""
        asked = [{"role": "user", "content": text}]
        answered = Conversation([*asked, {"role": "assistant", "content": "."}], None, "the prompt")
        last = self.encode(answered)[-1]
        ids, _ = self._tokenizer.encode_chat(self._render(asked, answered, is_asking=True))
        return Prompt(ids, int(last.ids[np.flatnonzero(last.marks & LEARNED)[-1]]))

    def _written(self, conversation: Conversation) -> list[tuple[str, list[Span]]]:
        """Texts of a conversation, and where the assistant speaks in them."""
        messages = conversation.messages
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if _GENERATION.search(self._template):
            return [self._render_marked(messages[: turns[-1] + 1], conversation)]
        told = [self._turn(messages, turn, conversation) for turn in turns]
        whole = told[-1][0]
        if all(whole.startswith(text) for text, _ in told):
            return [(whole, [span for _, span in told])]
        return [(text, [span]) for text, span in told]

    def _turn(self, messages: Sequence[dict[str, Any]], turn: int, conversation: Conversation) -> tuple[str, Span]:
        """The text up to the end of one of the assistant's messages, and where that lies in it."""
        answered = self._render(messages[: turn + 1], conversation)
        asked = self._render(messages[:turn], conversation, is_asking=True) if turn else self._opening(answered)
        if not answered.startswith(asked):
            raise BadRow(
                f"data.source: {conversation.where}: the chat template writes message {turn + 1} otherwise than it "
                "asks for it, so what the assistant says cannot be told; put {% generation %} and {% endgeneration %} "
                "around it in a template of your own, and name that in data.source.template"
            )
        said = answered[len(asked) :]
        ended = said.rstrip()
        is_ended_by_token = any(ended.endswith(special) for special in self._tokenizer.special_texts)
        return answered, (len(asked), len(asked) + len(ended if is_ended_by_token else said))

    def _opening(self, answered: str) -> str:
        """What stands before a first message of the assistant: all up to where the template has it begin to speak.

        Many templates write no conversation without a message, so that is read off one with a user's.
        """
        asked = Conversation([{"role": "user", "content": "."}], None, "")
        alone, asking = (self._render(asked.messages, asked, is_asking=is_asking) for is_asking in (False, True))
        begins = asking.removeprefix(alone)
        return answered[: answered.find(begins) + len(begins)] if begins and begins in answered else asking

    def _render(
        self, messages: Sequence[dict[str, Any]], conversation: Conversation, *, is_asking: bool = False
    ) -> str:
        (text,), _ = self._rendered(messages, conversation, add_generation_prompt=is_asking)
        return text

    def _render_marked(self, messages: Sequence[dict[str, Any]], conversation: Conversation) -> tuple[str, list[Span]]:
        (text,), (spans,) = self._rendered(messages, conversation, return_assistant_tokens_mask=True)
        return text, spans

    def _rendered(self, messages: Sequence[dict[str, Any]], conversation: Conversation, **options: bool) -> Any:
        return self._jinja.render_jinja_template(
            conversations=[list(messages)],
            tools=conversation.tools,
            chat_template=self._template,
            **options,
            **self._tokenizer.special_names,
        )

    def _encode(self, text: str, spans: Sequence[Span]) -> EncodedChat:
        """Tokens that lie in a span, or begin or end in one, are learned; the first one follows from nothing."""
        ids, offsets = self._tokenizer.encode_chat(text)
        stops = offsets[:, 1]
        starts = np.minimum(offsets[:, 0], np.concatenate([[0], stops[:-1]]))  # spaces may be left out of offsets
        marks = np.zeros(len(ids), dtype=np.uint8)
        for start, stop in spans:
            marks[(starts < stop) & (stops > start)] = LEARNED
        marks[:1] = BEGINS
        return EncodedChat(ids, marks)


def pack(chats: Iterable[EncodedChat], seq_length: int, padding: int) -> Iterator[EncodedChat]:
    """Yield conversations one after the other, and padding before each that the end of a sample would cut otherwise.

    One that is longer than a sample is cut, and follows the one before it at once.
    """
    at = 0
    for ids, marks in chats:
        room = -at % seq_length  # up to the next sample, whose first token is the last target of this one
        if room < len(ids) - 1 <= seq_length and room:
            unlearned = np.zeros(room, dtype=np.uint8)
            unlearned[0] = BEGINS
            yield EncodedChat(np.full(room, padding, dtype=np.uint32), unlearned)
            at += room
        yield EncodedChat(ids, marks)
        at += len(ids)


def prompt_of(tokenizer: Tokenizer, text: str) -> Prompt:
    """A prompt as the model was trained to read it: a text, or what a user says in a chat."""
    if tokenizer.chat_template is not None:
        return ChatEncoder(tokenizer).prompt(text)
    return Prompt(tokenizer.encode(text), tokenizer.end_of_document)
