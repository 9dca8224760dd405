"""Training and evaluation data, in the form that a run's model and objective need.

config, objects --> task of the model --> sources --> labels: aligned with the inputs, or the next tokens
                                                  --> decoder inputs, labels for the model's own loss
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.assembly.checked_objective import CheckedObjective
from lockstep.assembly.user_objects import UserObjects, not_given
from lockstep.config.training_sections import PAIRS
from lockstep.core.errors import ConfigError, OutOfMemory, Problem
from lockstep.core.hub import at_revision
from lockstep.core.modes import in_training
from lockstep.core.out_of_memory import error_location, out_of_memory_cause
from lockstep.core.protocols import EvaluatedObjective, Source
from lockstep.core.records import LANGUAGE_MODEL, DataFacts
from lockstep.core.tasks import TASKS, task_of_class
from lockstep.data.custom import ItemReading, adapt_dataset
from lockstep.data.loader import first_batch
from lockstep.data.sources import PreparedSource, ReferencedSource, open_source, renamed_inputs, skipping
from lockstep.loop.bad_updates import refuse_large_window
from lockstep.loop.evaluate import evaluation_named
from lockstep.models.adapters import with_adapter
from lockstep.models.build import build_model, sketch_model
from lockstep.models.building_objectives import adapt_objective, build_objective, objective_kind, repeats_inputs
from lockstep.models.heads import Head, head_of, preparation, taking_targets
from lockstep.models.initialization import generators_keyed
from lockstep.models.objectives import OF_USERS_MODEL, ModelLoss
from lockstep.models.parameters import freeze
from lockstep.models.weight_matching import match_initial_weights
from lockstep.monitor import metric_log

if TYPE_CHECKING:
    from lockstep.config.schema import Config, DataSource
    from lockstep.core.records import Batch

Sources = tuple[Source, dict[str, Source]]

_ALIGNMENT_SAMPLES = 4  # enough to determine how labels are aligned
_USERS_DATA = ("custom", "given")
_NOTHING = DataFacts(0, None)
_OWN_STEP = (
    "{}'s training_step and configure_optimizers aren't called: pass the loss that it computes (objective=...) and its "
    "optimizer (optim.* or optimizer=...); the model is called by its forward"
)
_EVALUATION = ItemReading(evaluates=True)
_OF_TOKENS = ("next-token", "distill", "kto", *PAIRS)
"""Objectives with targets that may be aligned with the input tokens."""


def users_model(config: Config, given: UserObjects) -> nn.Module | None:
    """Return the user's module, which doesn't depend on the data; None if the config describes another one."""
    if config.model.kind == "custom":
        return build_model(config.model, _NOTHING, config.run.seed)
    if config.model.kind != "given":
        return None
    model = given.model
    if not isinstance(model, nn.Module) and callable(model):
        with generators_keyed(config.run.seed, "construction"):  # as for a config's model.target
            model = model()
    if not isinstance(model, nn.Module):
        raise not_given("model", "a torch.nn.Module, or a function that makes one", given.model)
    settings: Any = getattr(model, "config", None)
    if getattr(settings, "use_cache", False):  # of transformers: a forward of training would copy all keys and values
        settings.use_cache = False
    model = with_adapter(model, config.model, config.run.seed)
    freeze(model, config.model.freeze)
    return in_training(model)


def make_model(config: Config, facts: DataFacts, given: UserObjects) -> nn.Module:
    """Return the model on the CPU, in fp32, with its initial weights."""
    model = users_model(config, given)
    if model is None:
        model = build_model(config.model, facts, config.run.seed, trust_remote_code=given.trust_remote_code)
    if (weights := match_initial_weights(model, config.model)) is not None:
        weights.put(model)
    return model


def open_sources(config: Config, given: UserObjects, model: nn.Module | None = None) -> Sources:
    """Return the training source and the evaluation sources by name.

    Args:
        model: the user's, if any: the data may need its inputs' names.
    """
    task, tokenizer = task_of(config, model)
    bad_samples, ranges = config.data.bad_samples, config.data.leave_out
    reading = ItemReading(bad_samples, lambda index: any(first <= index <= last for first, last in ranges))
    opening = partial(open_source, task=task, tokenizer=tokenizer)
    names = _class_names(config, model)
    train = _open(
        config.data.train, given, given.train_dataset, "data.train", partial(opening, class_names=names), reading
    )
    opening = partial(opening, class_names=names or train.facts.class_names)
    numbers = config.recovery.bad_numbers
    refuse_large_window(numbers, config.batch.global_size)
    train = skipping(_referenced(config, train), bad_samples, config.data.leave_out, later=numbers.rolls_back)
    evaluation = {
        name: _referenced(config, _open_evaluation(name, section, given, opening))
        for name, section in config.data.evaluation.items()
    }
    if not config.model.inputs:
        return train, evaluation
    return prepared((train, evaluation), partial(renamed_inputs, config.model.inputs))


def _referenced(config: Config, source: Source) -> Source:
    if not config.objective.precompute:
        return source
    if source.draws:
        why = "keeps two numbers of each sample, and these samples may differ in each epoch; leave it out"
        raise ConfigError(Problem("", "objective.precompute", why))
    return ReferencedSource(source, rows=2)


def prepared(sources: Sources, prepare: Callable[[Batch], Batch]) -> Sources:
    """Return sources with batches passed through a function."""
    train, evaluation = sources
    return PreparedSource(train, prepare), {name: PreparedSource(each, prepare) for name, each in evaluation.items()}


def facts_of_data(config: Config, given: UserObjects) -> DataFacts:
    """Return the facts of the training data that the model needs; a user's data isn't opened, and has none."""
    if config.data.train.kind in _USERS_DATA:
        return _NOTHING
    return open_sources(config.with_values(data={"evaluation": {}}), given)[0].facts


def make_objective(
    config: Config, sources: Sources, given: UserObjects, model: nn.Module
) -> tuple[EvaluatedObjective, Source, dict[str, Source]]:
    """Return the objective of the run, and the sources in the form that it and the model need.

    Raises:
        ConfigError: it doesn't fit the model, or evaluation data is aligned differently from training data.
    """
    train, evaluation = sources
    head = head_of(model)
    if head is None and config.objective.kind == "auto" and config.model.kind in _USERS_DATA:
        if callable(getattr(model, "training_step", None)):
            raise ConfigError(Problem("", "objective", _OWN_STEP.format(type(model).__name__)))
        taking = taking_targets(model)
        if taking is not None:  # as in nanoGPT: forward(idx, targets=None) -> (logits, loss)
            loss = ModelLoss(OF_USERS_MODEL, shift=False, summed=False, decomposes=False)
            return loss, *prepared(sources, taking)
    of_user = "objective.target" if config.objective.kind == "custom" else None
    key = of_user if given.objective is None else "objective"
    aligned = False
    if key is None and objective_kind(config.objective, config.model, train.facts, head) in _OF_TOKENS:
        aligned = _aligned(config.data.train, train, head)
        for name, source in evaluation.items():
            with evaluation_named(name):
                alike = _aligned(config.data.evaluation[name], source, head) is aligned
            if not alike:
                why = "its targets and data.train's aren't shifted alike against the inputs; make them alike"
                raise ConfigError(Problem("", f"data.evaluation.{name}", why))
    objective = _objective(config, train.facts, given, head, aligned=aligned)
    if key is not None:
        objective = CheckedObjective.of(objective, model, key)
    prepare = preparation(head, with_labels=isinstance(objective, ModelLoss)) if head is not None else None
    return objective, *(sources if prepare is None else prepared(sources, prepare))


def _objective(
    config: Config, facts: DataFacts, given: UserObjects, head: Head | None, *, aligned: bool
) -> EvaluatedObjective:
    if given.objective is None and config.objective.kind == "given":
        raise not_given("objective", "an object with `count` and `loss_sum`", None)
    if given.objective is not None:
        return adapt_objective(given.objective)
    return build_objective(config.objective, config.model, facts, head, aligned=aligned, log=metric_log.mean)


def task_of(config: Config, model: nn.Module | None) -> tuple[str | None, str | None]:
    """Return the task of the data, and the place of a transformers model's tokenizer."""
    if config.model.kind == "huggingface":
        return config.model.task, at_revision(config.model.pretrained, config.model.revision)
    if config.model.kind == "transformer":
        return LANGUAGE_MODEL, None
    if all(section.kind in _USERS_DATA for section in (config.data.train, *config.data.evaluation.values())):
        return None, None
    if model is None and config.model.kind == "custom":
        model = sketch_model(config.model, _NOTHING)
    head = head_of(model)
    if head is None:
        return LANGUAGE_MODEL if config.objective.kind in _OF_TOKENS else None, None
    return task_of_class(type(head.model).__name__, head.labels), getattr(head.config, "name_or_path", None) or None


