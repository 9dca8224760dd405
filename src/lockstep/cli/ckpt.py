"""lockstep ckpt ls | show | verify | diff | prune | audit | import

Each takes the folder of a run, of checkpoints, or of one checkpoint. Only `diff` and `import` load torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.words import Parser, add_json, add_trust, approved_config, check_flags, path, split, step, whole
from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError, RunFailed, VerificationError
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo, plain_line

if TYPE_CHECKING:
    from lockstep.config.every import Every
    from lockstep.config.override import Override
    from lockstep.config.schema import Checkpoint
    from lockstep.training.locations import CheckpointLocation

_WAYS = {
    "ls": ("RUN", "which there are, why each stays, and what was put aside"),
    "show": ("RUN [--step N] [--tensors]", "what one holds"),
    "verify": ("RUN [--step N | --all]", "read and hash every byte"),
    "diff": ("A B, or RUN --steps N M", "in what two differ"),
    "prune": ("RUN [--keep-last N] [--keep-every INTERVAL] [--aside] [--dry-run]", "delete what needn't stay"),
    "audit": ("RUN [--step N]", "prove that it was trained on every sample once"),
    "import": (
        "FILE FOLDER [--force | --config RECIPE [overrides]]",
        "make weights of other programs a file for model.init_from",
    ),
}


def run(words: Sequence[str]) -> int:
    """Delegates to one of them."""
    if not words or words[0] in ("-h", "--help"):
        lines = "\n".join(f"  {way} {usage}\n      {summary}" for way, (usage, summary) in _WAYS.items())
        echo(f"usage: lockstep ckpt {{{','.join(_WAYS)}}} ... [--json]\n\n{lines}")
        return 0 if words else 2
    way, *rest = words
    if way in _RUN:
        return _readable(_RUN[way], rest)
    near = closest_match(way, _WAYS)
    meant = f"; did you mean {near}?" if near else f"; there are {', '.join(_WAYS)}"
    echo(f"lockstep: ckpt can't {way}{meant}", file=sys.stderr)
    return 2


def _readable(verb: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Raises RunFailed for what the system doesn't let us read or write."""
    try:
        return verb(words)
    except OSError as error:
        if error.filename is None:  # of our own output
            raise
        raise RunFailed(f"can't use {error.filename}: {error.strerror or error}") from error


# --- looking ------------------------------------------------------------------------------------------------------


def _ls(words: Sequence[str]) -> int:
    asked = _parser("ls", "Lists checkpoints, reading nothing but their manifests.").parse_args(words)

    from lockstep.checkpoint.inspection import aside_in, found_in, reasons
    from lockstep.cli import ckpt_text

    place = _all_of(asked.run, "ls lists")
    found = found_in(place.storage)
    why, aside = reasons(found, _section(place)), aside_in(place.folder)
    _print(ckpt_text.listed(place.folder, found, why, aside))
    if asked.json:
        emit({"run": str(asked.run), **ckpt_text.listed_json(place.folder, found, why, aside)})
    return 0


def _show(words: Sequence[str]) -> int:
    parser = _parser("show", "Shows what a checkpoint holds, as its manifest says.")
    _add_step(parser)
    parser.add_argument("--tensors", action="store_true", help="list each tensor: name, dtype, shape, size")
    asked = parser.parse_args(words)

    from lockstep.checkpoint.inspection import distrusting, manifest_of
    from lockstep.cli import ckpt_text
    from lockstep.training.locations import choose, find

    place = find(asked.run)
    name = choose(place, asked.step)
    with distrusting(place.storage, name):
        manifest = manifest_of(place.storage, name)
    _print(ckpt_text.shown(place.folder / name, manifest, tensors=asked.tensors))
    if asked.json:
        emit({"run": str(asked.run), **ckpt_text.shown_json(name, manifest, tensors=asked.tensors)})
    return 0


# --- trusting -----------------------------------------------------------------------------------------------------


