"""Counts the operations of a run's model, which a run on a CPU doesn't: it would start a second later."""

from __future__ import annotations

from pathlib import Path


def operations_of_run(run: Path) -> float:
    """Return the operations of forward and backward per token, or per sample, of a model as the run's config has it.

    Raises:
        ConfigError: The config can't be used here: objects were handed over in Python, or another user's code is named.
        Exception: Whatever the model's forward raises.
    """
    from lockstep.config.loading import load
    from lockstep.config.trust import approved
    from lockstep.core.errors import ConfigError
    from lockstep.core.terminal import muted_stderr
    from lockstep.models.build import sketch_model
    from lockstep.monitor.folder import CONFIG
    from lockstep.training.flops import flops_of_first_samples
    from lockstep.training.sources import make_objective, open_sources, users_model
    from lockstep.training.user_objects import UserObjects, given_keys

    loaded = load([run / CONFIG], of_runs=[run / CONFIG])
    config = approved(loaded, trusted=False)
    needed = ("model.", "objective.", "data.train.")
    if given := [each.key for each in given_keys(config) if each.key.startswith(needed)]:
        raise ConfigError(f"{given[0]} of its config was handed over in Python")
    config = config.model_copy(update={"data": config.data.model_copy(update={"evaluation": {}})})
    objects = UserObjects()
    with muted_stderr():
        own = users_model(config, objects)
        sources = open_sources(config, objects, own)
        model = own or sketch_model(config.model, sources[0].facts)
        _, source, _ = make_objective(config, sources, objects, model)
        return flops_of_first_samples(model, source)
