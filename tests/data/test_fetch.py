"""`lockstep data fetch` downloads only what is on the hub."""

import pytest

from lockstep.config.schema import Config
from lockstep.core import hub
from lockstep.core.errors import ConfigError
from lockstep.data.hub import fetch


def config(data: dict, **model) -> Config:
    model = {"kind": "huggingface", "task": "causal-lm", **model}
    return Config.model_validate({"model": model, "data": {"train": data}, "run": {"steps": 1}})


def test_a_run_without_remote_data_makes_no_request(monkeypatch):
    monkeypatch.setattr(hub, "_answers", lambda endpoint: pytest.fail("made a request"))
    stdlib = config({"kind": "stdlib-text"}, architecture={"model_type": "gpt2"})
    assert list(fetch(stdlib)) == ["nothing to fetch: this run uses nothing from the hub"]


def test_fetching_without_a_network_fails_immediately(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.is_connected.cache_clear()
    with pytest.raises(ConfigError, match="the hub does not answer"):
        list(fetch(config({"kind": "huggingface", "name": "imdb"}, pretrained="gpt2")))
    hub.is_connected.cache_clear()
