"""Run trainings that chapters share: a job of the workflow. One that did not finish leaves no output.

``python -m workflow.train --profile smoke --seed 0 --device cpu …/trainings/lm-pre-sgd/history.csv …``
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

from nbutils import trainings
from nbutils.trainings import runs
from workflow import jobs, stale


def execute(arguments: argparse.Namespace) -> None:
    """One training after another; the first that fails ends the job, and says why."""
    folders = list(dict.fromkeys(Path(output).parent for output in arguments.outputs))
    sources = {folder: stale.sources_of_training(folder.name) for folder in folders}  # of what this process has loaded
    for folder, made_from in sources.items():
        log = folder.parent.parent / "logs" / f"{folder.name}.log"
        with jobs.error_file(log.with_suffix(".error.json"), folder.name):
            train(folder, log, made_from, arguments)


def train(folder: Path, log: Path, made_from: str, arguments: argparse.Namespace) -> None:
    """Train, then move the result into place in one step. Its progress and a traceback go to the log.

    Raises:
        JobError: the training raised, its time was up, or a module of it changed while it ran.
    """
    name, started, cpu_before = folder.name, datetime.now(UTC), time.process_time()
    jobs.limit_time(arguments.time_limit)
    try:
        with jobs.kernel_messages(log):
            import torch

            torch.set_num_threads(arguments.threads)
            run = trainings.make(name, profile=arguments.profile, seed=arguments.seed, device=arguments.device)
            if stale.sources_of_training(name) != made_from:
                raise RuntimeError("a module of it changed while it ran: run it again")
            runs.save_run(run, folder)
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
        "files": stale.digests(folder),
    }
    jobs.put(folder / "stats.json", json.dumps(stats, indent=1) + "\n")
    print(f"{name}, seed {arguments.seed}: {stats['seconds']:.1f} s, {stats['peak_mb']:.0f} MB", flush=True)


def main() -> None:
    parser = jobs.parser(__doc__)
    parser.add_argument("outputs", nargs="+", help="files in FOLDER/trainings/NAME/, a folder for each training")
    jobs.start(execute, parser.parse_args())


if __name__ == "__main__":
    main()
