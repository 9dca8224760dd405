"""The sections `objective` and `optim`, which select what Lockstep has, code of the user's, or an object."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lockstep.strategies.section import Fraction, PathText, Section


def _settle_target(section: ObjectiveConfig | Optim, selector: str) -> None:
    """Let `target` select `custom` where nothing else is selected. Raise ValueError if they contradict each other."""
    if section.target is not None and selector not in section.model_fields_set:
        object.__setattr__(section, selector, "custom")  # the section is frozen, and not yet anyone's
    selected = getattr(section, selector)
    if selected == "custom" and section.target is None:
        raise ValueError(f"{selector} custom needs `target`: module:Name or path/to/file.py:Name")
    if selected != "custom" and section.target is not None:
        raise ValueError(
            f"{selector} is {selected}, and `target` names code of your own; write {selector}: custom, or drop target"
        )


def _refuse_unused(section: ObjectiveConfig | Optim, selector: str, keys: Iterable[str], remedy: str) -> None:
    """Raise ValueError if the section selects the user's code, and sets keys of Lockstep's alone."""
    selected = getattr(section, selector)
    if selected in ("custom", "given") and (
        unused := [key for key in keys if getattr(section, key) != type(section).model_fields[key].default]
    ):
        raise ValueError(f"{' and '.join(unused)} without effect: {selector} is {selected}; {remedy}")


class ObjectiveConfig(Section):
    """The objective of the training."""

    kind: Literal["auto", "next-token", "masked-lm", "classification", "seq2seq", "custom", "given"] = "auto"
    """`auto`: that of the model; `given`: an object passed in Python."""
    label_smoothing: Fraction = 0.0
    """Fraction of a target's probability that is spread evenly over all classes or tokens; 0: none."""
    target: PathText | None = None
    """Code of `custom`: `package.module:Name`, `path/to/file.py:Name` or the registered name of a class with `count`
    and `loss_sum`; or a loss of torch, such as `CrossEntropyLoss`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for `target`."""

    @model_validator(mode="after")
    def _target_if_custom(self) -> ObjectiveConfig:
        _settle_target(self, "kind")
        _refuse_unused(self, "kind", ["label_smoothing"], "smooth in your objective")
        return self


class ParameterRule(Section):
    """Settings for the parameters that match; the first rule that matches a parameter wins."""

    match: tuple[str, ...]
    """Patterns of parameter names, such as `*.bias` or `head.*`."""
    lr_scale: Annotated[float, Field(ge=0)] = 1.0
    """Factor on the learning rate of these parameters; 0: they keep their values."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Null: that of all parameters."""


_OPTIONS = ("betas", "eps", "momentum", "nesterov")
OPTIONS_OF_NAMED = ("target", "arguments", *_OPTIONS)
"""Keys of `optim` that describe one optimizer, selected by its name."""


class Optim(Section):
    """The optimizer and its settings."""

    name: Literal["adamw", "adam", "sgd", "muon", "adafactor", "lion", "custom", "given"] = "adamw"
    """The optimizer. `muon` updates matrices, and all other parameters by AdamW; `custom`: that of `target`, which
    implies it; `given`: one passed in Python."""
    target: PathText | None = None
    """Code of `custom`: `package.module:Name`, `path/to/file.py:Name` or the registered name of a torch optimizer,
    which is called with parameter groups."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for `target`."""
    lr: Annotated[float, Field(ge=0)] = 1e-3
    """Peak learning rate; the schedule scales it."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of the moments' running means: for adam, adamw and lion, and for muon's AdamW."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator: for adam and adamw, and for muon's AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Weight decay of the parameters that `decay` selects; decoupled, but with adam and sgd part of the gradient."""
    momentum: Fraction = 0.9
    """Momentum of sgd and muon."""
    nesterov: bool = False
    """Nesterov's momentum, for sgd; muon always uses it."""
    decay: Literal["matrices", "all"] = "matrices"
    """Parameters with weight decay: those of two or more dims (no biases, no norms), or all."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Scale the gradient down to this global 2-norm; null: never."""
    rules: tuple[ParameterRule, ...] = ()
    """Other settings for some parameters; the first rule that matches a parameter wins."""
    in_backward: bool = False
    """Update each parameter as soon as the backward has its gradient, and free the gradient to save memory. For
    `single`, without clipping, fp16 and accumulation. No update can be discarded: a gradient that isn't finite ends the
    run."""

    @model_validator(mode="after")
    def _options_fit_the_optimizer(self) -> Optim:
        _settle_target(self, "name")
        _refuse_unused(self, "name", _OPTIONS, "pass it to your optimizer")
        if self.in_backward and self.clip_norm is not None:
            raise ValueError(
                f"in_backward applies gradients before the norm of all is known, and clip_norm {self.clip_norm:g} "
                "needs it; write clip_norm: null, or in_backward: false"
            )
        if self.nesterov and self.name == "sgd" and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0; the usual one is 0.9")
        if self.nesterov and self.name != "sgd":
            raise ValueError(f"nesterov is an option of sgd; {self.name} would ignore it")
        return self
