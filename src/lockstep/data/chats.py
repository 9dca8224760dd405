"""Conversations, rendered by a chat template, with the assistant's messages as targets.

    row --> messages --> chat template --> ids, and which of them are targets (`rendered`)

    <user> Hi <end> <assistant> Hello <end> <user> ...         the whole conversation
    <user> Hi <end> <assistant>                                the messages before an answer, and the prompt for one
    <user> Hi <end> <assistant> Hello <end>                    the messages up to it
                                ------------                   its targets, if both are prefixes of the whole's ids

A template with `{% generation %}` marks the targets itself.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.config.schema import HuggingFaceData
from lockstep.core.errors import ConfigError
from lockstep.data.columns import ratings
from lockstep.data.hub import rows_identity, tokenizer_identity
from lockstep.data.order import Indices, fingerprint
from lockstep.data.rendered import Rendered, RenderedSource, open_rendered

FORMAT = 1
_ROLES = {"human": "user", "gpt": "assistant", "function_response": "tool", "observation": "tool"}
_KNOWN = ("system", "user", "assistant", "tool", *_ROLES)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
_TODAY = datetime.date(2024, 7, 26)
_MARK = "mark answers in a template by {% generation %} and {% endgeneration %}, and name its file as chat_template"

Message = dict[str, Any]
Span = tuple[int, int]


# --- messages -------------------------------------------------------------------------------------------------------


def messages_of(value: object, role: str = "") -> list[Message]:
    """Return a column's value as messages with `role` and `content`; a text is one message of `role`.

    Raises:
        ValueError: It is no conversation.
    """
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise ValueError(f"{value!r:.60} is no list of messages")
    return [_message(_without_nulls(message)) for message in value]


def _message(message: Message) -> Message:
    if "from" in message and "role" not in message:
        message = {"role": message.pop("from"), "content": message.pop("value", None), **message}
        if message["role"] not in _KNOWN:
            raise ValueError(f"from: {message['role']!r}; the roles are {', '.join(_KNOWN)}")
    if "role" not in message or not {"content", "tool_calls"} & message.keys():
        raise ValueError(f"a message has the keys {', '.join(message)}; it needs role and content, or from and value")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise ValueError("a message has parts that are no text; train on a Dataset of your own (kind: custom)")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and "tool_calls" not in message:
        raise ValueError(f"a message of the role {message['role']} has {content!r:.40} and no text")
    role = _ROLES.get(message["role"], message["role"])
    return {**message, "role": role} | ({} if content is None else {"content": content})


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys that the datasets library has filled up with None."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def is_target(message: Message) -> bool:
    """Return whether an answer is trained on: `weight` of OpenAI's files and `train` of Axolotl's may be 0 or false.

    Raises:
        ValueError: The weight is another number.
    """
    weight = message.get("weight", message.get("train", 1))
    if weight not in (0, 1):
        raise ValueError(f"weight {weight!r}: a message can have the weight 0 or 1")
    return bool(weight)


# --- rendering ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation: its messages, the number of those that are a prompt, and its tools."""

    messages: list[Message]
    prompt: int = 0
    tools: list[Any] | None = None

    def without_first_turn(self) -> Chat | None:
        """Return it without the messages before the second one of the user, except system texts; None: it has one."""
        head = next((n for n, each in enumerate(self.messages) if each["role"] not in ("system", "developer")), 0)
        users = (n for n in range(head + 1, len(self.messages)) if self.messages[n]["role"] == "user")
        second = next(users, None)
        if second is None or (self.prompt and second >= self.prompt):
            return None
        messages = self.messages[:head] + self.messages[second:]
        return Chat(messages, max(self.prompt - (second - head), 0), self.tools)


