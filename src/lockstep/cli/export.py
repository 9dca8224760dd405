"""The verb `export`: lockstep export RUN [--step N | --best] [--to PLACE] [--format FORMAT] [--push-to-hub NAME]."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lockstep.cli.arguments import Parser, add_json, add_trust, count, path, run_path
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo

_EPILOG = """\
Optimizer state is not read, so damage to it is not detected: `lockstep ckpt verify RUN` reads the whole checkpoint.
`--with optimizer` reads it."""
_FORMATS = ("auto", "safetensors", "torch", "hf", "dcp", "peft")


def run(arguments: Sequence[str]) -> int:
    """Write the model, once every byte of it is verified."""
    summary = "Writes the model of a run for other tools, from a checkpoint after verifying every byte of the model."
    parser = Parser("export", summary, _EPILOG)
    parser.add_argument("run", type=run_path, metavar="RUN", help="a folder of a run, of checkpoints, or a checkpoint")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=count, metavar="N", help="default: the newest with a model that verifies")
    which.add_argument("--best", action="store_true", help="the best checkpoint by checkpoint.best")
    parser.add_argument("--to", type=path, metavar="PLACE", help="a folder, or a file; by default in RUN/export")
    formats = "hf: a folder for from_pretrained; torch: a state dict; peft: an adapter"
    parser.add_argument("--format", choices=_FORMATS, default="auto", help=formats)
    also = "optimizer state and step, too: hf for Trainer, dcp for torchtitan, torch for any loop"
    parser.add_argument("--with", dest="also", choices=("optimizer",), help=also)
    parser.add_argument("--merge", action="store_true", help="an adapter added to its base, as a plain model")
    to_hub = "upload it (hf), with a model card, to a private repository of the Hugging Face hub"
    parser.add_argument("--push-to-hub", metavar="NAME", help=to_hub)
    parser.add_argument("--public", action="store_true", help="of --push-to-hub: a public repository")
    parser.add_argument("--force", action="store_true", help="replace what is there")
    add_json(parser)
    add_trust(parser)
    args = parser.parse_args(arguments)
    if args.public and args.push_to_hub is None:
        parser.error("--public is for --push-to-hub NAME")

    from lockstep.training.exporting import ExportArguments, export
    from lockstep.training.model_card import HubTarget

    names = ("step", "best", "to", "format", "merge", "force", "trust_remote_code", "trust_run")
    chosen = {name: getattr(args, name) for name in names}
    hub = None if args.push_to_hub is None else HubTarget(args.push_to_hub, args.public)
    made = export(args.run, ExportArguments(**chosen, optimizer=args.also is not None, hub=hub))
    for name, why in made.broken.items():
        echo(f"lockstep: {name} could not be used: {why}", file=sys.stderr)
    echo(f"{made.target}: step {made.step:,}, {made.tensors:,} tensors, {made.elements:,} elements ({made.form})")
    if made.url is not None:
        echo(f"uploaded: {made.url}")
    if made.transforms:
        transforms = ", ".join(made.transforms)
        echo(f"note: the file lacks the run's transforms ({transforms}): without them, the model's outputs differ")
    values = {name: getattr(made, name) for name in ("checkpoint", "step", "tensors", "elements")}
    lists = {"broken": dict(made.broken), "transforms": list(made.transforms)}
    emit({"run": args.run, **values, "format": made.form, "to": made.target, "url": made.url, **lists})
    return 0
