"""The verb `ckpt`: lockstep ckpt ls | show | verify | diff | prune | audit | import.

Each takes the folder of a run, of checkpoints, or of one checkpoint. Only `diff` and `import` load torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.arguments import (
    Command,
    Parser,
    add_json,
    add_trust,
    approved_config,
    count,
    path,
    path_or_address,
    run_command,
    whole,
)
from lockstep.core.errors import ConfigError, VerificationError
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo, plain_line

if TYPE_CHECKING:
    from lockstep.checkpoint.manifest import Manifest
    from lockstep.checkpoint.reading import VerificationResult
    from lockstep.config.every import Every
    from lockstep.config.override import Override
    from lockstep.config.schema import Checkpoint
    from lockstep.resuming.locations import CheckpointLocation


def run(arguments: Sequence[str]) -> int:
    """Run one of the commands."""
    return run_command("ckpt", COMMANDS, arguments)


def _ls(arguments: Sequence[str]) -> int:
    args = _parser("ls", "Lists checkpoints. Only their manifests are read.").parse_args(arguments)

    from lockstep.checkpoint.inspection import keep_reasons, list_checkpoints
    from lockstep.cli import ckpt_text

    place = _all_of(args.run, "ls lists")
    entries = list_checkpoints(place.storage)
    why, aside = keep_reasons(entries, _section(place)), place.storage.moved_aside()
    values = ckpt_text.listed_json(place.place, entries, why, aside)
    return _reported(args, ckpt_text.listed(place.place, entries, why, aside), values)


def _show(arguments: Sequence[str]) -> int:
    parser = _parser("show", "Shows what a checkpoint contains, from its manifest.")
    _add_step(parser)
    parser.add_argument("--tensors", action="store_true", help="list each tensor: name, dtype, shape, size")
    args = parser.parse_args(arguments)

    from lockstep.cli import ckpt_text

    place, name, manifest = _chosen(args)
    lines = ckpt_text.shown(place.where(name), manifest, tensors=args.tensors)
    return _reported(args, lines, ckpt_text.shown_json(name, manifest, tensors=args.tensors))


def _verify(arguments: Sequence[str]) -> int:
    summary = "Reads and hashes every byte of a checkpoint, and of the weights that the run has published.\n"
    parser = _parser("verify", f"{summary}Exit code 3: one is damaged.")
    which = parser.add_mutually_exclusive_group()
    _add_step(which)
    which.add_argument("--all", action="store_true", help="every checkpoint")
    args = parser.parse_args(arguments)

    from lockstep.assembly.weights import MODEL
    from lockstep.checkpoint.inspection import verify_all, verify_weights
    from lockstep.checkpoint.reading import verify
    from lockstep.cli import ckpt_text
    from lockstep.resuming.locations import choose, find

    place = _all_of(args.run, "--all verifies") if args.all else find(args.run)
    chosen = choose(place, args.step)
    run = place.run if place.name is None and args.step is None else None

    def shown(result: VerificationResult) -> VerificationResult:
        _print([ckpt_text.verified(result)])
        return result

    results = [shown(each) for each in (verify_all(place.storage) if args.all else [verify(place.storage, chosen)])]
    weights = [shown(each) for each in (verify_weights(run / MODEL) if run is not None else ())]
    faults, damaged = ([each for each in of if each.fault is not None] for of in (results, weights))
    verified = {"checkpoints": list(map(asdict, results)), "weights": list(map(asdict, weights))}
    emit({"run": str(args.run), "ok": not faults and not damaged, **verified})
    if faults or damaged:
        messages = [ckpt_text.damaged(place.place, faults, len(results))] if faults else []
        messages += [f"{run}/{result.name} is damaged: {result.fault}" for result in damaged]
        raise VerificationError("\n".join(messages))
    return 0


def _audit(arguments: Sequence[str]) -> int:
    summary = "Checks, by a checkpoint's ledger, that the run was trained on every sample once. Exit code 3: it wasn't."
    parser = _parser("audit", summary)
    _add_step(parser)
    args = parser.parse_args(arguments)

    from lockstep.cli import ckpt_text
    from lockstep.loop.ledger import audit

    place, name, manifest = _chosen(args)
    try:
        result = audit(manifest.state, manifest.samples)
    except VerificationError as error:
        raise VerificationError(f"{place.where(name)} can't be audited: {error}") from None
    values = {"step": manifest.step, **ckpt_text.audited_json(result)}
    _reported(args, ckpt_text.audited(manifest.step, result), values)
    if not result.complete:
        raise VerificationError(f"{place.where(name)}: {ckpt_text.incomplete(result)}")
    return 0


def _diff(arguments: Sequence[str]) -> int:
    codes = "Exit code 1: they differ; 3: one is damaged."
    summary = f"Shows how two checkpoints differ: tensors, config and state. {codes}"
    parser = Parser("ckpt diff", summary, usage="A B | RUN --steps N M [--json]")
    two = "two checkpoints, or runs for their newest"
    parser.add_argument("checkpoints", nargs="+", type=path_or_address, metavar="PATH", help=two)
    parser.add_argument("--steps", nargs=2, type=count, metavar=("N", "M"), help="two steps of one run")
    add_json(parser)
    args = parser.parse_args(arguments)
    if len(args.checkpoints) != (2 if args.steps is None else 1):
        raise ConfigError("diff compares two: lockstep ckpt diff A B, or lockstep ckpt diff RUN --steps N M")

    from lockstep.checkpoint.comparison import OpenCheckpoint, compare
    from lockstep.cli import ckpt_text
    from lockstep.resuming.locations import choose, find

    paths = args.checkpoints * (1 if args.steps is None else 2)
    places = [find(path) for path in paths]
    names = [choose(place, at) for place, at in zip(places, args.steps or (None, None), strict=True)]
    comparison = compare(*(OpenCheckpoint(place.storage, name) for place, name in zip(places, names, strict=True)))
    shown = [place.where(name) for place, name in zip(places, names, strict=True)]
    _print(ckpt_text.compared(shown, comparison))
    emit({"checkpoints": shown, **ckpt_text.compared_json(comparison)})
    return 0 if comparison.equal else 1


def _prune(arguments: Sequence[str]) -> int:
    summary = "Deletes checkpoints that checkpoint.keep_last, keep_every and best don't keep, unless none verifies."
    parser = _parser("prune", summary)
    parser.add_argument("--keep-last", type=whole, metavar="N", help="instead of checkpoint.keep_last")
    parser.add_argument("--keep-every", type=_every, metavar="INTERVAL", help="instead of checkpoint.keep_every")
    parser.add_argument("--aside", action="store_true", help="also delete broken-* and superseded-*")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    args = parser.parse_args(arguments)

    from lockstep.checkpoint.inspection import prune, prune_moved_aside
    from lockstep.cli import ckpt_text
    from lockstep.resuming.locations import lock_run

    place = _all_of(args.run, "prune deletes some of")
    wanted = {"keep_last": args.keep_last, "keep_every": args.keep_every}
    section = _section(place).model_copy(update={key: value for key, value in wanted.items() if value is not None})
    with nullcontext() if args.dry_run or place.run is None else lock_run(place.run):
        pruned = prune(place.storage, section, dry=args.dry_run)
        aside = prune_moved_aside(place.storage, dry=args.dry_run) if args.aside else {}
    values = ckpt_text.pruned_json(pruned, aside, dry=args.dry_run)
    return _reported(args, ckpt_text.pruned(pruned, aside, dry=args.dry_run), values)


def _import(arguments: Sequence[str]) -> int:
    summary = (
        "Converts a checkpoint of another program: a file of torch, safetensors, Lightning; a folder of HF Trainer,\n"
        "Accelerate, torch.distributed.checkpoint (torchtitan, FSDP) or DeepSpeed (ZeRO 0, 1, 2, 3). Nothing in it is\n"
        "executed. Without --config, FOLDER gets the weights, for `model.init_from`; other contents are listed.\n"
        "With --config, FOLDER becomes a run with weights and optimizer state, at the checkpoint's step:\n"
        "`lockstep train FOLDER` continues it."
    )
    usage = "FILE FOLDER [options] | FILE FOLDER --config RECIPE [options] [overrides]"
    parser = Parser("ckpt import", summary, usage=usage)
    parser.add_argument("file", type=path, metavar="FILE", help="the file or folder to read")
    parser.add_argument("folder", type=path, metavar="FOLDER", help="to write to")
    parser.add_argument("--key", metavar="KEY", help="where a torch file has the model: net, states.net")
    parser.add_argument("--prefix", metavar="P", default="", help="take only tensors with this prefix, and remove it")
    parser.add_argument("--force", action="store_true", help="replace what is there")
    parser.add_argument("--config", metavar="RECIPE", help="config of the run to make: a recipe or a file")
    parser.add_argument("--step", type=count, metavar="N", help="the run begins at this step, not the checkpoint's")
    parser.add_argument("--sample", type=count, metavar="N", help="and at this sample of the run's order")
    add_json(parser)
    add_trust(parser)
    args, overrides = parser.parse(arguments)
    if args.config is not None:
        return _import_run(args, overrides)
    if overrides:
        raise ConfigError(f"{overrides[0].place} overrides a config; add --config RECIPE")
    if args.step is not None or args.sample is not None:
        raise ConfigError("--step and --sample are where a run begins; add --config RECIPE")

    from lockstep.interop.peers import import_weights

    imported = import_weights(args.file, args.folder, args.force, args.key, args.prefix)
    echo(imported)
    emit({"file": str(imported.file), "tensors": imported.tensors, "skipped": list(imported.skipped)})
    return 0


def _import_run(args: argparse.Namespace, overrides: Sequence[Override]) -> int:
    if args.force:
        raise ConfigError("--force is for files of weights; a run needs a new folder")
    loaded, name = approved_config([args.config], overrides, trusted=args.trust_run)

    from lockstep.assembly.user_objects import refuse_given
    from lockstep.interop.runs import import_run

    refuse_given(loaded)
    options = (args.step, args.sample, args.key, args.prefix)
    trust = args.trust_remote_code
    imported = import_run(args.file, args.folder, loaded.config, name, *options, trust_remote_code=trust)
    echo(imported)
    values = {"run": str(imported.run), "of": str(imported.source), "steps": imported.steps}
    emit({**values, **asdict(imported.progress), "notes": list(imported.notes)})
    return 0


COMMANDS = {
    "ls": Command("list checkpoints, why each is kept, and what was moved aside", _ls, "RUN [--json]"),
    "show": Command("show what a checkpoint contains", _show, "RUN [--step N] [--tensors] [--json]"),
    "verify": Command("read and hash every byte", _verify, "RUN [--step N | --all] [--json]"),
    "diff": Command("show how two checkpoints differ", _diff, "A B, or RUN --steps N M [--json]"),
    "prune": Command(
        "delete checkpoints that the config doesn't keep",
        _prune,
        "RUN [--keep-last N] [--keep-every INTERVAL] [--aside] [--dry-run] [--json]",
    ),
    "audit": Command("check that the run was trained on every sample once", _audit, "RUN [--step N] [--json]"),
    "import": Command(
        "convert a checkpoint of another program to weights, or to a run",
        _import,
        "FILE FOLDER [--key KEY] [--prefix PREFIX] [--force | --config RECIPE [overrides]] [--json]",
    ),
}


def _parser(way: str, summary: str) -> Parser:
    parser = Parser(f"ckpt {way}", summary)
    what = "a run's folder, a folder or address of checkpoints, or one of them"
    parser.add_argument("run", type=path_or_address, metavar="RUN", help=what)
    add_json(parser)
    return parser


def _add_step(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--step", type=count, metavar="N", help="the checkpoint of this step; by default the newest")


def _every(text: str) -> Every:
    from lockstep.config.every import Every

    try:
        interval = Every.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if interval.unit == "minutes":
        raise argparse.ArgumentTypeError("use steps, samples, tokens or epochs; a checkpoint doesn't record minutes")
    return interval


def _chosen(args: argparse.Namespace) -> tuple[CheckpointLocation, str, Manifest]:
    from lockstep.checkpoint.inspection import as_verification_error
    from lockstep.checkpoint.reading import read_manifest
    from lockstep.resuming.locations import choose, find

    place = find(args.run)
    name = choose(place, args.step)
    with as_verification_error(place.storage, name):
        return place, name, read_manifest(place.storage, name)


def _all_of(path: Path | str, does: str) -> CheckpointLocation:
    from lockstep.resuming.locations import find

    place = find(path)
    if place.name is not None:
        all_of_them = path.parent if isinstance(path, Path) else place.place
        raise ConfigError(f"{does} the checkpoints of a run, but {path} is one checkpoint; use {all_of_them}")
    return place


def _section(place: CheckpointLocation) -> Checkpoint:
    """Return the retention rules: of the run's config, else of the config in its newest checkpoint."""
    from lockstep.checkpoint.inspection import list_checkpoints, recorded_section

    return place.config.checkpoint if place.config is not None else recorded_section(list_checkpoints(place.storage))


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        echo(plain_line(line), flush=True)


def _reported(args: argparse.Namespace, lines: Sequence[str], values: Mapping[str, object]) -> int:
    _print(lines)
    emit({"run": str(args.run), **values})
    return 0