def _verify(words: Sequence[str]) -> int:
    parser = _parser(
        "verify",
        "Reads and hashes every byte of a checkpoint, and of the weights that the run has left. Exit code 3: one is "
        "not what was written.",
    )
    which = parser.add_mutually_exclusive_group()
    _add_step(which)
    which.add_argument("--all", action="store_true", help="every checkpoint there is")
    asked = parser.parse_args(words)

    from lockstep.checkpoint.inspection import verify, verify_all, verify_published
    from lockstep.cli import ckpt_text
    from lockstep.training.locations import choose, find
    from lockstep.training.weights import MODEL

    place = _all_of(asked.run, "--all verifies") if asked.all else find(asked.run)
    chosen = choose(place, asked.step)
    results = []
    for one in verify_all(place.storage) if asked.all else [verify(place.storage, chosen)]:
        results.append(one)
        _print([ckpt_text.verified(one)])
    run = place.run if place.name is None and asked.step is None else None
    published = []
    for one in verify_published(run / MODEL) if run is not None else ():
        published.append(one)
        _print([ckpt_text.verified(one)])
    faults = [one for one in results if one.fault is not None]
    damaged = [one for one in published if one.fault is not None]
    if asked.json:
        found = {"checkpoints": [asdict(one) for one in results], "weights": [asdict(one) for one in published]}
        emit({"run": str(asked.run), "ok": not faults and not damaged, **found})
    if faults or damaged:
        told = [ckpt_text.distrusted(place.folder, faults, len(results))] if faults else []
        told += [f"{run}/{one.name} is damaged: {one.fault}" for one in damaged]
        raise VerificationError("\n".join(told))
    return 0


def _audit(words: Sequence[str]) -> int:
    summary = (
        "Proves from a checkpoint's ledger that the run was trained on every sample of its order, once.\n"
        "Exit code 3: it was not, or the checkpoint is damaged."
    )
    parser = _parser("audit", summary)
    _add_step(parser)
    asked = parser.parse_args(words)

    from lockstep.checkpoint.inspection import distrusting, manifest_of
    from lockstep.cli import ckpt_text
    from lockstep.training.audit import audit
    from lockstep.training.locations import choose, find

    place = find(asked.run)
    name = choose(place, asked.step)
    with distrusting(place.storage, name):
        manifest = manifest_of(place.storage, name)
    try:
        found = audit(manifest.state, manifest.samples)
    except VerificationError as error:
        raise VerificationError(f"{place.folder / name} can't be audited: {error}") from None
    _print(ckpt_text.audited(manifest.step, found))
    if asked.json:
        emit({"run": str(asked.run), "step": manifest.step, **ckpt_text.audited_json(found)})
    if not found.complete:
        raise VerificationError(f"{place.folder / name}: {ckpt_text.incomplete(found)}")
    return 0


# --- comparing ----------------------------------------------------------------------------------------------------


def _diff(words: Sequence[str]) -> int:
    summary = (
        "In what two checkpoints differ: tensors, config and state. Where they lie, in what time and in how many\n"
        "attempts they were made doesn't count. Exit code 0: in nothing; 1: in something; 3: one is damaged."
    )
    parser = Parser("ckpt diff", summary, usage="A B | RUN --steps N M [--json]")
    parser.add_argument(
        "checkpoints", nargs="+", type=path, metavar="PATH", help="two checkpoints (of a run, its newest)"
    )
    parser.add_argument("--steps", nargs=2, type=step, metavar=("N", "M"), help="two steps of one run")
    add_json(parser)
    asked = parser.parse_args(words)
    if len(asked.checkpoints) != (2 if asked.steps is None else 1):
        raise ConfigError("diff compares two: lockstep ckpt diff A B, or lockstep ckpt diff RUN --steps N M")

    from lockstep.checkpoint.comparing import Side, compare
    from lockstep.cli import ckpt_text
    from lockstep.training.locations import choose, find

    paths = asked.checkpoints * (1 if asked.steps is None else 2)
    places = [find(path) for path in paths]
    names = [choose(place, at) for place, at in zip(places, asked.steps or (None, None), strict=True)]
    with Side(places[0].storage, names[0]) as first, Side(places[1].storage, names[1]) as second:
        found = compare(first, second)
    shown = [str(place.folder / name) for place, name in zip(places, names, strict=True)]
    _print(ckpt_text.compared(shown, found))
    if asked.json:
        emit({"checkpoints": shown, **ckpt_text.compared_json(found)})
    return 0 if found.equal else 1


# --- changing -----------------------------------------------------------------------------------------------------


