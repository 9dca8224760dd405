import pytest

from lockstep.config.schema import Config
from lockstep.core import hub
from lockstep.core.errors import ConfigError
from lockstep.data.hub import fetch


def config(data: dict, **model) -> Config:
    model = {"kind": "huggingface", "task": "causal-lm", **model}
    return Config.model_validate({"model": model, "data": {"train": data}, "run": {"steps": 1}})


def test_nothing_remote_needs_no_network(monkeypatch):
    monkeypatch.setattr(hub, "_answers", lambda endpoint: pytest.fail("asked the hub"))
    stdlib = config({"kind": "stdlib-text"}, architecture={"model_type": "gpt2"})
    assert list(fetch(stdlib)) == ["nothing to fetch: this run takes nothing from the hub"]


def test_without_a_network_fetching_fails_at_once(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.is_connected.cache_clear()
    with pytest.raises(ConfigError, match="the hub does not answer"):
        list(fetch(config({"kind": "huggingface", "name": "imdb"}, pretrained="gpt2")))
    hub.is_connected.cache_clear()