def _class_names(config: Config, model: nn.Module | None) -> Sequence[str]:
    """Return the names of a model's classes by number; none if it has none, or its default ones."""
    if config.model.kind == "huggingface":
        return config.model.class_names
    head = head_of(model)
    if head is None or not TASKS[task_of_class(type(head.model).__name__, head.labels)].classifies:
        return ()
    names = [head.config.id2label[number] for number in range(head.config.num_labels)]
    return () if names == [f"LABEL_{number}" for number in range(len(names))] else names


def _open(
    section: DataSource,
    given: UserObjects,
    dataset: Any,
    key: str,
    opening: Callable[..., Source],
    reading: ItemReading = _EVALUATION,
) -> Source:
    if section.kind != "given":
        return opening(section, reading=reading)
    if dataset is None:
        raise not_given(key, "a map-style Dataset", dataset)
    return adapt_dataset(dataset, given.collate, reading)


def _open_evaluation(name: str, section: DataSource, given: UserObjects, opening: Callable[..., Source]) -> Source:
    key = f"data.evaluation.{name}"
    try:
        with evaluation_named(name):
            source = _open(section, given, given.eval_datasets.get(name), key, opening)
    except Exception as error:  # no smaller micro-batch helps: it was read sample by sample
        if out_of_memory_cause(error) is None:
            raise
        where = error_location(error) or "while it was opened"
        why = f"{key}: out of memory {where}: {error}. Make its samples smaller, or leave them out of the set"
        raise OutOfMemory(why) from error
    if source.facts.samples < 1:  # found before training
        raise ConfigError(Problem("", key, "the dataset is empty; mend it, or remove the set"))
    return source


def _aligned(section: DataSource, source: Source, head: Head | None) -> bool:
    """Return whether the targets of a language model are aligned with its inputs, so that the objective shifts them."""
    if section.kind not in _USERS_DATA:
        return head is not None  # as the sources have it, for models of the transformers library
    if head is not None:
        return head.shifts
    return repeats_inputs(first_batch(source, _ALIGNMENT_SAMPLES))
