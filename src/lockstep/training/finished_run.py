"""Evaluation of the weights that a run left, and text generation with them."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal

from lockstep.assembly.adapters import dequantized
from lockstep.assembly.sources import facts_of_data, make_model
from lockstep.assembly.user_objects import UserObjects
from lockstep.assembly.weights import MODEL, load_weights, to_rebuild, tokenizer_of
from lockstep.config.schema import HuggingFaceModel
from lockstep.core.closest import hint
from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.hub import needs_hub
from lockstep.core.ranks import names_a_rank
from lockstep.core.terminal import echo
from lockstep.launch.devices import choose_ranks
from lockstep.launch.local import launch
from lockstep.loop.components import Purpose
from lockstep.loop.session import components_of
from lockstep.resuming.locations import loaded_config
from lockstep.strategies.registry import AUTO, find_strategy
from lockstep.training.ahead import imports_ahead
from lockstep.training.job import opened

if TYPE_CHECKING:
    from lockstep.config.schema import Config

_TOKENIZER = "tokenizer_config.json"


def evaluate_run(
    run: Path, ranks: int | Literal["auto"] | None, *, trust_remote_code: bool, trust_run: bool
) -> tuple[int, dict[str, Any] | None]:
    """Evaluate the weights that a run left on the evaluation sets of its config; the first rank prints the metrics.

    Args:
        ranks: Processes on this machine; auto: one a GPU, or one; None: as many as the run had.

    Returns:
        The exit code, and the metrics by evaluation set in the process that has them.
    """
    config = _evaluation_config(to_rebuild(loaded_config(run), trusted=trust_run))
    if not config.data.evaluation:
        why = f"the run has no evaluation sets; add one to {run}/config.yaml, with the keys of data.train"
        raise ConfigError(Problem("", "data.evaluation", why))
    if ranks is not None:
        config = config.with_values(launch={"ranks": ranks})
    with tempfile.TemporaryDirectory(prefix="lockstep-eval-") as folder:
        file = Path(folder, "evaluation.json")
        entry = partial(_evaluate_rank, config, run, file, trust_remote_code)
        if names_a_rank(os.environ):
            code = entry()
        else:
            code = launch(entry, choose_ranks(config.launch), config.launch, None, preload=imports_ahead(config)).show()
        return code, json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def _evaluation_config(config: Config) -> Config:
    """Return the config without what an evaluation doesn't need, such as objects that were passed in Python.

    The weights that a run left are whole: nothing partitions the model, and DeepSpeed shards it only together with its
    optimizer.
    """
    name = config.parallel.strategy
    strategy = AUTO if name != AUTO and find_strategy(name).needs_optimizer else name
    degrees = {"data": "auto", "shard": "auto", "pipeline": 1, "context": 1, "tensor": 1}
    none = {"name": "sgd", "momentum": 0.0, "target": None}  # what needs no memory in the plan
    changes: dict[str, dict[str, Any]] = {"parallel": {"strategy": strategy, **degrees}, "optim": none}
    if config.schedule.kind == "given":
        changes["schedule"] = {"kind": "constant"}
    sets = config.data.evaluation
    if config.data.train.kind == "given" and sets and all(data.kind != "given" for data in sets.values()):
        changes["data"] = {"train": next(iter(sets.values()))}
    return config.with_values(**changes)


def _evaluate_rank(config: Config, run: Path, file: Path, trust_remote_code: bool) -> int:
    """Evaluate as one rank; the first prints the metrics and writes them to `file` as JSON."""
    from lockstep.monitor.events import metrics_by_set

    with opened(config, UserObjects(trust_remote_code=trust_remote_code), Purpose.EVALUATE) as session:
        load_weights(components_of(session).sharding.state.model, run)
        reports = session.evaluate()
        if components_of(session).world.rank == 0:
            for report in reports:
                metrics = "  ".join(f"{name} {value:.4f}" for name, value in report.metrics.items())
                echo(f"{report.name}: {metrics}  ({report.samples:,} samples in {report.seconds:.1f} s)")
            file.write_text(json.dumps(metrics_by_set(reports)), encoding="utf-8")
    return 0


def evaluate_by_lm_eval(
    run: Path, names: Sequence[str], limit: int | None, **trust: Any
) -> dict[str, dict[str, float]]:
    """Evaluate a run's exported model on tasks of lm-eval, names or YAML files, in this process; print its tables."""
    try:
        from lm_eval import simple_evaluate, utils
        from lm_eval.models import huggingface  # noqa: F401  it needs accelerate
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise ConfigError(f"--lm-eval needs the extra `lm-eval`: {pip_install('lm-eval')}") from error
    from torch import cuda

    from lockstep.training.exporting import ExportArguments, export

    config = to_rebuild(loaded_config(run), trusted=trust["trust_run"])
    if (kind := getattr(config.model, "task", f"of kind {config.model.kind}")) != "causal-lm":
        raise ConfigError(f"--lm-eval is for models of kind huggingface and task causal-lm; this one is {kind}")
    if (tokenizer := tokenizer_of(config.model, config.data.train)) is None:
        raise ConfigError("--lm-eval needs the run's tokenizer, and its data have none")
    tokenizer.load()  # it is there
    tasks = _lm_eval_tasks(names, manager := TaskManager())
    with tempfile.TemporaryDirectory(prefix="lockstep-eval-") as folder:
        merge = config.model.adapter is not None
        made = export(run, ExportArguments(to=Path(folder), format="hf", merge=merge, **trust))
        for name, why in made.broken.items():
            echo(f"lockstep: {name} could not be used: {why}", file=sys.stderr)
        results = simple_evaluate(
            model="hf",
            model_args={"pretrained": folder, "trust_remote_code": trust["trust_remote_code"]},
            tasks=tasks,
            task_manager=manager,
            limit=limit,
            log_samples=False,
            **({"device": "cuda", "batch_size": "auto"} if cuda.is_available() else {"device": "cpu"}),
        )
    tables = [utils.make_table(results, column) for column in ("results", "groups") if column in results]
    echo("\n".join([f"step {made.step:,}", *tables]))
    return {
        task: {key: float(value) for key, value in metrics.items() if "," in key and not isinstance(value, str)}
        for task, metrics in results["results"].items()
    }


