"""Tensor plans: which modules of a model are sharded over a tensor group, and their styles.

The plan is Lockstep's (`models.transformer`), the one that a Hugging Face config carries, or a user's. It is checked
here by names and shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lockstep.config.schema import TensorParallelOptions
from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError, Problem
from lockstep.plan.refusals import nearest_divisors
from lockstep.transforms.tensor_experts import number_of_experts

KEY = "parallel.tensor_parallel"
STYLES = (
    "colwise", "colwise_gather_output", "colwise_logits", "rowwise", "rowwise_split_input", "rowwise_sequence",
    "shared_input", "sequence", "gather_sequence", "experts", "sum_gradient",
)  # fmt: skip
"""The styles of a plan; `docs/tensor.md` says what each divides."""
_SHARDS_MATRIX = ("colwise", "rowwise")  # the prefixes of styles that shard a matrix
_SAME_AS = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "embedding_rowwise": "rowwise",
    "replicated_with_grad_allreduce": "sum_gradient",
    "moe_tp_experts": "experts",
}
"""Styles of the transformers library under other names."""

_ATTENTION = re.compile(r"attn|attention")


def tensor_plan(
    model: nn.Module, options: TensorParallelOptions, degree: int, builtin: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the style of each module that has one, in the model's order.

    Args:
        model: Whole, before any of it is sharded.
        builtin: The plan of one of Lockstep's models, by patterns.

    Raises:
        ConfigError: There is no plan for this model, the plan has unknown styles, or matrices don't divide evenly.
    """
    if not isinstance(options.plan, str):
        plan = _resolved(model, {pattern: _known(style, pattern) for pattern, style in options.plan.items()})
        _refuse_other_modules(model, plan)
        _refuse_half_sequences(options, plan)
    else:
        plan = _resolved(model, builtin if builtin is not None else _huggingface(model, options))
        _refuse_other_modules(model, plan)
    _add_tied(model, plan)
    if options.loss_parallel:
        _shard_logits(model, plan)
    why = next(_indivisible(model, plan, degree), None)
    if why is not None:
        raise ConfigError(Problem("", "parallel.tensor", why))
    return plan


def _known(style: str, pattern: str) -> str:
    name = _SAME_AS.get(style, style)
    if name in STYLES:
        return name
    near = closest_match(style, STYLES)
    meant = f"did you mean {near}?" if near else f"there are {', '.join(STYLES)}"
    raise ConfigError(Problem("", f"{KEY}.plan", f"{pattern}: there is no style {style!r}; {meant}"))


def _huggingface(model: nn.Module, options: TensorParallelOptions) -> dict[str, str]:
    inner: Any = getattr(model, "base_model", None)
    carried = dict(getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {})
    if inner is None or not carried:
        name = type(model).__name__
        why = (
            f"auto, but a {name} carries no plan: Llama, Qwen2, Qwen3, Mistral, Gemma, OLMo and other decoders of the "
            f"transformers library do, and so does Lockstep's transformer (not GPT-2, T5 or BERT). Name its modules: "
            f"{{'layers.*.query': colwise, 'layers.*.out': rowwise}}; or use fsdp, which shards any model"
        )
        raise ConfigError(Problem("", f"{KEY}.plan", why))
    if options.sequence_parallel:
        why = "true, but the plans of the transformers library don't name where to shard a sequence; leave it out"
        raise ConfigError(Problem("", f"{KEY}.sequence_parallel", why))
    prefix = next((f"{name}." for name, child in model.named_modules() if child is inner and name), "")
    plan = {f"{prefix}{name}": style for name, style in carried.items()}
    plan |= dict(getattr(type(model), "_tp_plan", None) or {})
    experts = tuple(f"{name}." for name, style in plan.items() if style == "moe_tp_experts")
    plan = {name: style for name, style in plan.items() if not name.startswith(experts)}  # experts stay whole
    unknown = {style for style in plan.values() if _SAME_AS.get(style, style) not in STYLES}
    if unknown:
        where = next(name for name, style in plan.items() if style in unknown)
        why = (
            f"auto, and the plan of a {type(model).__name__} asks for {', '.join(sorted(unknown))} ({where}), which "
            f"isn't supported yet; use fsdp, or write a plan of {', '.join(STYLES)}"
        )
        raise ConfigError(Problem("", f"{KEY}.plan", why))
    names = [name for name, _ in model.named_modules()]
    # if layers are of several kinds, the plan names the modules of all
    matching = {name: style for name, style in plan.items() if any(fnmatchcase(module, name) for module in names)}
    return {name: _SAME_AS.get(style, style) for name, style in matching.items()}


