"""Run trainings that chapters share: a job of the workflow. One that did not finish leaves no output.

``python -m workflow.train lm-pre-sgd lm-pre-adamw --profile smoke --seed 0 --device cpu --folder _build/smoke/seed-0``
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

from nbutils import training, trainings
from workflow import jobs, kept


def execute(arguments: argparse.Namespace) -> None:
    """One training after another; the first that fails ends the job, and says why."""
    for name in arguments.trainings:
        log = Path(arguments.folder, "logs", f"{name}.log")
        with jobs.telling(log.with_suffix(".error.json"), name):
            train(name, Path(arguments.folder, "trainings", name), log, arguments)


def train(name: str, folder: Path, log: Path, arguments: argparse.Namespace) -> None:
    """Train, then move the result into place in one step. Its progress and a traceback go to the log.

    Raises:
        JobError: the training raised, or its time was up.
    """
    started, cpu_before, made_from = datetime.now(UTC), time.process_time(), kept.sources_of_training(name)
    jobs.limit_time(arguments.time_limit)
    try:
        with jobs.kernel_messages(log):
            import torch

            torch.set_num_threads(arguments.threads)
            run = trainings.make(name, profile=arguments.profile, seed=arguments.seed, device=arguments.device)
            training.save_run(run, folder)
    except TimeoutError:
        raise jobs.JobError(f"training raised TimeoutError: not finished after {arguments.time_limit} s") from None
    except Exception as error:
        if not isinstance(error, OSError):  # where the disk is full there is no room for a traceback either
            with log.open("a", encoding="utf-8") as text:
                traceback.print_exc(file=text)
        raise jobs.JobError(f"training raised {type(error).__name__}: {error}") from None
    finally:
        jobs.limit_time(0)
    stats = {
        "training": name,
        **jobs.statistics(arguments, started, resource.RUSAGE_SELF, cpu_before),
        "made_from": made_from,
        "files": kept.digests(folder),
    }
    jobs.put(folder / "stats.json", json.dumps(stats, indent=1) + "\n")
    print(f"{name}, seed {arguments.seed}: {stats['seconds']:.1f} s, {stats['peak_mb']:.0f} MB", flush=True)


def main() -> None:
    parser = jobs.parser(__doc__)
    parser.add_argument("trainings", nargs="+")
    parser.add_argument("--folder", required=True, help="of the run, for its trainings/ and logs/")
    jobs.start(execute, parser.parse_args())


if __name__ == "__main__":
    main()
