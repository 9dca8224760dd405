"""The verb `generate`: lockstep generate RUN PROMPT."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cli.arguments import Parser, add_json, add_trust, count, run_path, temperature, whole
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo


def run(arguments: Sequence[str]) -> int:
    """Print the prompt and how the model continues it."""
    parser = Parser("generate", "Continues a text with the language model of a run.")
    parser.add_argument("run", type=run_path, metavar="RUN", help="the run's folder")
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue")
    parser.add_argument("--tokens", type=whole, default=256, metavar="N", help="most new tokens; default %(default)s")
    text = "of the softmax; default %(default)s, 0 takes the likeliest token"
    parser.add_argument("--temperature", type=temperature, default=0.8, metavar="T", help=text)
    parser.add_argument("--top-k", type=whole, metavar="K", help="sample from the K likeliest tokens only")
    parser.add_argument("--seed", type=count, default=42, metavar="N", help="of the samples; default %(default)s")
    add_json(parser)
    add_trust(parser)
    args = parser.parse_args(arguments)

    from lockstep.training.finished_run import generate_text

    names = ("tokens", "temperature", "top_k", "seed", "trust_remote_code", "trust_run")
    text = generate_text(args.run, args.prompt, **{name: getattr(args, name) for name in names})
    if args.json:
        emit({"run": str(args.run), "prompt": args.prompt, "text": text})
    else:
        echo(args.prompt + text)
    return 0
