"""Conversations, rendered by a chat template, with the assistant's messages as targets.

    row --> messages --> chat template --> ids, and which of them are targets --> $LOCKSTEP_CACHE/chats/KEY/

    <user> Hi <end> <assistant> Hello <end> <user> ...         the whole conversation
    <user> Hi <end> <assistant>                                the messages before an answer, and the prompt for one
    <user> Hi <end> <assistant> Hello <end>                    the messages up to it
                                ------------                   its targets, if both are prefixes of the whole's ids

A template with `{% generation %}` marks the targets itself. Conversations are rendered once per machine or shared
folder, as packed documents are tokenized, so that their number and lengths are known before training.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.config.schema import HuggingFaceData
from lockstep.core.errors import ConfigError
from lockstep.core.records import Batch, DataFacts
from lockstep.data import windows
from lockstep.data.hub import rows_identity, tokenizer_identity
from lockstep.data.order import Indices
from lockstep.data.tokens import Packing, cached_folder, pack

FORMAT = 1
IGNORED = -100
_ROLES = {"human": "user", "gpt": "assistant", "function_response": "tool", "observation": "tool"}
_KNOWN = ("system", "user", "assistant", "tool", *_ROLES)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
_TODAY = datetime.date(2024, 7, 26)
_MARK = "mark answers in a template by {% generation %} and {% endgeneration %}, and name its file as chat_template"
_SHOWN_EVERY = 1000
_log = logging.getLogger("lockstep.data")

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


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation's ids, and which of them are targets; `turns_cut`: those that were left out."""

    ids: NDArray[np.uint32]
    targets: NDArray[np.bool_]
    turns_cut: int


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
        cut = 0
        while max(map(len, texts := [self._ids(chat.messages, chat) for chat in chats])) > self.section.max_length:
            shorter = [chat.without_first_turn() if self.section.too_long == "cut" else None for chat in chats]
            if None in shorter:
                return None
            chats, cut = [chat for chat in shorter if chat is not None], cut + 1
        pairs = zip(chats, texts, strict=True)
        return [Rendered(np.array(ids, np.uint32), self._targets(chat, ids), cut) for chat, ids in pairs]

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
) -> ChatSource:
    """Return the source of a dataset's conversations, rendered once for all ranks and runs. Raises ConfigError."""
    if not tokenizer.chat_template:
        where = f"tokenizer {tokenizer.name_or_path} has no chat template"
        raise ConfigError(f"{where}; name the file of one as chat_template, or a tokenizer that has one as tokenizer")
    options = section.model_dump(
        include={"messages", "label", "rejected", "tools", "system", "system_column", "train_on", "too_long"}
    )
    identity = tokenizer_identity(tokenizer), tokenizer.chat_template, sorted(tokenizer.special_tokens_map.items())
    key = windows.fingerprint("chats", FORMAT, *rows_identity(rows), identity, options, section.max_length)
    work = f"rendering the conversations of {section.name}"
    folder = cached_folder("chats", key, work, partial(_write, rows, Template(tokenizer, section)))
    if section.packed and not aligned:
        raise ConfigError("packed conversations are for models of the transformers library; remove packed")
    return ChatSource(folder, tokenizer, section, aligned=aligned, classes=classes)


def _write(rows: Any, template: Template, folder: Path, show: Callable[[str], None]) -> None:
    offsets, numbers, cut, left_out, untargeted = [0], [], 0, 0, 0
    digest = hashlib.blake2b(digest_size=16)
    with (folder / "ids").open("wb") as ids, (folder / "targets").open("wb") as targets:
        for number, chats in enumerate(_chats(rows, template.section)):
            if number % _SHOWN_EVERY == 0:
                show(f"{number:,} of {len(rows):,} conversations")
            try:
                rendered = template.render(chats())
            except ValueError as error:
                where = f"dataset {template.section.name}, split {template.section.split}, row {number + 1:,}"
                raise ConfigError(f"{where}: {error}") from error
            if rendered is None:
                left_out += 1
                continue
            if not all(each.targets[1:].any() for each in rendered):  # nothing predicts the first
                untargeted += 1
                continue
            cut += rendered[0].turns_cut > 0
            numbers.append(number)
            for each in rendered:
                offsets.append(offsets[-1] + len(each.ids))
                for file, values in ((ids, each.ids), (targets, each.targets)):
                    file.write(values.data)
                    digest.update(values.data)
    counts = {"rows": len(rows), "cut": cut, "left_out": left_out, "untargeted": untargeted}
    if not numbers:
        why = f"{left_out:,} are longer than max_length {template.section.max_length}, {untargeted:,} have no targets"
        raise ConfigError(f"none of the {len(rows):,} conversations of {template.section.name} can be used: {why}")
    if changes := _changes(counts, template.section.max_length):
        _log.warning("%s: %s", template.section.name, changes)
    np.save(folder / "offsets.npy", np.array(offsets, np.int64))
    np.save(folder / "rows.npy", np.array(numbers, np.int64))
    digest.update(repr(offsets).encode())
    (folder / "facts.json").write_text(json.dumps({**counts, "fingerprint": digest.hexdigest()}))


