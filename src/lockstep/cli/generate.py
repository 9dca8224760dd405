"""lockstep generate RUN PROMPT"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cli.words import Parser, add_json, add_trust, path, seed, temperature, whole
from lockstep.core.arguments import GenerateArguments


def run(words: Sequence[str]) -> int:
    """Prints the prompt and what the model makes of it."""
    usual = GenerateArguments()
    parser = Parser("generate", "Lets the language model of a run go on with a text.")
    parser.add_argument("run", type=path, metavar="RUN", help="the run's folder")
    parser.add_argument("prompt", metavar="PROMPT", help="the text to go on with")
    parser.add_argument("--tokens", type=whole, default=usual.tokens, metavar="N", help="new tokens, %(default)s")
    parser.add_argument(
        "--temperature",
        type=temperature,
        default=usual.temperature,
        metavar="T",
        help="of the draws, %(default)s; 0 takes the likeliest token",
    )
    parser.add_argument("--top-k", type=whole, metavar="K", help="draw from the K likeliest tokens only")
    parser.add_argument("--seed", type=seed, default=usual.seed, metavar="N", help="of the draws, %(default)s")
    add_json(parser)
    add_trust(parser)
    asked = parser.parse_args(words)

    from lockstep.training.command import generate

    arguments = GenerateArguments(
        asked.tokens,
        asked.temperature,
        asked.top_k,
        asked.seed,
        json=asked.json,
        trust_remote_code=asked.trust_remote_code,
        trust_run=asked.trust_run,
    )
    return generate(asked.run, asked.prompt, arguments)