class Template:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: Any, section: HuggingFaceData) -> None:
        self.tokenizer = tokenizer
        self.section = section
        self._added = set(tokenizer.added_tokens_decoder)

    def render(self, chats: Sequence[Chat]) -> list[Rendered] | None:
        """Return the conversations of a sample, each with at most `max_length` tokens, and the same turns cut.

        Returns:
            None if one is too long.

        Raises:
            ValueError: A conversation can't be rendered.
        """
        is_cut, longest = False, self.section.max_length
        whole = len(chats) if self.section.desirable is None else 1  # the end of another sample's answer is cut
        while max(map(len, (texts := [self._ids(chat.messages, chat) for chat in chats])[:whole])) > longest:
            shorter = [chat.without_first_turn() if self.section.too_long == "cut" else None for chat in chats]
            if None in shorter:
                return None
            chats, is_cut = [chat for chat in shorter if chat is not None], True
        pairs = zip(chats, texts, strict=True)
        return [
            Rendered(np.array(ids[:longest], np.uint32), self._targets(chat, ids)[:longest], is_cut)
            for chat, ids in pairs
        ]

    def _targets(self, chat: Chat, ids: list[int]) -> NDArray[np.bool_]:
        """Return which ids are targets, by `train_on`, the prompt and the messages' weights. Raises ValueError."""
        answers = [n for n, each in enumerate(chat.messages) if each["role"] == "assistant"]
        wanted = [n for n in answers if n >= chat.prompt and is_target(chat.messages[n])]
        last_only, everything = self.section.train_on == "last", self.section.train_on == "all"
        if last_only:
            wanted = [n for n in wanted if n == answers[-1]]
        targets = np.full(len(ids), everything)
        if everything:
            wanted = [n for n in answers if not is_target(chat.messages[n])]
        if not wanted:
            return targets
        spans = self._generated(chat)
        if spans is None or (len(spans) != len(answers) and wanted != answers):
            spans = [self._span(chat, ids, n) for n in wanted]
        elif len(spans) == len(answers):
            spans = [spans[answers.index(n)] for n in wanted]
        for start, stop in spans:
            targets[start:stop] = not everything
        return targets

    def _generated(self, chat: Chat) -> list[Span] | None:
        """Return where the template's own marks are; None if it has none."""
        if not _GENERATION.search(self._text(chat)):
            return None
        mask = self._apply(chat.messages, chat, return_assistant_tokens_mask=True)["assistant_masks"]
        edges = np.flatnonzero(np.diff([0, *mask, 0]))
        return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]

    def _span(self, chat: Chat, ids: list[int], place: int) -> Span:
        """Return where an answer is, found by prefixes of the conversation. Raises ValueError if they are none."""
        before = self._ids(chat.messages[:place], chat, add_generation_prompt=True)
        is_last = place == len(chat.messages) - 1
        upto = ids if is_last else self._ids(chat.messages[: place + 1], chat)
        if ids[: len(before)] != before or ids[: len(upto)] != upto or len(upto) <= len(before):
            other = "" if is_last else "train on the last answer only (train_on: last), or "
            why = (
                f"the chat template renders message {place + 1} differently once others follow, or joins it to the next"
            )
            raise ValueError(f"{why}, so its tokens can't be told apart; {other}{_MARK}")
        return len(before), self._end(ids, len(before), len(upto))

    def _end(self, ids: list[int], start: int, stop: int) -> int:
        """Return where an answer's last token ends: a line break after its end token belongs to the template."""
        end = stop
        while end > start and ids[end - 1] not in self._added and self.tokenizer.decode([ids[end - 1]]).isspace():
            end -= 1
        return end if end > start and ids[end - 1] in self._added else stop

    def _text(self, chat: Chat) -> str:
        """Return the template, with the date of Llama 3's for today's: data is the same on any day."""
        text: str = self.tokenizer.get_chat_template(None, chat.tools)
        return _DATE.sub(lambda call: repr(_TODAY.strftime(call[2])), text)

    def _ids(self, messages: list[Message], chat: Chat, **options: Any) -> list[int]:
        return list(self._apply(messages, chat, **options)["input_ids"])

    def _apply(self, messages: list[Message], chat: Chat, **options: Any) -> Mapping[str, Any]:
        try:
            rendered: Mapping[str, Any] = self.tokenizer.apply_chat_template(
                messages, tools=chat.tools, chat_template=self._text(chat), return_dict=True, **options
            )
        except Exception as error:  # a template raises what it likes
            raise ValueError(f"the chat template doesn't render it: {type(error).__name__}: {error}") from error
        return rendered


