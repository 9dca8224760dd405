"""The first files that `lockstep init` writes, from `templates/` and this project's files for Docker."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CONFIG = "run.yaml"
_TEMPLATES = Path(__file__).with_name("templates")
_PACKAGE = Path(__file__).parents[1]
_COLUMNS = {
    "texts": """\
    text: {text}            # the column with the text
    packed: true            # texts are joined and cut into full samples; whole: none sees another; false: padded
    max_length: 128         # tokens per sample
""",
    "prompts": """\
    text: {text}            # the column with the prompt
    label: {label}          # the column with its completion, which is trained on
    rejected: {rejected}    # the column with the other answer, which is worse
    desirable: {desirable}  # the column with true for a desirable answer
    max_length: 512         # tokens per sample; a longer prompt loses its beginning
""",
    "messages": """\
    messages: {messages}    # the column with conversations; lockstep data show run.yaml shows what is trained on
    label: {label}          # the column with the messages that complete them
    rejected: {rejected}    # the column with the other answer, which is worse
    desirable: {desirable}  # the column with true for a desirable answer
    tools: {tools}          # the column with the tools
    train_on: assistant     # the assistant's messages; last: the last of them; all: every token
    max_length: 1024        # tokens per sample; a longer conversation loses its first turns
""",
}
_OBJECTIVES = {
    "rejected": "objective: {kind: dpo, beta: 0.1}  # or ipo, orpo, simpo\n\n",
    "desirable": "objective: {kind: kto, beta: 0.1}\n\n",
}
_YAML_CONSTANTS = ("null", "true", "false", "yes", "no", "on", "off")


@dataclass(frozen=True, slots=True)
class InitTemplate:
    """A template of a first config.

    Attributes:
        summary: What is trained.
        template: The config's file, with `{model}` and `{data}`; empty: no config.
        model, data: The defaults; None: the template has no such thing.
        prepare: Commands to run first.
        further: Further files to write.
    """

    summary: str
    template: str
    model: str | None = None
    data: str | None = None
    prepare: tuple[str, ...] = ()
    further: tuple[str, ...] = ()

    @property
    def files(self) -> dict[str, str]:
        """The texts of further files by name."""
        return {name: _file(name).read_text(encoding="utf-8") for name in self.further}

    def filled_config(self, model: str | None, data: str | None, columns: Mapping[str, str]) -> str:
        """Return the config with the user's names and columns, by the keys of data, or the template's own."""
        filled = (_TEMPLATES / self.template).read_text(encoding="utf-8")
        kind = "messages" if "messages" in columns else "prompts" if columns.keys() >= {"text", "label"} else "texts"
        lines, optional = _COLUMNS[kind].splitlines(keepends=True), {"tools", "label", "rejected", "desirable"}
        given = [line for line in lines if line.split(":")[0].strip() not in optional - columns.keys()]
        rated = next((text for key, text in _OBJECTIVES.items() if key in columns), "")
        filled = filled.replace("{objective}", rated).replace("{rate}", "1e-6" if rated else "2e-5")
        filled = filled.replace("{columns}", "".join(given))
        names: dict[str, str | None] = {"text": "text", "label": "label", **columns}
        names |= {"model": model or self.model, "data": data or self.data}
        for place, name in names.items():
            filled = filled.replace(f"{{{place}}}", _yaml_quoted(name or ""))
        return filled

    def filled_commands(self, data: str | None) -> list[str]:
        """Return the commands to run before training, quoted for a shell."""
        return [command.replace("{data}", shlex.quote(data or self.data or "")) for command in self.prepare]


def _file(name: str) -> Path:
    """Return a template, or a file that a wheel copies and a checkout has in its root."""
    places = (_TEMPLATES / f"{name}.txt", _PACKAGE / "docker" / name, _PACKAGE.parents[1] / name)
    return next(place for place in places if place.exists())


def _yaml_quoted(name: str) -> str:
    plain = re.fullmatch(r"[A-Za-z][\w./-]*", name) and name.lower() not in _YAML_CONSTANTS
    return name if plain else "'" + name.replace("'", "''") + "'"


STARTS: Mapping[str, InitTemplate] = {
    "text": InitTemplate(
        "pretrain a language model on your own text",
        "text.yaml",
        data="corpus.txt",
        prepare=("lockstep data prepare {data} --tokenizer bytes --output tokens",),
    ),
    "finetune": InitTemplate(
        "fine-tune a Hugging Face language model", "finetune.yaml", model="gpt2", data="texts.jsonl"
    ),
    "classifier": InitTemplate(
        "fine-tune a Hugging Face model as a classifier",
        "classifier.yaml",
        model="bert-base-uncased",
        data="train.jsonl",
    ),
    "own": InitTemplate("train a module and a Dataset of your own", "own.yaml", further=("own.py",)),
    "docker": InitTemplate(
        "write a Dockerfile and compose.yaml for a project",
        "",
        prepare=(
            "mkdir -p data runs",
            'export LOCKSTEP_JOB_TOKEN="$(openssl rand -hex 32)"',
            "docker compose up --build",
        ),
        further=("Dockerfile", "compose.yaml", ".dockerignore"),
    ),
}
