"""The keys of a transformers config that the library understands.

    current          hidden_size                              set
    older            rope_theta, partial_rotary_factor        set the keys that the library translates them to
    no longer read   task_specific_params, n_ctx              accepted if the model is the same without them
    any other        hiden_size                               refused: the library would ignore it

Older keys are recognized by their effect.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.core.errors import Problem, refuse

_UNDECLARED = {
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "attn_implementation",
    "classifier_dropout", "hidden_dropout", "num_labels", "id2label", "problem_type",
}  # fmt: skip
"""Keys that some configs and heads use without declaring them."""

_ANY = object()
_NO_LONGER_READ: Mapping[str, object] = {
    "_name_or_path": _ANY,
    "architectures": _ANY,
    "transformers_version": _ANY,
    "task_specific_params": _ANY,
    "output_past": _ANY,
    "n_ctx": _ANY,
    "gradient_checkpointing": False,
    "position_embedding_type": "absolute",
    "pretraining_tp": 1,
}
"""Keys of older files, with the value that changes nothing."""

_OTHER_NAMES = (
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "heads"),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers"),
    ("hidden_size", "n_embd", "d_model", "dim", "width"),
    ("max_position_embeddings", "n_positions", "seq_length"),
    ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_heads"),
)
_MISSING = object()
_Path = tuple[str, ...]


def check_keys(config: Any, overrides: Mapping[str, Any]) -> None:
    """Raise ConfigError for keys that transformers would ignore.

    Args:
        config: A config of the type, without the keys of `overrides`.
    """
    known = _known(config)
    problems = []
    for name, value in overrides.items():
        if name in known or _is_needless(name, value) or _is_translated(config, name, value):
            continue
        reason = f"{config.model_type} has no such key{_hint(name, known)}"
        if name in _NO_LONGER_READ:
            reason = f"{value!r}, but transformers no longer reads this key; remove it"
        problems.append(Problem("", f"model.architecture.{name}", reason))
    refuse(problems)


def effective_keys(config: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys, checked by `check_keys`, that have an effect on the config."""
    known = _known(config)
    return {name: value for name, value in overrides.items() if name in known or not _is_needless(name, value)}


def override(config: Any, overrides: Mapping[str, Any]) -> None:
    """Change a config that was read from a file.

    An older key sets the values that the library translates it to, and nothing beside them: a rotary base leaves the
    scaling as it is.
    """
    try:
        known = _known(type(config)())  # the file may contain older keys
    except Exception:  # a class that comes with weights may need arguments
        known = _known(config)
    for name, value in effective_keys(config, overrides).items():
        paths = _changed_by(config, name, value) if name not in known or name == "rope_scaling" else []
        if not paths:
            config.update({name: value})
            continue
        fresh = type(config)(**{name: value}).to_dict()
        others = {key: old for key, old in config.to_dict().items() if key not in {path[0] for path in paths}}
        rebuilt = type(config).from_dict({**others, name: value}).to_dict()  # for values such as a list of layer types
        for path in paths:
            _put(config, path, _at(fresh if len(path) > 1 else rebuilt, path))


def _known(config: Any) -> set[str]:
    kind = type(config)
    settable = {name for name in dir(kind) if getattr(getattr(kind, name, None), "fset", None) is not None}
    declared = {name for name in (*vars(config), *config.to_dict()) if not name.startswith("_")}
    return declared | settable | set(config.attribute_map) | _UNDECLARED


def _is_needless(name: str, value: object) -> bool:
    harmless = _NO_LONGER_READ.get(name, _MISSING)
    return harmless is _ANY or harmless == value


def _is_translated(config: Any, name: str, value: object) -> bool:
    try:
        return bool(_changed_by(config, name, value))
    except Exception:  # the library reads the key, and refuses the value
        return True


def _changed_by(config: Any, name: str, value: object) -> list[_Path]:
    """Return the paths of other keys that a key changes in a config of the type.

    Other values are also tried, since this one may be the default.
    """
    before = dict(_leaves(type(config)().to_dict()))
    paths: dict[_Path, None] = {}
    for candidate in (value, *_other_values(value)):
        after = dict(_leaves(type(config)(**{name: candidate}).to_dict()))
        changed = (path for path in {**before, **after} if before.get(path, _MISSING) != after.get(path, _MISSING))
        paths |= dict.fromkeys(path for path in changed if path[0] != name)
    return list(paths)


def _other_values(value: object) -> list[object]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 2]
    return [value / 2] if isinstance(value, float) else []


def _leaves(values: Mapping[str, Any], *above: str) -> Iterator[tuple[_Path, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, *above, str(key))
        else:
            yield (*above, str(key)), value


def _at(values: Any, path: _Path) -> Any:
    for key in path:
        values = values.get(key, _MISSING) if isinstance(values, Mapping) else _MISSING
    return values


def _put(config: Any, path: _Path, value: Any) -> None:
    if value is _MISSING:
        return
    if len(path) == 1:
        setattr(config, path[0], value)
        return
    outermost = dict(getattr(config, path[0]) or {})
    inner = outermost
    for key in path[1:-1]:
        inner[key] = dict(inner.get(key) or {})
        inner = inner[key]
    inner[path[-1]] = value
    setattr(config, path[0], outermost)


def _hint(name: str, known: set[str]) -> str:
    alike = {other for names in _OTHER_NAMES if name in names for other in names if other in known}
    near = next(iter(difflib.get_close_matches(name, alike or known, n=1, cutoff=0.0 if alike else 0.6)), None)
    return f"; did you mean {near}?" if near else ""
