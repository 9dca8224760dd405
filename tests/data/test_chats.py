"""Conversations become ids with the assistant's messages as targets, by templates in the style of several families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.failures import fails

from lockstep.config.loading import validate
from lockstep.config.schema import HuggingFaceData
from lockstep.core.errors import ConfigError
from lockstep.core.records import LANGUAGE_MODEL
from lockstep.data.rendered import RenderedSource
from lockstep.data.sources import open_source

SPECIAL = [
    *("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
]
ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
)
TEMPLATES = {
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}<G>{{ message['content'] + '<|im_end|>' }}</G>{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama-3": "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{% if message['role'] == 'assistant' %}<G>{{ message['content'] | trim + '<|eot_id|>' }}</G>"
    "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "mistral": "{{ bos_token }}{% for message in messages %}" + ALTERNATE + "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}<G>{{ ' ' + message['content'] + eos_token }}</G>{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}{% for message in messages %}" + ALTERNATE
    + "{% if message['role'] == 'assistant' %}{{ '<start_of_turn>model\n' }}"
    "<G>{{ message['content'] | trim + '<end_of_turn>' }}</G>{{ '\n' }}"
    "{% else %}{{ '<start_of_turn>user\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
}  # fmt: skip
END = {"chatml": "<|im_end|>", "llama-3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>"}
CHAT = [
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "Fine, thanks."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Tired."},
]
SYSTEM = {"role": "system", "content": "Be brief."}


def template(name: str, *, marked: bool) -> str:
    begin, end = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    return TEMPLATES[name].replace("<G>", begin).replace("</G>", end)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer of bytes, which begins texts with <s>; saved."""
    pytest.importorskip("datasets")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *alphabet])}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token=None))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(tmp_path_factory.mktemp("tokenizer"))
    return fast


class Opened:
    """Opens rows as a source, and shows samples as text with the targets in brackets."""

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        self.tokenizer = tokenizer
        self.folder = folder
        tokenizer.save_pretrained(folder / "tokenizer")

    def __call__(
        self, rows: list[dict[str, Any]], template: str, task: str = "causal-lm", **keys: Any
    ) -> RenderedSource:
        text, file = "".join(json.dumps(row) + "\n" for row in rows), self.folder / "rows.jsonl"
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        (self.folder / "template.jinja").write_text(template)
        keys = {"messages": "messages", "chat_template": str(self.folder / "template.jinja")} | keys
        keys |= {"name": str(self.folder / "rows.jsonl"), "tokenizer": str(self.folder / "tokenizer")}
        source = open_source(HuggingFaceData(kind="huggingface", **keys), task=task, tokenizer=None)
        assert isinstance(source, RenderedSource)
        return source

    def targets(self, source: RenderedSource, index: int = 0) -> list[str]:
        """Return the texts of the targets that lie together."""
        batch = source.fetch(np.array([index]))
        assert isinstance(batch.inputs, dict)
        targets, ids = batch.targets[0].tolist(), batch.inputs["input_ids"][0].tolist()
        assert all(target in (-100, token) for target, token in zip(targets, ids, strict=True))
        groups = "".join("x" if target != -100 else " " for target in targets)
        pieces, place = [], 0
        for word in groups.split():
            start = groups.index("x", place)
            place = start + len(word)
            pieces.append(self.tokenizer.decode(ids[start:place]))
        return pieces

    def text(self, source: RenderedSource, index: int = 0) -> str:
        return str(self.tokenizer.decode(source.fetch(np.array([index])).inputs["input_ids"][0].tolist()))