def _chats(rows: Any, section: HuggingFaceData) -> Iterator[Callable[[], list[Chat]]]:
    for batch in rows.iter(batch_size=_SHOWN_EVERY):
        names = list(batch)
        for values in zip(*batch.values(), strict=True):
            yield partial(_chats_of, section, dict(zip(names, values, strict=True)))


def _chats_of(section: HuggingFaceData, row: Mapping[str, Any]) -> list[Chat]:
    """Return a row's conversation, or the chosen and the rejected one. Raises ValueError."""
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


class ChatSource:
    """Rendered conversations: `lengths` in tokens, `rows` in the dataset, and as text the `changes`, if there are any.

    A pair is one sample, with the chosen conversation in one row of a batch, and the rejected one in the next. Packed
    ones are put into samples, longest first, the same in each epoch (`tokens.pack`).

    If `aligned`, for models of the transformers library, targets have the places of their ids, and the objective shifts
    them. Otherwise they have those of the ids before.
    """

    draws = False

    def __init__(
        self, folder: Path, tokenizer: Any, section: HuggingFaceData, *, aligned: bool, classes: int | None = None
    ) -> None:
        self._ids = np.memmap(folder / "ids", np.uint32, "r").view(np.ndarray)
        self._targets = np.memmap(folder / "targets", np.bool_, "r").view(np.ndarray)
        self._offsets = np.load(folder / "offsets.npy")
        self.rows: Indices = np.load(folder / "rows.npy")
        self.lengths = np.diff(self._offsets)
        facts = json.loads((folder / "facts.json").read_text())
        self.fingerprint: str = windows.fingerprint("chats", facts.pop("fingerprint"))
        self._padding = tokenizer.pad_token_id
        self._aligned = aligned
        self._packing = pack(self._offsets, section.max_length) if section.packed else None
        samples = self._packing.samples if self._packing else len(self.rows)
        pairs, size = section.rejected is not None, len(tokenizer)
        self._per_sample = 2 if pairs else 1
        self.facts = DataFacts(samples, None, vocabulary=size, classes=classes, padding=self._padding, pairs=pairs)
        if self._packing:
            self.fingerprint = windows.fingerprint("packed", self.fingerprint, section.max_length)
        self.changes = _changes(facts, section.max_length)

    def fetch(self, indices: Indices) -> Batch:
        if self._packing:
            return self._packed(self._packing, indices)
        texts = (indices[:, None] * self._per_sample + np.arange(self._per_sample)).reshape(-1)
        places = [slice(self._offsets[text], self._offsets[text + 1]) for text in texts]
        joined = [(self._ids[place].astype(np.int64), self._targets[place].copy()) for place in places]
        return padded_batch(joined, self._padding, len(indices), aligned=self._aligned)

    def _packed(self, packing: Packing, indices: Indices) -> Batch:
        """Return samples of several conversations: positions restart in each, by which attention keeps them apart.

        The first id of each has no target: it would be predicted from the conversation before. Padding is one more.
        """
        ids = np.full((len(indices), packing.capacity), self._padding, np.int64)
        targets, positions = np.full_like(ids, IGNORED), np.zeros_like(ids)
        tokens = 0
        for row, index in enumerate(indices):
            end = 0
            for piece in range(packing.bounds[index], packing.bounds[index + 1]):
                start, size = packing.starts[piece], packing.lengths[piece]
                begin, end = end, end + size
                ids[row, begin:end] = self._ids[start : start + size]
                positions[row, begin:end] = np.arange(size)
                marked = np.flatnonzero(self._targets[start + 1 : start + size]) + begin + 1
                targets[row, marked] = ids[row, marked]
            positions[row, end:] = np.arange(packing.capacity - end)
            tokens += int(end)
        inputs = {"input_ids": torch.from_numpy(ids), "position_ids": torch.from_numpy(positions)}
        return Batch(inputs, torch.from_numpy(targets), len(indices), tokens)


def _changes(counts: Mapping[str, int], longest: int) -> str:
    kinds = {
        f"longer than max_length {longest}: first turns cut": counts["cut"],
        f"longer than max_length {longest}: left out": counts["left_out"],
        "without targets: left out": counts["untargeted"],
    }
    parts = [f"{number:,} {what}" for what, number in kinds.items() if number]
    return f"of {counts['rows']:,} conversations, {'; '.join(parts)}" if parts else ""


def padded_batch(rows: list[tuple[Any, Any]], padding: int, samples: int, *, aligned: bool) -> Batch:
    """Return rows of (ids, which are targets), padded on the right; `aligned` as for `ChatSource`."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), width), padding)
    mask, targets = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for row, (values, marked) in enumerate(rows):
        joined, size = torch.as_tensor(values), len(values)
        ids[row, :size], mask[row, :size] = joined, 1
        targets[row, :size] = torch.where(torch.as_tensor(marked), joined, IGNORED)
    tokens = int(mask.sum())
    if aligned:
        return Batch({"input_ids": ids, "attention_mask": mask}, targets, samples, tokens)
    return Batch({"tokens": ids}, following(targets), samples, tokens)


def following(targets: torch.Tensor) -> torch.Tensor:
    """Return the targets [samples, length] moved to the places of the ids before them."""
    moved = torch.full_like(targets, IGNORED)
    moved[:, :-1] = targets[:, 1:]
    return moved