def _lm_eval_tasks(names: Sequence[str], manager: Any) -> list[Any]:
    """Return lm-eval's tasks and groups of tasks with their data. Raises ConfigError."""
    for name in names:
        if not (Path(name).is_file() if name.endswith(".yaml") else name in manager.all_tasks):
            why = f"{name} is neither a task of lm-eval nor a YAML file{hint(name, manager.all_tasks)}"
            raise ConfigError(f"--lm-eval: {why}")
    needs_hub()
    try:
        loaded = manager.load(list(names))
    except Exception as error:  # of datasets, of evaluate, or of a task's code
        why = shorten(str(error), 300) or type(error).__name__
        raise ConfigError(f"--lm-eval: {', '.join(names)} can't be loaded: {why}") from error
    if unsafe := [name for name, task in loaded["tasks"].items() if getattr(task, "UNSAFE_CODE", False)]:
        raise ConfigError(f"--lm-eval: {unsafe[0]} would run code that the model writes, which is refused")
    inner = {child for children in loaded["group_map"].values() for child in children}
    return [each for kind in ("groups", "tasks") for name, each in loaded[kind].items() if name not in inner]


def generate_text(
    run: Path,
    prompts: Sequence[str],
    tokens: int,
    sampling: tuple[float, int | None, float, int],
    *,
    chat: bool,
    tokenizer: str | None,
    trust_remote_code: bool,
    trust_run: bool,
) -> list[str]:
    """Return the continuations of prompts by the language model that a run left, of at most `tokens` new tokens.

    Args:
        sampling: temperature, top_k, top_p and seed, as in `Sampling`.
        chat: Each prompt is a user's turn, and the answer is returned.
        tokenizer: Folder or hub name; None: the run's.
    """
    import torch

    from lockstep.loop.text import codec_of, continuations
    from lockstep.models.build import build_meta_model
    from lockstep.models.generation import Sampling

    config = _with_model_of_folder(to_rebuild(loaded_config(run), trusted=trust_run), run / MODEL)
    given = UserObjects(trust_remote_code=trust_remote_code)
    if tokenizer is None and config.data.train.kind in ("given", "custom") and (run / MODEL / _TOKENIZER).exists():
        tokenizer = str(run / MODEL)
    codec = codec_of(config.model, config.data.train, tokenizer)
    ids = [(codec.turn if chat else codec.encode)(prompt) for prompt in prompts]
    facts = facts_of_data(config, given)
    meta = None
    if config.model.adapter is None:  # else the base is needed
        meta = build_meta_model(config.model, facts, config.run.seed, trust_remote_code=trust_remote_code)
    if meta is not None:  # without a draw of values that the weights replace
        meta.allocate(torch.device("cpu"))
    model = dequantized(make_model(config, facts, given) if meta is None else meta.model, config).eval()
    load_weights(model, run)
    return continuations(codec, model, ids, tokens, facts, Sampling(*sampling))


def _with_model_of_folder(config: Config, folder: Path) -> Config:
    """Return the config with the exported transformers model instead of an object that was passed in Python."""
    if config.model.kind != "given":
        return config
    if not (folder / "config.json").exists():
        why = "the run's model was passed in Python, and isn't one of the transformers library"
        raise ConfigError(
            f"{why}, so it can't be built again here: load {folder} into your module, and generate with it"
        )
    from transformers import AutoConfig

    task: Literal["seq2seq", "causal-lm"]
    task = "seq2seq" if AutoConfig.from_pretrained(folder).is_encoder_decoder else "causal-lm"
    section = HuggingFaceModel(kind="huggingface", task=task, pretrained=str(folder))
    return config.model_copy(update={"model": section})
