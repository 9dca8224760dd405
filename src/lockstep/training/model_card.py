"""The model card of an exported model, README.md, and its upload to the Hugging Face hub.

run, checkpoint --> where it comes from, how to load it, data, metrics, loss, config, versions

A card ends with a hash of itself: one that somebody has changed is kept, here and on the hub.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.hashing import hash_bytes
from lockstep.config.loading import validate
from lockstep.config.writing import plain_yaml
from lockstep.core import formatting
from lockstep.core.distribution import DISTRIBUTION
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.files import write_atomically
from lockstep.core.hub import commit_of, is_connected, needs_hub, requested
from lockstep.core.tasks import TASKS
from lockstep.core.terminal import command_line
from lockstep.data.hub import huggingface_sections
from lockstep.monitor.events import sampled_losses
from lockstep.monitor.folder import METRICS

if TYPE_CHECKING:
    from lockstep.checkpoint.manifest import Manifest
    from lockstep.config.schema import Config

CARD = "README.md"
_OURS = re.compile(r"(.*)\n<!-- made by lockstep export, replaced unless changed: ([0-9a-f]{32}) -->\n", re.DOTALL)
_LOSSES = 12
_SECTIONS = {
    "model", "data", "objective", "batch", "optim", "schedule", "precision", "parallel", "evaluation", "memory",
}  # fmt: skip


@contextmanager
def card_for(folder: Path, name: str, architecture: str, manifest: Manifest, run: Path | None) -> Iterator[None]:
    """Write the card of a model once the block has replaced its folder; one that somebody has changed is kept."""
    card = folder / CARD
    own = card.read_text(encoding="utf-8") if card.is_file() else ""
    yield
    write_atomically(card, own if own and not is_made_here(own) else model_card(name, architecture, manifest, run))


def is_made_here(text: str) -> bool:
    """Return whether a card is as `lockstep export` has written it."""
    match = _OURS.fullmatch(text)
    return match is not None and hash_bytes(match[1].encode()) == match[2]


def model_card(name: str, architecture: str, manifest: Manifest, run: Path | None) -> str:
    """Return the text of a card.

    Args:
        name: What `from_pretrained` loads.
        architecture: Class of the model.
        run: The run's folder, for its losses.
    """
    config = validate(manifest.config).config
    task = TASKS.get(getattr(config.model, "task", ""))
    if architecture == "AutoPeftModel":
        architecture += task.head if task is not None and task.peft else ""
    pretrained, sections = huggingface_sections(config)
    source = [] if pretrained is None else [_source("model", pretrained, getattr(config.model, "revision", None))]
    processor = "AutoImageProcessor" if any(each.image for each in sections) else "AutoTokenizer"
    data = [_source("dataset", each.name, each.revision) for each in sections]
    trained = f"{formatting.counted(manifest.step, 'step')} ({manifest.samples:,} samples, {manifest.tokens:,} tokens)"
    parts = [
        f"---\n{_front_matter(config, architecture)}---",
        f"# {name.rpartition('/')[2]}",
        f"A {architecture}, trained with {DISTRIBUTION} for {trained}{', from ' + source[0] if source else ''}.",
        f"## Load it\n\n```python\n{_loading(name, architecture, processor)}```",
        "## Data\n\n" + ("\n".join(f"- {each}" for each in data) or f"- {config.data.train.kind}"),
    ]
    losses = [(step, loss) for step, loss in sampled_losses(run / METRICS) if step <= manifest.step] if run else []
    if losses:
        chosen = {round(number * (len(losses) - 1) / (_LOSSES - 1)) for number in range(_LOSSES)}
        rows = [(f"{losses[index][0]:,}", formatting.value(losses[index][1])) for index in sorted(chosen)]
        parts.append("## Training loss\n\n" + _table(("step", "loss"), rows))
    if manifest.metrics:
        metrics = [(key, "not finite" if x is None else formatting.value(x)) for key, x in manifest.metrics.items()]
        parts.append("## Evaluation\n\n" + _table(("metric", "value"), metrics))
    packages: Mapping[str, str] = manifest.environment.get("packages") or {}
    versions = {"python": manifest.environment.get("python", "unknown"), **packages, "ranks": manifest.ranks}
    settings = config.model_dump(mode="json", exclude_defaults=True, include=_SECTIONS)
    parts += [
        f"## Config\n\n```yaml\n{plain_yaml(_without_places(settings))}```",
        "## Versions\n\n" + _table(("what", "version"), [(key, str(value)) for key, value in versions.items()]),
    ]
    text = "\n\n".join(parts)
    return f"{text}\n<!-- made by lockstep export, replaced unless changed: {hash_bytes(text.encode())} -->\n"


def _front_matter(config: Config, architecture: str) -> str:
    pretrained, sections = huggingface_sections(config)
    values: dict[str, Any] = {"library_name": _library(architecture), "tags": ["lockstep"]}
    if config.model.kind == "huggingface":
        values["pipeline_tag"] = TASKS[config.model.task].pipeline
    if pretrained is not None and not Path(pretrained).expanduser().exists():
        values["base_model"] = pretrained
    if datasets := sorted({each.name for each in sections if each.revision is not None}):
        values["datasets"] = datasets
    return plain_yaml(values)


def _source(kind: str, name: str, revision: str | None) -> str:
    if revision is None:
        return f"the {kind} {_without_places(name)}"
    commit = commit_of(revision)
    return f"the {kind} {name} at {requested(revision)}" + (f" ({commit})" if commit != requested(revision) else "")


def _loading(name: str, architecture: str, processor: str) -> str:
    variable = "tokenizer" if processor == "AutoTokenizer" else "processor"
    return (
        f"from transformers import {processor}\nfrom {_library(architecture)} import {architecture}\n\n"
        f'model = {architecture}.from_pretrained("{name}")\n'
        f'{variable} = {processor}.from_pretrained("{name}")\n'
    )


def _library(architecture: str) -> str:
    return "peft" if architecture.startswith("AutoPeft") else "transformers"


def _table(titles: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"| {first} | {second} |" for first, second in (titles, ("---", "---"), *rows))


def _without_places(value: Any) -> Any:
    """Return a value with the last name of each absolute path: where a folder was says nothing to others."""
    if isinstance(value, dict):
        return {key: _without_places(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_places(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


# --- the hub ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HubTarget:
    """A repository of the hub to upload a model to; it is private unless `public`."""

    name: str
    public: bool = False

    def check(self, form: str) -> None:
        """Raise ConfigError for a format or name that no repository can have, or without a token to write with."""
        if form not in ("hf", "peft"):
            raise ConfigError(f"--push-to-hub uploads a folder of --format hf or peft; for {form}, use `hf upload`")
        from huggingface_hub import get_token
        from huggingface_hub.errors import HFValidationError

        try:
            _utils().validate_repo_id(self.name)
        except HFValidationError as error:
            raise ConfigError(f"--push-to-hub {self.name}: {str(error).splitlines()[0]}; write USER/NAME") from error
        if get_token() is None:
            raise ConfigError("--push-to-hub needs a token that may write: run `hf auth login`, or set HF_TOKEN")

    def upload(self, folder: Path) -> str:
        """Upload a model's folder in one commit; return its address.

        Raises:
            RunFailed: The hub doesn't answer, or refuses it.
        """
        needs_hub()
        private = [] if self.public else ["--private"]
        later = f"upload it later: {command_line('hf', 'upload', self.name, folder, *private)}"
        if not is_connected():
            raise RunFailed(f"the model is in {folder}, and the hub does not answer; {later}")
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        _utils().disable_progress_bars()
        api = HfApi()
        try:
            name = api.create_repo(self.name, private=not self.public, exist_ok=True).repo_id
            if not self.public and not api.repo_info(name).private:
                raise RunFailed(f"the model is in {folder}; {name} is public on the hub: --public uploads it there")
            kept = api.file_exists(name, CARD) and not is_made_here(Path(api.hf_hub_download(name, CARD)).read_text())
            ignored = [CARD] if kept else []
            return str(api.upload_folder(repo_id=name, folder_path=folder, ignore_patterns=ignored).commit_url)
        except (HfHubHTTPError, OSError) as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            why = str(error).strip().splitlines()[0]
            if status in (401, 403):
                why = f"the token may not write there (status {status}); take one that may, or another name"
            raise RunFailed(f"the model is in {folder}, and {self.name} was not uploaded: {why}; {later}") from error


def _utils() -> Any:
    return importlib.import_module("huggingface_hub.utils")
