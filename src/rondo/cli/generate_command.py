"""`rondo generate`: completions of one or more prompts by the native engine."""

from __future__ import annotations

import argparse
import json
import sys

HELP = "generate completions"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser = subparsers.add_parser("generate", help=HELP, description=HELP)
    parser.add_argument("model", help="model folder or hub id")
    parser.add_argument("prompt", nargs="*", help="prompts (default: one per line of standard input)")
    parser.add_argument("-n", type=int, default=1, help="completions per prompt")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--json", action="store_true", help="one JSON object per completion")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the completions."""
    prompts = args.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    from rondo.trainers.commands.evaluate import generate

    completions = generate(
        args.model,
        prompts,
        n=args.n,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        system=args.system,
    )
    for completion in completions:
        if args.json:
            print(json.dumps(completion, ensure_ascii=False))
        else:
            print(f">>> {completion['prompt']}\n{completion['text']}\n")
    return 0