def _resolved(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, str]:
    plan: dict[str, str] = {}
    names = [name for name, _ in model.named_modules() if name]
    for pattern, style in patterns.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            generic = dict.fromkeys(re.sub(r"\.\d+", ".*", name) for name in names)
            near = closest_match(pattern, generic)
            meant = f"did you mean {near}?" if near else f"there are {', '.join(list(generic)[:8])}"
            raise ConfigError(Problem("", f"{KEY}.plan", f"no module of the model is called {pattern}; {meant}"))
        plan |= dict.fromkeys(matching, style)
    return {name: plan[name] for name in names if name in plan}


def _refuse_other_modules(model: nn.Module, plan: Mapping[str, str]) -> None:
    for name, style in plan.items():
        module = model.get_submodule(name)
        kind = type(module).__name__
        if style.startswith(_SHARDS_MATRIX) and not isinstance(module, nn.Linear | nn.Embedding):
            why = f"{name}: {style} is for Linear and Embedding modules, not for a {kind}{_inside(module)}"
            raise ConfigError(Problem("", f"{KEY}.plan", why))
        if style == "sequence" and any("." in own for own, _ in module.named_parameters()):
            why = f"{name}: sequence is for a module with weights of its own, such as a norm, not for a {kind}"
            raise ConfigError(Problem("", f"{KEY}.plan", f"{why}{_inside(module)}"))
    if not any(style.startswith(_SHARDS_MATRIX) or style == "experts" for style in plan.values()):
        why = "it divides no matrix; name some, as in {'layers.*.up': colwise, 'layers.*.down': rowwise}, or leave "
        raise ConfigError(Problem("", f"{KEY}.plan", f"{why}parallel.tensor out"))


def _inside(module: nn.Module) -> str:
    names = [name for name, child in module.named_modules() if name and any(True for _ in child.parameters(False))]
    return f"; in it are {', '.join(names[:4])}" if names else ""


def _refuse_half_sequences(options: TensorParallelOptions, plan: Mapping[str, str]) -> None:
    first = next((f"{name}: {style}" for name, style in plan.items() if "sequence" in style), None)
    key = f"{KEY}.sequence_parallel"
    if options.sequence_parallel and first is None:
        why = "true, but no style of the plan divides a sequence (sequence, rowwise_sequence, gather_sequence)"
        raise ConfigError(Problem("", key, f"{why}; write false"))
    if first is not None and not options.sequence_parallel:
        raise ConfigError(Problem("", key, f"false, but the plan divides sequences ({first}); write true"))


def _add_tied(model: nn.Module, plan: dict[str, str]) -> None:
    """Add tables and heads that share weights with a sharded module: they are sharded together."""
    sharded = {id(model.get_submodule(name).weight) for name, style in plan.items() if style.startswith(_SHARDS_MATRIX)}
    for name, module in model.named_modules(remove_duplicate=False):
        if name not in plan and isinstance(module, nn.Linear | nn.Embedding) and id(module.weight) in sharded:
            plan[name] = "rowwise" if isinstance(module, nn.Embedding) else "colwise_gather_output"


def _shard_logits(model: nn.Module, plan: dict[str, str]) -> None:
    last = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))][-1]
    if plan.get(last) != "colwise_gather_output":
        why = f"true, but it takes a plan with colwise_gather_output for the last module, {last}; write false"
        raise ConfigError(Problem("", f"{KEY}.loss_parallel", why))
    plan[last] = "colwise_logits"


def _indivisible(model: nn.Module, plan: Mapping[str, str], degree: int) -> Iterator[str]:
    for name, size in _heads(model, plan):
        if size % degree:
            yield f"{degree} doesn't divide the {size} {name}; take {nearest_divisors(size, degree)}"
    for name, style in plan.items():
        module = model.get_submodule(name)
        if style == "experts":
            number = number_of_experts(module)
            if number is None:
                yield f"{name} (experts) doesn't hold all of its experts in tensors [experts, ...]; leave it whole"
            elif number % degree:
                yield f"{degree} doesn't divide the {number} experts; take {nearest_divisors(number, degree)}"
            continue
        if not isinstance(module, nn.Linear) or style not in ("colwise", "rowwise", "rowwise_sequence"):
            continue  # other outputs may be uneven
        size = module.out_features if style == "colwise" else module.in_features
        if size % degree:
            nearest = nearest_divisors(size, degree)
            yield f"{degree} doesn't divide the {size} columns of {name} ({style}); take {nearest}"


def _heads(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the numbers of heads of a transformers model; each rank needs whole ones.

    The run's plan checks Lockstep's own models.
    """
    if not any(style == "colwise" and _ATTENTION.search(name) for name, style in plan.items()):
        return  # its heads are gathered before attention
    config = getattr(model, "config", None)
    for key, name in (("num_attention_heads", "heads"), ("num_key_value_heads", "key-value heads")):
        size = getattr(config, key, None)
        if isinstance(size, int):
            yield name, size
