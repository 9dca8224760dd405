"""Sessions of boto3 that share the descriptions of Amazon's services, which take most of the time to make a client.

Each session of its own would read 5 MB of JSON again.
"""

from __future__ import annotations

from functools import cache
from typing import Any


def new_session(profile: str | None = None, region: str | None = None) -> Any:
    """Return a boto3 session with the credentials and settings that variables and files have now.

    Args:
        profile: Profile of the AWS configuration; None: boto3's own choice.
        region: Region of its clients; None: boto3's own choice.

    Raises:
        ImportError: boto3 isn't installed.
        botocore.exceptions.ProfileNotFound: The AWS configuration doesn't have the profile.
    """
    import boto3
    import botocore.session

    core = botocore.session.Session(profile=profile)
    descriptions = _descriptions(core.get_config_variable("data_path"))
    core.register_component("data_loader", descriptions)
    session = boto3.session.Session(botocore_session=core, region_name=region)
    descriptions.search_paths[:] = dict.fromkeys(descriptions.search_paths)  # each session adds boto3's own
    return session


@cache
def _descriptions(folders: str | None) -> Any:
    """Return what reads the descriptions, and keeps them; `folders`: with more of them, as AWS_DATA_PATH has them."""
    from botocore.loaders import create_loader

    return create_loader(folders)