@pytest.fixture
def opened(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return Opened(tokenizer, tmp_path)


# --- targets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("family", TEMPLATES)
def test_the_assistant_s_messages_are_the_targets(family: str, marked: bool, opened: Opened) -> None:
    source = opened([{"messages": CHAT}], template(family, marked=marked))
    end, space = END[family], " " if family == "mistral" else ""
    assert opened.targets(source) == [f"{space}Fine, thanks.{end}", f"{space}Tired.{end}"]
    assert opened.text(source).count("<s>") == (family != "chatml"), "the tokenizer adds no second one"
    last = opened([{"messages": CHAT}], template(family, marked=marked), train_on="last")
    assert opened.targets(last) == [f"{space}Tired.{end}"]
    everything = opened([{"messages": CHAT}], template(family, marked=marked), train_on="all")
    assert opened.targets(everything) == [opened.text(source)]


def test_marked_and_unmarked_templates_give_the_same_samples(opened: Opened) -> None:
    fingerprints = {
        opened([{"messages": CHAT}], template("llama-3", marked=marked)).fingerprint for marked in (True, False)
    }
    assert len(fingerprints) == 1


def test_sharegpt_prompts_and_texts_are_conversations(opened: Opened) -> None:
    chatml = template("chatml", marked=False)
    expected = opened([{"messages": [SYSTEM, *CHAT]}], chatml).fingerprint
    roles = {"user": "human", "assistant": "gpt", "system": "system"}
    sharegpt = [{"from": roles[each["role"]], "value": each["content"]} for each in [SYSTEM, *CHAT]]
    assert opened([{"conversations": sharegpt}], chatml, messages="conversations").fingerprint == expected
    assert opened([{"messages": CHAT, "who": "Be brief."}], chatml, system_column="who").fingerprint == expected
    assert opened([{"messages": CHAT}], chatml, system="Be brief.").fingerprint == expected
    assert opened([{"messages": [SYSTEM, *CHAT]}], chatml, system="Be long.").fingerprint == expected
    parts = [{"role": each["role"], "content": [{"type": "text", "text": each["content"]}]} for each in [SYSTEM, *CHAT]]
    assert opened([{"messages": parts}], chatml).fingerprint == expected
    row = {"prompt": [SYSTEM, *CHAT[:3]], "completion": CHAT[3:]}
    completed = opened([row], chatml, messages="prompt", label="completion")
    assert opened.targets(completed) == ["Tired.<|im_end|>"]
    texts = {"prompt": "How are you?", "completion": "Fine, thanks."}
    completed = opened([texts], chatml, messages="prompt", label="completion")
    assert opened.text(completed) == opened.text(opened([{"messages": CHAT[:2]}], chatml))
    assert opened.targets(completed) == ["Fine, thanks.<|im_end|>"]


def test_tools_are_rendered_and_calls_are_targets(opened: Opened) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    chat = [CHAT[0], call, {"role": "tool", "content": "2"}, CHAT[1]]
    tools = [{"type": "function", "function": {"name": "add"}}]
    text = (
        "{{ tools | tojson }}{% for message in messages %}{{ message.role + ':' }}"
        "{% if message.tool_calls is defined %}{{ message.tool_calls[0].function | tojson }}"
        "{% else %}{{ message.content }}{% endif %}{{ '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    for given in (tools, json.dumps(tools)):
        source = opened([{"messages": chat, "tools": given}], text, tools="tools")
        assert opened.text(source).startswith('[{"type": "function", "function": {"name": "add"}}]user:')
        assert opened.targets(source) == ['{"name": "add", "arguments": {"a": 1}}</s>', "Fine, thanks.</s>"]


def test_messages_of_weight_0_are_not_targets(opened: Opened) -> None:
    for key, value in (("weight", 0), ("train", False)):
        chat = [CHAT[0], {**CHAT[1], key: value}, *CHAT[2:]]
        for marked in (True, False):
            source = opened([{"messages": chat}], template("chatml", marked=marked))
            assert opened.targets(source) == ["Tired.<|im_end|>"]
    everything = opened([{"messages": chat}], template("chatml", marked=True), train_on="all")
    assert "Fine" not in "".join(opened.targets(everything))
    with fails(ConfigError, "row 1", "0.5"):
        opened([{"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]}], template("chatml", marked=True))


def test_the_next_ids_are_the_targets_of_lockstep_s_models(opened: Opened) -> None:
    source = opened([{"messages": CHAT}], template("chatml", marked=True), task=LANGUAGE_MODEL)
    aligned = opened([{"messages": CHAT}], template("chatml", marked=True)).fetch(np.array([0]))
    batch = source.fetch(np.array([0]))
    assert batch.inputs["tokens"].tolist() == aligned.inputs["input_ids"].tolist()
    assert batch.targets[0, :-1].tolist() == aligned.targets[0, 1:].tolist()


def test_a_template_that_changes_earlier_answers_is_refused_with_the_remedy(opened: Opened) -> None:
    """As of models that think: only the last answer keeps its thoughts."""
    text = template("chatml", marked=False).replace(
        "message['content'] + '<|im_end|>' }}{{",
        "('' if loop.last else 'Short: ') + message['content'] + '<|im_end|>' }}{{",
    )
    with fails(ConfigError, "row 1", "message 2", "train_on: last", "{% generation %}"):
        opened([{"messages": CHAT}], text)
    assert opened.targets(opened([{"messages": CHAT}], text, train_on="last")) == ["Tired.<|im_end|>"]


def test_a_template_that_writes_the_date_gives_the_same_data_on_any_day(opened: Opened) -> None:
    text = "{{ strftime_now('%d %b %Y') + '\n' }}" + template("chatml", marked=True)
    assert opened.text(opened([{"messages": CHAT}], text)).startswith("26 Jul 2024\n")


# --- lengths --------------------------------------------------------------------------------------------------------


def test_whole_turns_are_cut_from_the_left_and_the_rest_is_left_out(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    text = template("chatml", marked=False)
    short, long = [SYSTEM, *CHAT[2:]], [SYSTEM, CHAT[2], {"role": "assistant", "content": "x" * 500}]
    rows = [{"messages": [SYSTEM, *CHAT, *CHAT]}, {"messages": long}, {"messages": short}, {"messages": CHAT[:1]}]
    limit = int(opened([{"messages": short}], text).lengths[0])
    source = opened(rows, text, max_length=limit)
    assert opened.text(source, 0) == opened.text(source, 1)
    assert ([*source.rows_of(0), *source.rows_of(1)], source.lengths.tolist()) == ([0, 2], [limit, limit])
    [changes] = source.changes
    assert "4 conversations, 1 " in changes
    assert changes in caplog.text
    assert opened(rows, text, max_length=limit, too_long="leave-out").rows_of(0) == [2]
    prompt = {"prompt": [*CHAT[:3]], "completion": CHAT[3:]}
    cut = opened([prompt], text, messages="prompt", label="completion", max_length=limit)
    assert opened.targets(cut) == ["Tired.<|im_end|>"]
    with fails(ConfigError, "2", "max_length 10"):
        opened([{"messages": CHAT}] * 2, text, max_length=10)


def test_data_without_targets_is_refused(opened: Opened) -> None:
    with fails(ConfigError, "1 conversations", "1 have no targets"):
        opened([{"messages": CHAT[:1]}], template("chatml", marked=True))


def test_batches_are_padded_and_rendered_once(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"messages": CHAT}, {"messages": CHAT[:2]}]
    source = opened(rows, template("chatml", marked=False))
    batch = source.fetch(np.array([1, 0]))
    first, second = source.lengths.tolist()
    assert batch.inputs["attention_mask"].sum(1).tolist() == [second, first]
    assert batch.inputs["input_ids"][0, second:].tolist() == [0] * (first - second)
    assert (batch.targets[0, second:] == -100).all()
    assert (batch.tokens, source.facts.padding, source.facts.samples) == (first + second, 0, 2)
    monkeypatch.setattr("lockstep.data.rendered._write", lambda *_: pytest.fail("rendered again"))
    assert opened(rows, template("chatml", marked=False)).fingerprint == source.fingerprint


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "values"),
    [
        ("text", ("row 2", "'text'")),
        ([], ("row 2", "[]")),
        ([{"from": "alien", "value": "x"}], ("row 2", "alien", "human")),
        ([{"role": "user"}], ("row 2", "role", "content")),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], ("row 2", "kind: custom")),
        ([CHAT[1], CHAT[0]], ("row 2", "must alternate")),
    ],
)
def test_a_row_that_is_no_conversation_is_named(messages: Any, values: tuple[str, ...], opened: Opened) -> None:
    rows = [{"messages": json.dumps(CHAT)}, {"messages": json.dumps(messages)}]
    from lockstep.data import chats

    whole = chats.messages_of
    with pytest.MonkeyPatch.context() as patch:  # the library refuses columns of mixed types by itself
        patch.setattr(chats, "messages_of", lambda value, role="": whole(json.loads(value), role))
        with fails(ConfigError, *values):
            opened(rows, template("mistral", marked=True))


def test_a_tokenizer_without_a_template_is_refused(opened: Opened) -> None:
    with fails(ConfigError, "no chat template", "chat_template"):
        opened([{"messages": CHAT}], "", chat_template=None)
    with fails(ConfigError, "nowhere.jinja"):
        opened([{"messages": CHAT}], "", chat_template="nowhere.jinja")


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ({"train_on": "last"}, ("train_on", "messages")),
        ({"messages": "messages", "text": "prompt"}, ("text", "remove")),
        ({"messages": "messages", "train_on_prompt": True}, ("train_on_prompt", "train_on: all")),
        ({"messages": "messages", "system": "x", "system_column": "y"}, ("system", "system_column")),
    ],
)
def test_keys_without_effect_are_refused(keys: dict[str, Any], values: tuple[str, ...]) -> None:
    train = {"kind": "huggingface", "name": "a.jsonl", **keys}
    with fails(ConfigError, "data.train", *values):
        validate(
            {"model": {"kind": "huggingface", "task": "causal-lm", "pretrained": "gpt2"}, "data": {"train": train}}
        )


