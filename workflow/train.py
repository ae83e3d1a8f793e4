"""Run one training that chapters share: a job of the workflow. One that did not finish leaves no output.

``python -m workflow.train lm-pre-adamw --profile book --seed 0 --device cpu --threads 1 FOLDER/history.csv LOG``
"""

from __future__ import annotations

import argparse
import resource
import traceback
from datetime import UTC, datetime
from pathlib import Path

from nbutils import training, trainings
from workflow import jobs


def execute(arguments: argparse.Namespace) -> None:
    """Train, then move the result into place in one step. Its progress and a traceback go to the log."""
    name, folder, log = arguments.name, Path(arguments.output).parent, Path(arguments.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    error_file = log.with_suffix(".error.json")
    error_file.unlink(missing_ok=True)
    jobs.set_environment(arguments.threads)
    started = datetime.now(UTC)
    jobs.limit_time(arguments.time_limit)
    try:
        with jobs.kernel_messages(log):
            import torch

            torch.set_num_threads(arguments.threads)
            run = trainings.make(name, profile=arguments.profile, seed=arguments.seed, device=arguments.device)
            training.save_run(run, folder)
    except TimeoutError:
        jobs.fail(error_file, name, "training", f"TimeoutError: not finished after {arguments.time_limit} s")
    except Exception as error:
        with log.open("a", encoding="utf-8") as text:
            traceback.print_exc(file=text)
        jobs.fail(error_file, name, "training", f"{type(error).__name__}: {error}")
    jobs.limit_time(0)
    stats = jobs.statistics(arguments, started, resource.RUSAGE_SELF)
    print(f"{name}, seed {arguments.seed}: {stats['seconds']:.1f} s, {stats['peak_mb']:.0f} MB", flush=True)


def main() -> None:
    parser = jobs.parser(__doc__)
    for name in ("output", "log"):
        parser.add_argument(name)
    jobs.start(execute, parser.parse_args())


if __name__ == "__main__":
    main()
