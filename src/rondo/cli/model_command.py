"""`rondo eval`, `generate`, `export` and `push`: what is done with a model that is there."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rondo.cli.arguments import find_model, find_policy, load_arguments, note, recipe_parser
from rondo.core.errors import ConfigError
from rondo.system.storage import storing
from rondo.system.usage import nothing_collected

HELP = {
    "eval": "evaluate a model on a recipe's evaluation prompts",
    "generate": "generate completions of prompts",
    "export": "write a checkpoint as a Hugging Face folder",
    "push": "send a run's model to a repository of Hugging Face, with a model card",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the four subcommands."""
    evaluate = recipe_parser(subparsers, "eval", HELP["eval"])
    evaluate.add_argument("--model", help="model folder or hub id (default: model.path of the recipe)")
    evaluate.add_argument("--output", help="write all answers to this JSON-lines file")
    generate = subparsers.add_parser("generate", help=HELP["generate"], description=HELP["generate"])
    generate.add_argument("model", help="model folder or hub id")
    generate.add_argument("prompt", nargs="*", help="prompts (default: one per line of standard input)")
    generate.add_argument("-n", type=int, default=1, help="completions per prompt (default: %(default)s)")
    generate.add_argument(
        "--max-tokens", type=int, default=256, help="of a completion (default: %(default)s)"
    )
    generate.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)s)")
    generate.add_argument("--top-p", type=float, default=1.0, help="default: %(default)s")
    generate.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    generate.add_argument("--system", help="system prompt")
    generate.add_argument(
        "--template-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a variable of the chat template, such as enable_thinking=false; may be repeated",
    )
    generate.add_argument(
        "--engine", default="native", help="native, transformers, vllm or sglang (default: %(default)s)"
    )
    generate.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="what each prompt shows, in the place of <image> or in front; may be repeated",
    )
    generate.add_argument("--json", action="store_true", help="one JSON object per completion")
    export = subparsers.add_parser("export", help=HELP["export"], description=HELP["export"])
    export.add_argument("run", help="run folder (runs/quickstart)")
    export.add_argument("output", help="folder or URL to write; must not exist or be empty")
    push = subparsers.add_parser("push", help=HELP["push"], description=HELP["push"])
    push.add_argument("run", help="run folder (runs/quickstart)")
    push.add_argument("name", metavar="OWNER/NAME", help="repository; made where it is not there")
    push.add_argument("--public", action="store_true", help="for everybody to see (default: private)")
    push.add_argument(
        "--replace", action="store_true", help="of a repository that has files: these alone from now on"
    )
    for parser, newest in ((export, "the newest"), (push, "what the run has exported at its end")):
        parser.add_argument("--model", help="one of `models` that learnt (default: the policy)")
        parser.add_argument("--step", type=int, help=f"which checkpoint (default: {newest})")
        parser.add_argument(
            "--trust-code",
            action="store_true",
            help="run code that the run's config.yaml names (a tokenizer's)",
        )
        parser.add_argument(
            "--dtype", help="of the weights: float32, bfloat16, … (default: checkpoint.export_dtype)"
        )


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand, and prints which files it wrote."""
    {"eval": _evaluate, "generate": _generate, "export": _export, "push": _push}[args.command](args)
    return 0


def _evaluate(args: argparse.Namespace) -> None:
    extra = [f"model.path={args.model}", "model.config=null", "trainer.warm_start=null"] if args.model else []
    loaded = load_arguments(args.config, extra)
    if loaded.config.model.path is None and loaded.config.model.config is None:
        raise ConfigError(
            "the recipe's model comes from trainer.warm_start and exists after training only: name the "
            "folder that the run exports (--model runs/…/export), or another model",
            key="model.path",
        )
    find_policy(loaded)
    with nothing_collected(for_good=args.owns_process):
        from rondo.trainers.commands.evaluate import evaluate_model

    with output_file(args.output) as write:
        result = evaluate_model(loaded)
        print(json.dumps(result.metrics, indent=2))  # first: so it is there whatever becomes of the file
        write(json.dumps(dataclasses.asdict(record), ensure_ascii=False) for record in result.samples)


def _generate(args: argparse.Namespace) -> None:
    find_model(args.model)
    prompts = args.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    with nothing_collected(for_good=args.owns_process):
        from rondo.trainers.commands.evaluate import generate

    options = {name: getattr(args, name) for name in ("n", "max_tokens", "temperature", "top_p", "seed")}
    options |= {"system": args.system, "engine": args.engine, "images": args.image}
    template = dict(_template_option(text) for text in args.template_option)
    for completion in generate(args.model, prompts, chat_template_options=template, **options):
        if args.json:
            print(json.dumps(completion, ensure_ascii=False))
        else:
            print(f">>> {completion['prompt']}\n{completion['text']}\n")


def _template_option(text: str) -> tuple[str, Any]:
    """Reads `enable_thinking=false`, as an argument of a recipe is read."""
    from rondo.config.tree import read_argument

    (*above, name), value = read_argument(text, 0)
    if above:
        raise ConfigError(f"--template-option {text}: a template's variables have no parts; write KEY=VALUE")
    return name, value.plain()


def _export(args: argparse.Namespace) -> None:
    with nothing_collected(for_good=args.owns_process):
        from rondo.trainers.commands.export import export_checkpoint

    step = export_checkpoint(
        args.run,
        args.output,
        args.step,
        args.dtype,
        model=args.model,
        trust_code=args.trust_code,
        note=note,
    )
    whose = f"{args.model} at " if args.model else ""
    print(f"wrote {whose}step {step} of {args.run} to {args.output}")


def _push(args: argparse.Namespace) -> None:
    from rondo.trainers.commands.export import push

    options = {name: getattr(args, name) for name in ("step", "dtype", "replace", "model", "trust_code")}
    url, step = push(args.run, args.name, private=not args.public, note=note, **options)
    print(f"sent {f'step {step}' if step is not None else 'the export'} of {args.run} to {url}")


# ---- the file that a command is asked to write ----


@contextmanager
def output_file(name: str | None) -> Iterator[Callable[[Iterable[str]], None]]:
    """Opens a file before the work inside begins, and yields a function that writes its lines, to be called
    once. Until that call, and after any failure, the file is as it was. Devices and pipes are written to
    directly; None: no file. Raises StorageError.
    """
    if name is None:
        yield lambda lines: None
        return
    path = Path(os.path.realpath(name))  # a link stays one
    with storing(name):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        beside = not path.exists() or path.is_file()
        place = path.with_name(f".{path.name}.tmp") if beside else path
        file = place.open("w", encoding="utf-8")

    def write(lines: Iterable[str]) -> None:
        with storing(name):
            file.writelines(f"{line}\n" for line in lines)
            file.close()
            if beside:
                place.replace(path)

    try:
        yield write
    finally:
        with storing(name):
            file.close()
        if beside:
            place.unlink(missing_ok=True)
