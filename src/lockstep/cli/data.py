"""The verb `data`: lockstep data fetch | prepare | show."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cli.arguments import (
    CONFIG_EPILOG,
    Command,
    Parser,
    add_config,
    add_trust,
    approved_config,
    path,
    read_config,
    run_command,
    whole,
)
from lockstep.core.terminal import echo, echo_marked


def run(arguments: Sequence[str]) -> int:
    """Run one of the commands."""
    return run_command("data", COMMANDS, arguments)


def _fetch(arguments: Sequence[str]) -> int:
    summary = "Downloads model, tokenizer and datasets of a recipe, so that it runs offline; tokenizes packed ones."
    parser = Parser("data fetch", summary, CONFIG_EPILOG, "RECIPE [overrides]")
    add_config(parser)
    args, overrides = parser.parse(arguments)
    loaded, _ = read_config(args.config, overrides)

    from lockstep.data.hub import fetch
    from lockstep.data.huggingface import fetch_tokens

    for lines in (fetch, fetch_tokens):
        for line in lines(loaded.config):
            echo(line, flush=True)
    return 0


def _prepare(arguments: Sequence[str]) -> int:
    parser = Parser("data prepare", "Turns text into a folder of token ids, for `data.train.kind: tokens`.")
    inputs = "text files, .jsonl, .json, .csv, .parquet files, or folders and names of Hugging Face datasets"
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=inputs)
    parser.add_argument("--output", type=path, required=True, metavar="FOLDER", help="where to write")
    parser.add_argument("--tokenizer", required=True, metavar="NAME", help="a Hugging Face tokenizer, or bytes")
    parser.add_argument("--split", default="train", help="of datasets, such as train[:1000]; default %(default)s")
    parser.add_argument("--column", default="text", metavar="NAME", help="column of the text; default %(default)s")
    parser.add_argument("--configuration", metavar="NAME", help="configuration of a dataset")
    parser.add_argument("--held-out", type=whole, metavar="N", help="put every Nth document into the split held-out")
    args = parser.parse_args(arguments)

    from lockstep.data.prepare import prepare

    names = ("tokenizer", "split", "column", "configuration", "held_out")
    headers = prepare(args.inputs, args.output, **{name: getattr(args, name) for name in names})
    for split_name, header in headers.items():
        echo(f"{args.output}: {split_name}, {header.tokens:,} tokens of {header.documents:,} documents")
    return 0


def _show(arguments: Sequence[str]) -> int:
    summary = "Shows what the model sees: the first step's samples, their targets marked, and how much is padding."
    parser = Parser("data show", summary, CONFIG_EPILOG, "[RECIPE ...] [--samples N] [overrides]")
    add_config(parser)
    parser.add_argument("--samples", type=whole, default=3, metavar="N", help="to show; default %(default)s")
    add_trust(parser)
    args, overrides = parser.parse(arguments)
    loaded, _ = approved_config(args.config, overrides, trusted=args.trust_run)

    from lockstep.assembly.data_view import shown_data
    from lockstep.assembly.user_objects import UserObjects, refuse_given

    refuse_given(loaded)
    for line in shown_data(loaded.config, UserObjects(trust_remote_code=args.trust_remote_code), args.samples):
        echo_marked(line)
    return 0


COMMANDS = {
    "fetch": Command("download what a recipe needs, on a machine with a network", _fetch),
    "prepare": Command("turn text into a folder of token ids", _prepare),
    "show": Command("show what the model sees, with the targets marked", _show),
}
