"""Every config loads equal after it is written as YAML."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import given, reject, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from lockstep.config import schema, shape
from lockstep.config.data_sections import CHAT_KEYS, BadSamples
from lockstep.config.loading import load
from lockstep.config.shape import Range, ValueShape
from lockstep.config.training_sections import BadNumbers, Watchdog
from lockstep.config.writing import plain_yaml, to_plain

NASTY = st.sampled_from(
    ["no", "1e5", "0x1f", "", "null", "~", " a", "a: b", "#", "'", '"', "*", "1_000", "é\n", "true"]
)
TEXT = NASTY | st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8)
FREE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def _holding(at: ValueShape) -> st.SearchStrategy[Any]:
    """Return a strategy for values that fit a shape."""
    options: list[st.SearchStrategy[Any]] = []
    if at.nullable:
        options.append(st.none())
    if at.anything:
        options.append(FREE)
    if at.boolean:
        options.append(st.booleans())
    if at.text:
        options.append(TEXT)
    if at.interval:
        options.append(st.sampled_from([100, "5 minutes", "0.5 epochs", "64k samples"]))
    if at.choices:
        options.append(st.sampled_from(at.choices))
    if at.whole:
        options.append(st.integers(*_whole_bounds(at.whole)))
    if at.real:
        options.append(_reals(at.real))
    if at.items:
        size = {"min_size": at.length, "max_size": at.length} if at.length else {"max_size": 2}
        options.append(st.lists(_holding(at.items), **size))
    if at.values:
        options.append(st.dictionaries(TEXT, _holding(at.values), max_size=2))
    return st.one_of(*options, *(_sections(section) for section in at.sections()))


def _whole_bounds(bounds: Range) -> tuple[int, int]:
    low = bounds.gt + 1 if bounds.gt is not None else bounds.ge
    high = bounds.le if bounds.le is not None else bounds.lt - 1 if bounds.lt is not None else 10**12
    assert low is not None
    return int(low), int(high)


def _reals(bounds: Range) -> st.SearchStrategy[float]:
    low = bounds.gt if bounds.gt is not None else bounds.ge
    high = bounds.le if bounds.le is not None else bounds.lt
    return st.floats(low, high, exclude_min=bounds.gt is not None, exclude_max=bounds.lt is not None).filter(
        lambda number: abs(number) < float("inf")
    )


@cache
def _sections(section: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for required keys and some others; keys that must fit each other keep their defaults."""
    fields = {key: _holding(at) for key, at in shape.fields(section).items() if (section, key) not in _COUPLED}
    required = {key: fields.pop(key) for key in shape.required(section) if key in fields}
    return st.fixed_dictionaries(required, optional=fields)


_COUPLED = {
    (schema.TransformerModel, "width"), (schema.TransformerModel, "heads"), (schema.TransformerModel, "kv_heads"),
    *((kind, key) for kind in schema.ModelSection.__subclasses__() for key in ("init_partial", "quantization")),
    (schema.Precision, "parameters"), (schema.Precision, "frozen"),
    (schema.HuggingFaceModel, "architecture"),
    *((schema.ObjectiveConfig, key) for key in schema.ObjectiveConfig.model_fields if key != "label_smoothing"),
    (schema.Optim, "nesterov"), (schema.Schedule, "warmup_ratio"), (schema.Schedule, "decay_ratio"),
    *((schema.Schedule, key) for key in ("kind", "power", "cycles", "milestones", "final_ratio", "plateau")),
    *((schema.ActivationCheckpointing, key) for key in schema.ActivationCheckpointing.model_fields if key != "mode"),
    (schema.Memory, "loss_chunk"), (schema.Launch, "nodes"), (schema.Launch, "rendezvous"),
    (schema.Checkpoint, "keep_every"), (schema.Checkpoint, "best"), (schema.Run, "end_with"),
    (schema.Run, "samples"), (schema.Run, "tokens"), (schema.Run, "epochs"), (schema.Run, "steps"),
    (schema.Recovery, "notice"), (Watchdog, "enabled"), (BadSamples, "policy"),
    (Watchdog, "end_after"), (Watchdog, "end_start_after"),
    *((schema.HuggingFaceData, key) for key in (*CHAT_KEYS, "text", "text_pair", "train_on_prompt", "packed")),
    *((schema.HuggingFaceData, key) for key in ("rejected", "desirable", "image")),
    (BadSamples, "limit"), (BadSamples, "timeout"), (BadNumbers, "rollback_steps"),
    (schema.Evaluation, "metrics"), (schema.Evaluation, "generate"),
}  # fmt: skip


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_written_config_loads_equal(data: st.DataObject) -> None:
    values = data.draw(_sections(schema.Config))
    values["run"]["steps"] = 10
    if values["model"]["kind"] == "huggingface":
        values["model"]["pretrained"] = "x"
    optim = values.get("optim", {})
    if optim.get("name") == "custom":
        optim["target"] = "kit.small:Net"
    else:
        optim.pop("target", None)
        optim.pop("arguments", None)
    if optim.get("name") in ("custom", "given"):
        for key in ("betas", "eps", "momentum", "nesterov"):
            optim.pop(key, None)
    if values.get("schedule", {}).get("kind") == "given":
        values["schedule"] = {"kind": "given"}
    values.get("monitor", {}).pop("early_stopping", None)  # names an evaluation set, whose names are drawn, too
    if "leave_out" in values["data"]:
        values["data"]["leave_out"] = [sorted(each) for each in values["data"]["leave_out"]]
    if "profile" in values:
        values["profile"] = {"steps": "10..13", "ranks": [0]}
    if "storage" in (checkpoint := values.get("checkpoint", {})):
        checkpoint.pop("folder", None)
    try:
        config = schema.Config.model_validate_json(_json(values))
    except ValidationError as error:
        if any(details["loc"] for details in error.errors()):
            raise
        reject()  # two sections contradict each other
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.yaml")
        path.write_text(plain_yaml(to_plain(config)), encoding="utf-8")
        assert load([path], environ={}).config == config


def _json(value: object) -> str:
    return json.dumps(value).replace("Infinity", "1e999")