# --- the source -----------------------------------------------------------------------------------------------------


def open_chats(
    rows: Any, tokenizer: Any, section: HuggingFaceData, *, aligned: bool, classes: int | None = None
) -> RenderedSource:
    """Return the source of a dataset's conversations, rendered once for all ranks and runs. Raises ConfigError."""
    if not tokenizer.chat_template:
        where = f"tokenizer {tokenizer.name_or_path} has no chat template"
        raise ConfigError(f"{where}; name the file of one as chat_template, or a tokenizer that has one as tokenizer")
    options = section.model_dump(
        include={
            "messages", "label", "rejected", "desirable", "tools", "system", "system_column", "train_on", "too_long",
        }
    )  # fmt: skip
    identity = tokenizer_identity(tokenizer), tokenizer.chat_template, sorted(tokenizer.special_tokens_map.items())
    key = fingerprint("chats", FORMAT, *rows_identity(rows), identity, options, section.max_length)
    render = partial(_render, rows, Template(tokenizer, section))
    rated = None if section.desirable is None else ratings(rows, section.desirable, section.name)
    options = {"aligned": aligned, "classes": classes, "rated": rated}
    return open_rendered("chats", key, len(rows), render, tokenizer, section, **options)


def _render(rows: Any, template: Template, indices: Indices) -> Iterator[list[Rendered] | None]:
    columns = rows[indices]
    before = columns if template.section.desirable is None else rows[(indices - 1) % len(rows)]
    samples = (zip(*each.values(), strict=True) for each in (columns, before))
    for sample in zip(*samples, strict=True):
        own, previous = (dict(zip(columns, values, strict=True)) for values in sample)
        yield template.render(_chats_of(template.section, own, previous))


def _chats_of(section: HuggingFaceData, row: Mapping[str, Any], before: Mapping[str, Any]) -> list[Chat]:
    """Return a row's conversation; the chosen and the rejected one; or a rated one, and it with the answer `before`.

    Raises:
        ValueError: A row has no such conversation.
    """
    if section.desirable is not None:
        rated, previous = _answered(section, row), _answered(section, before)
        messages = [*rated.messages[: rated.prompt], *previous.messages[previous.prompt :]]
        return [rated, replace(rated, messages=messages)]
    if section.rejected is None:
        return [_chat(section, row)]
    other = section.messages if section.label is None else section.label
    chosen, rejected = _chat(section, row), _chat(section, {**row, str(other): row[section.rejected]})
    if section.label is None:
        pairs = zip(chosen.messages, rejected.messages, strict=False)
        same = next((n for n, (left, right) in enumerate(pairs) if left != right), None)
        prompt = min(len(chosen.messages), len(rejected.messages)) if same is None else same
        return [replace(chosen, prompt=prompt), replace(rejected, prompt=prompt)]
    return [chosen, rejected]


def _answered(section: HuggingFaceData, row: Mapping[str, Any]) -> Chat:
    """Return a row's conversation, with all before its answer as the prompt. Raises ValueError."""
    chat = _chat(section, row)
    return replace(chat, prompt=chat.prompt or len(chat.messages) - 1)


def _chat(section: HuggingFaceData, row: Mapping[str, Any]) -> Chat:
    """Return a row's conversation. Raises ValueError."""
    assert section.messages is not None
    completes = section.label is not None
    messages = messages_of(row[section.messages], "user" if completes else "")
    system = row[section.system_column] if section.system_column is not None else section.system
    if system and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": system}, *messages]
    completion = messages_of(row[section.label], "assistant") if section.label is not None else []
    tools = row[section.tools] if section.tools is not None else None
    tools = json.loads(tools) if isinstance(tools, str) else _without_nulls(tools)
    return Chat([*messages, *completion], len(messages) if completes else 0, tools or None)
