"""Strict checks of Kubernetes manifests against the real schemas: misspelt keys, wrong types, wrong enum values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

import kubernetes_validate

kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)  # 2 MB, read each time

VERSIONS = ("1.31", "1.37")  # of Kubernetes: from when podFailurePolicy was stable, to the newest one known here
_MODELS = {
    "TrainJob": ("trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob", "trainer.kubeflow.org/v1alpha1"),
}
_JOB_SPEC = ("io_k8s_api_batch_v1_job_spec", "IoK8sApiBatchV1JobSpec")


def problem_of(manifest: Mapping[str, Any], version: str = VERSIONS[-1]) -> str:
    """Return why the API server would refuse a manifest; empty: it wouldn't.

    The JSON schemas know keys and types, but no enum values; the models know all three, but drop unknown keys.
    """
    kind = str(manifest["kind"])
    if kind not in _MODELS:
        return _native_problem(manifest, version)
    module, name, api = _MODELS[kind]
    if manifest.get("apiVersion") != api:
        return f"apiVersion: {manifest.get('apiVersion')!r}"
    return _model_problem(manifest, module, name)


def _model_problem(given: Mapping[str, Any], module: str, name: str) -> str:
    model = getattr(import_module(f"kubeflow_trainer_api.models.{module}"), name)
    try:
        parsed = model.from_dict(given).to_dict()
    except (ValueError, TypeError, AttributeError) as error:
        return str(error)
    return _difference(given, parsed)


def _native_problem(manifest: Mapping[str, Any], version: str) -> str:
    try:
        kubernetes_validate.validate(dict(manifest), version, strict=True)
    except kubernetes_validate.SchemaNotFoundError as error:
        return str(error.message)
    except (TypeError, AttributeError) as error:  # apiVersion or kind is no text
        return str(error)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    return _model_problem(manifest["spec"], *_JOB_SPEC) if manifest["kind"] == "Job" else ""


def _difference(given: Any, parsed: Any, path: str = "") -> str:
    """Return the first place at which a model has dropped or changed what was given."""
    if isinstance(given, dict) and isinstance(parsed, dict):
        for key in given.keys() | parsed.keys():
            if key not in parsed or key not in given:
                return f"{path}.{key}: unknown key"
            if text := _difference(given[key], parsed[key], f"{path}.{key}"):
                return text
        return ""
    if isinstance(given, list) and isinstance(parsed, list) and len(given) == len(parsed):
        numbered = enumerate(zip(given, parsed, strict=True))
        return next(filter(None, (_difference(a, b, f"{path}[{n}]") for n, (a, b) in numbered)), "")
    return "" if given == parsed and type(given) is type(parsed) else f"{path}: {given!r} became {parsed!r}"
