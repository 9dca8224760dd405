"""The verb `generate`: lockstep generate RUN PROMPT."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cli.arguments import Parser, add_json, add_trust, count, run_path, share, temperature, whole
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo


def run(arguments: Sequence[str]) -> int:
    """Print each prompt and how the model continues it, or its answer."""
    parser = Parser("generate", "Continues texts with the language model of a run, until its end token.")
    parser.add_argument("run", type=run_path, metavar="RUN", help="the run's folder")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="a text to continue")
    parser.add_argument("--chat", action="store_true", help="PROMPT is a user's turn, by the tokenizer's chat template")
    parser.add_argument("--tokens", type=whole, default=256, metavar="N", help="most new tokens; default %(default)s")
    text = "of the softmax; default %(default)s, 0 takes the likeliest token"
    parser.add_argument("--temperature", type=temperature, default=0.8, metavar="T", help=text)
    parser.add_argument("--top-k", type=whole, metavar="K", help="sample from the K likeliest tokens only")
    text = "sample from the likeliest tokens that together have probability P; default %(default)s"
    parser.add_argument("--top-p", type=share, default=1.0, metavar="P", help=text)
    parser.add_argument("--seed", type=count, default=42, metavar="N", help="of the samples; default %(default)s")
    parser.add_argument("--tokenizer", metavar="NAME", help="folder or hub name; default: the run's")
    add_json(parser)
    add_trust(parser)
    args = parser.parse_args(arguments)

    from lockstep.training.finished_run import generate_text

    sampling = (args.temperature, args.top_k, args.top_p, args.seed)
    names = ("chat", "tokenizer", "trust_remote_code", "trust_run")
    options = {name: getattr(args, name) for name in names}
    texts = generate_text(args.run, args.prompts, args.tokens, sampling, **options)
    if args.json:
        each = [{"prompt": prompt, "text": text} for prompt, text in zip(args.prompts, texts, strict=True)]
        emit({"run": str(args.run), **each[0]} if len(each) == 1 else {"run": str(args.run), "texts": each})
        return 0
    for number, (prompt, text) in enumerate(zip(args.prompts, texts, strict=True)):
        lead = "\n" if number else ""
        echo(f"{lead}{prompt}\n{text}" if args.chat else f"{lead}{prompt}{text}")
    return 0