def test_messages_are_for_language_models(opened: Opened) -> None:
    with fails(ConfigError, "messages", "seq2seq"):
        opened([{"messages": CHAT}], "", task="seq2seq", label="x")


# --- packing --------------------------------------------------------------------------------------------------------


def test_packed_conversations_are_whole_and_predict_nothing_of_each_other(opened: Opened) -> None:
    text = template("chatml", marked=False)
    rows = [{"messages": CHAT[: 2 * (1 + n % 2)]} for n in range(7)]
    alone = opened(rows, text, train_on="all")
    length = int(alone.lengths.max()) * 2
    packed = opened(rows, text, train_on="all", max_length=length, packed=True)
    assert packed.facts.samples < len(rows)
    batch = packed.fetch(np.arange(packed.facts.samples))
    ids, positions, targets = batch.inputs["input_ids"], batch.inputs["position_ids"], batch.targets
    assert ids.shape == positions.shape == targets.shape == (packed.facts.samples, length)
    assert batch.tokens == int(alone.lengths.sum())
    assert int((targets != -100).sum()) == int((alone.lengths - 1).sum())
    assert (targets[positions == 0] == -100).all()
    texts = sorted(opened.text(alone, index) for index in range(7))
    shown = "".join(opened.tokenizer.decode(row.tolist()) for row in ids).replace("<pad>", "")
    assert sorted(shown) == sorted("".join(texts))
    again = opened(rows, text, train_on="all", max_length=length, packed=True)
    assert again.fetch(np.array([0])).targets.equal(targets[:1])


def test_packed_conversations_are_for_models_that_keep_them_apart(opened: Opened) -> None:
    with fails(ConfigError, "packed"):
        opened([{"messages": CHAT}], template("chatml", marked=True), task=LANGUAGE_MODEL, packed=True)
