"""`lockstep data fetch`: what a recipe takes from Hugging Face's hub is put into the cache, on a connected machine.

The cache (HF_HOME, ~/.cache/huggingface by default) can then be copied to, or shared with, machines without a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lockstep.config.schema import Config, HuggingFaceData, HuggingFaceModel
from lockstep.core.errors import ConfigError
from lockstep.core.hub import is_connected
from lockstep.data.rows import load_rows
from lockstep.data.tokenizers import import_transformers, load_tokenizer


def fetch(config: Config) -> Iterator[str]:
    """Downloads model, tokenizers and data sets; yields what it has fetched, one line each.

    Raises:
        ConfigError: there is no network, or the hub doesn't have it.
    """
    pretrained, sections = _of_huggingface(config)
    if not names_hub(config):
        yield "nothing to fetch: this run takes nothing from the hub"
        return
    if not is_connected():
        raise ConfigError("the hub does not answer (no network, or HF_HUB_OFFLINE is set), so nothing can be fetched")
    if pretrained is not None and _is_remote(pretrained):
        _fetch_model(pretrained)
        yield f"model {pretrained}"
    for name in dict.fromkeys(section.tokenizer or pretrained for section in sections):
        if name is not None and _is_remote(name):
            load_tokenizer(name)
            yield f"tokenizer {name}"
    for section in sections:
        if _is_remote(section.name):
            rows = load_rows(section.name, section.configuration, section.split)
            yield f"data set {section.name}, split {section.split}: {len(rows):,} rows"


def names_hub(config: Config) -> bool:
    """Whether the run takes anything from the hub or its cache by name."""
    pretrained, sections = _of_huggingface(config)
    names = [pretrained, *(section.name for section in sections), *(section.tokenizer for section in sections)]
    return any(name is not None and _is_remote(name) for name in names)


def _of_huggingface(config: Config) -> tuple[str | None, list[HuggingFaceData]]:
    """The pretrained model, and the data sets of the datasets library."""
    pretrained = config.model.pretrained if isinstance(config.model, HuggingFaceModel) else None
    sections = (config.data.train, *config.data.evaluation.values())
    return pretrained, [section for section in sections if isinstance(section, HuggingFaceData)]


def _is_remote(name: str) -> bool:
    return not Path(name).expanduser().exists()


def _fetch_model(name: str) -> None:
    """Weights in safetensors where there are any, config and tokenizer files."""
    import_transformers()
    from huggingface_hub import HfApi, snapshot_download

    files = HfApi().list_repo_files(name)
    weights = "*.safetensors" if any(file.endswith(".safetensors") for file in files) else "*.bin"
    snapshot_download(name, allow_patterns=[weights, "*.json", "*.txt", "*.model"])