def _prune(words: Sequence[str]) -> int:
    summary = (
        "Deletes what the run's config wouldn't keep: all but checkpoint.keep_last, keep_every and best. The newest\n"
        "that verifies stays, and so does what somebody reads. Exit code 3: none verifies, so none was deleted."
    )
    parser = _parser("prune", summary)
    parser.add_argument("--keep-last", type=whole, metavar="N", help="in place of checkpoint.keep_last")
    parser.add_argument("--keep-every", type=_every, metavar="INTERVAL", help="in place of checkpoint.keep_every")
    parser.add_argument("--aside", action="store_true", help="delete too what was put aside (broken-*, superseded-*)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    asked = parser.parse_args(words)

    from lockstep.checkpoint.inspection import prune, prune_aside
    from lockstep.cli import ckpt_text
    from lockstep.training.locations import at_rest

    place = _all_of(asked.run, "prune deletes some of")
    wanted = {"keep_last": asked.keep_last, "keep_every": asked.keep_every}
    section = _section(place).model_copy(update={key: value for key, value in wanted.items() if value is not None})
    with nullcontext() if asked.dry_run or place.run is None else at_rest(place.run):
        pruned = prune(place.storage, section, dry=asked.dry_run)
        aside = prune_aside(place.storage, dry=asked.dry_run) if asked.aside else {}
    _print(ckpt_text.pruned(pruned, aside, dry=asked.dry_run))
    if asked.json:
        emit({"run": str(asked.run), **ckpt_text.pruned_json(pruned, aside, dry=asked.dry_run)})
    return 0


def _import(words: Sequence[str]) -> int:
    summary = (
        "Makes a file for `model.init_from` of weights that other programs have saved. Nothing in it is executed;\n"
        "what isn't weights is left out, and named. Of a checkpoint of DeepSpeed's (ZeRO 0, 1, 2, 3), the fp32 values\n"
        "of all ranks are put together; name the folder that `save_checkpoint` was given, or a tag's in it.\n"
        "With --config, Adam's moments and steps too: FOLDER becomes a run for `lockstep train FOLDER`, which begins\n"
        "at its first sample and at the beginning of its schedule."
    )
    usage = "FILE FOLDER [--force] [--json] | FILE FOLDER --config RECIPE [overrides] [--json]"
    parser = Parser("ckpt import", summary, usage=usage)
    parser.add_argument(
        "file", type=path, metavar="FILE", help="of torch, Lightning or safetensors, or a folder of them or DeepSpeed's"
    )
    parser.add_argument("folder", type=path, metavar="FOLDER", help="to write to")
    parser.add_argument("--force", action="store_true", help="replace what is there")
    parser.add_argument("--config", metavar="RECIPE", help="of the run to make: a recipe, or a file")
    add_json(parser)
    add_trust(parser)
    own, overrides = split(words, parser.flags())
    asked = parser.parse_args(own)
    if asked.config is not None:
        return _import_run(asked, overrides, parser.flags())
    check_flags(overrides, parser.flags())
    if overrides:
        raise ConfigError(f"{overrides[0].place} is for a config, and none is given; --config RECIPE names one")

    from lockstep.training.importing_weights import import_weights

    made = import_weights(asked.file, asked.folder, force=asked.force)
    echo(made)
    if asked.json:
        emit({"file": str(made.file), "tensors": made.tensors, "skipped": list(made.skipped)})
    return 0


def _import_run(asked: argparse.Namespace, overrides: Sequence[Override], flags: Mapping[str, bool]) -> int:
    if asked.force:
        raise ConfigError("--force replaces a file of weights; a run is made in a new folder")
    loaded, name = approved_config([asked.config], overrides, flags, trusted=asked.trust_run)

    from lockstep.training.importing_runs import import_run
    from lockstep.training.user_objects import refuse_given

    refuse_given(loaded)
    made = import_run(asked.file, asked.folder, loaded.config, name, trust_remote_code=asked.trust_remote_code)
    echo(made)
    if asked.json:
        emit({"run": str(made.run), "of": str(made.of), "steps": made.steps})
    return 0


_RUN: dict[str, Callable[[Sequence[str]], int]] = {
    "ls": _ls,
    "show": _show,
    "verify": _verify,
    "diff": _diff,
    "prune": _prune,
    "audit": _audit,
    "import": _import,
}


# --- words --------------------------------------------------------------------------------------------------------


def _parser(way: str, summary: str) -> Parser:
    parser = Parser(f"ckpt {way}", summary)
    parser.add_argument("run", type=path, metavar="RUN", help="a run's folder, a folder of checkpoints, or one of them")
    add_json(parser)
    return parser


def _add_step(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--step", type=step, metavar="N", help="the checkpoint of this step; by default the newest")


def _every(text: str) -> Every:
    """As `checkpoint.keep_every`."""
    from lockstep.config.every import Every

    try:
        found = Every.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found.unit == "minutes":
        raise argparse.ArgumentTypeError("it counts steps, samples, tokens or epochs; minutes aren't in a checkpoint")
    return found


def _all_of(path: Path, does: str) -> CheckpointLocation:
    from lockstep.training.locations import find

    place = find(path)
    if place.name is not None:
        raise ConfigError(f"{does} the checkpoints of a run, and {path} is one of them; give {path.parent}")
    return place


def _section(place: CheckpointLocation) -> Checkpoint:
    """What stays: as the run's config has it; if there is none, as its newest checkpoint has it."""
    from lockstep.checkpoint.inspection import found_in, section_of

    return place.config.checkpoint if place.config is not None else section_of(found_in(place.storage))


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        echo(plain_line(line), flush=True)
