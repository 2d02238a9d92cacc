"""Evaluate a model on task files: accuracy and pass@k with intervals, as lines and as JSON.

    megatron-gspo evaluate MODEL [--tasks FILE ...] [key=value ...]

MODEL is a Hugging Face directory, a run directory, or the URLs of servers (http://host:port,...;
then model.path=DIR names the directory of their model). Without --tasks, a run's own held-out
prompts are evaluated. `key=value` sets keys of docs/config.md: sampling (evaluation.n_samples,
rollout.max_response_length), prompts (data.chat_template), verifier, engine (rollout.engine). The
same command continues an interrupted evaluation. docs/evaluate.md describes the layouts.

example: megatron-gspo evaluate /models/Qwen3-30B-A3B --tasks aime_2024.jsonl
evaluation.n_samples=16
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from megatron_gspo.config.load import apply_overrides, is_override, split_server_arguments
from megatron_gspo.errors import InputError, UserError, printable, report
from megatron_gspo.paths import path_argument, path_text_argument


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0; 2 for invalid input, 1 for a failure; 130 interrupted. Errors are one line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    ours, theirs = split_server_arguments(given)
    overrides = [argument for argument in ours if is_override(argument)]
    options = _parser().parse_args([argument for argument in ours if not is_override(argument)])
    command = shlex.join(["megatron-gspo", "evaluate", *given])
    try:
        print(evaluate(options, overrides, theirs, command))
    except ImportError as error:
        fix = "" if "pip install" in str(error) else "; pip install 'megatron-gspo[plot]'"
        print(printable(f"megatron-gspo evaluate: {error}{fix}"), file=sys.stderr)
        return 2
    except UserError as error:
        return report(error)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    return 0


def evaluate(
    options: argparse.Namespace,
    overrides: Sequence[str],
    server_args: Mapping[str, Sequence[str]],
    command: str,
) -> Path:
    """Run the evaluation of the parsed arguments; returns the written file. Raises UserError
    or ImportError.
    """
    # imported here because Megatron takes seconds, and --help and wrong arguments don't need it
    from transformers.utils.logging import disable_progress_bar

    from megatron_gspo.data.optional_module import optional_module
    from megatron_gspo.tools.evaluate.results import print_scores, write_results
    from megatron_gspo.tools.evaluate.run_tasks import (
        Evaluation,
        load_tasks,
        run_evaluation,
        with_model,
    )
    from megatron_gspo.tools.evaluate.settings import evaluation_config, given_keys
    from megatron_gspo.tools.evaluate.targets import (
        default_output,
        find_targets,
        is_run,
        server_urls,
    )

    disable_progress_bar()
    # Before responses are generated, which may take hours.
    optional_module("scipy", "scipy", "plot", "the interval of a score")
    target = options.model
    given = given_keys(overrides)
    if not options.tasks and not is_run(target):
        raise InputError(
            "--tasks: names no file, and MODEL is no run with held-out prompts; give --tasks FILE"
        )
    if server_urls(target) and "model.path" not in given:
        raise InputError(
            "model.path: servers do not send their tokenizer; give model.path=DIR of their model"
        )
    model_path = apply_overrides({}, overrides).get("model", {}).get("path", target)
    output = options.output or default_output(target, str(model_path))
    config = evaluation_config(target, options.tasks, output, overrides, server_args)
    targets = find_targets(target, config.model.path, options.steps)
    print(f"results: {output}", file=sys.stderr)
    window = (options.first_date, options.last_date)
    tasks = load_tasks(with_model(config, targets[0].source), options.tasks, given, window)
    scores = run_evaluation(Evaluation(config, tuple(targets), tasks, output))
    print_scores(scores)
    return write_results(scores, output, command=command, config=config)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-gspo evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target = "Hugging Face directory, run directory or server URLs"
    parser.add_argument("model", type=path_text_argument, metavar="MODEL", help=target)
    files = "file, folder or saved data set, as data.eval_prompts"
    parser.add_argument(
        "--tasks", nargs="+", type=path_argument, default=[], metavar="FILE", help=files
    )
    parser.add_argument(
        "--steps", help="of a run: `all`, or steps separated by commas (default: the trained model)"
    )
    date = "of contest_date, inclusive; YYYY-MM-DD or with a time (a date is its midnight)"
    parser.add_argument(
        "--from", dest="first_date", type=_date, metavar="DATE", help=f"first {date}"
    )
    parser.add_argument("--to", dest="last_date", type=_date, metavar="DATE", help=f"last {date}")
    folder = (
        "of the results (default: evaluation/ in the run, or a folder of the model's own in"
        " runs/evaluation/)"
    )
    parser.add_argument("--output", type=path_argument, metavar="DIR", help=folder)
    return parser


def _date(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a date; write YYYY-MM-DD") from None


if __name__ == "__main__":
    raise SystemExit(main())
