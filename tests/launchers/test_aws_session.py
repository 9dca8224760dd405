"""Sessions of boto3 share what describes the services, and nothing else."""

from __future__ import annotations

import pytest
from botocore.loaders import JSONFileLoader
from kit import s3

from lockstep.launchers.aws_calls import new_session


def test_clients_share_what_describes_the_services_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    first = new_session()
    of_first = first.client("s3")
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda self, path: pytest.fail(f"reads {path}"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    second = new_session()
    of_second = second.client("s3")
    assert (first.get_credentials().access_key, of_first.meta.region_name) == (s3.KEY_ID, "us-east-1")
    assert (second.get_credentials().access_key, of_second.meta.region_name) == ("another", "eu-west-1")
    assert new_session(region="us-west-2").client("s3").meta.region_name == "us-west-2"
