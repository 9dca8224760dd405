"""lockstep data fetch | prepare"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lockstep.cli.words import CONFIG_EPILOG, Parser, add_config, path, read_config, split, whole
from lockstep.core.closest import closest_match
from lockstep.core.terminal import echo

_WAYS = {
    "fetch": "download what a recipe needs, on a connected machine",
    "prepare": "turn text into a folder of token ids, once",
}


def run(words: Sequence[str]) -> int:
    """Delegates to one of the two."""
    if not words or words[0] in ("-h", "--help"):
        lines = "\n".join(f"  {way:<7}  {summary}" for way, summary in _WAYS.items())
        echo(f"usage: lockstep data {{fetch,prepare}} ...\n\n{lines}")
        return 0 if words else 2
    way, *rest = words
    if way == "fetch":
        return _fetch(rest)
    if way == "prepare":
        return _prepare(rest)
    near = closest_match(way, _WAYS)
    meant = f"; did you mean {near}?" if near else f"; there are {', '.join(_WAYS)}"
    echo(f"lockstep: data can't {way}{meant}", file=sys.stderr)
    return 2


def _fetch(words: Sequence[str]) -> int:
    summary = "Downloads model, tokenizer and data sets of a recipe, so that it runs without a network."
    parser = Parser("data fetch", summary, CONFIG_EPILOG, "RECIPE [overrides]")
    add_config(parser)
    own, overrides = split(words, parser.flags())
    loaded, _ = read_config(parser.parse_args(own).config, overrides, parser.flags())

    from lockstep.data.hub import fetch

    for line in fetch(loaded.config):
        echo(line, flush=True)
    return 0


def _prepare(words: Sequence[str]) -> int:
    parser = Parser("data prepare", "Turns text into a folder of token ids, for `data.train.kind: tokens`.")
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="text files, .jsonl, .json, .csv, .parquet files, or folders and names of Hugging Face data sets",
    )
    parser.add_argument("--output", type=path, required=True, metavar="FOLDER", help="to write to")
    parser.add_argument("--tokenizer", required=True, metavar="NAME", help="a Hugging Face tokenizer, or bytes")
    parser.add_argument("--split", default="train", help="of data sets, with slices such as train[:1000]; %(default)s")
    parser.add_argument("--column", default="text", metavar="NAME", help="with the text; %(default)s")
    parser.add_argument("--configuration", metavar="NAME", help="of a data set")
    parser.add_argument("--held-out", type=whole, metavar="N", help="every N-th document goes to the split held-out")
    asked = parser.parse_args(words)

    from lockstep.data.prepare import prepare

    headers = prepare(
        asked.inputs,
        asked.output,
        tokenizer=asked.tokenizer,
        split=asked.split,
        column=asked.column,
        configuration=asked.configuration,
        held_out=asked.held_out,
    )
    for split_name, header in headers.items():
        echo(f"{asked.output}: {split_name}, {header.tokens:,} tokens of {header.documents:,} documents")
    return 0
