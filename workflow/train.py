"""Run one training that chapters share: a job of the workflow. One that did not finish leaves no output.

``python -m workflow.train lm-pre-adamw --profile book --seed 0 --device cpu FOLDER/history.csv FOLDER/stats.json LOG``
"""

from __future__ import annotations

import argparse
import json
import resource
import traceback
from datetime import UTC, datetime
from pathlib import Path

from nbutils import training, trainings
from workflow import jobs, kept


def execute(arguments: argparse.Namespace) -> None:
    """Train, then move the result into place in one step. Its progress and a traceback go to the log."""
    name, folder, log = arguments.name, Path(arguments.output).parent, Path(arguments.log)
    started, made_from = datetime.now(UTC), kept.sources_of_training(name)
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
        **jobs.statistics(arguments, started, resource.RUSAGE_SELF),
        "made_from": made_from,
        "files": kept.digests(folder),
    }
    jobs.put(Path(arguments.stats), json.dumps(stats, indent=1) + "\n")
    print(f"{name}, seed {arguments.seed}: {stats['seconds']:.1f} s, {stats['peak_mb']:.0f} MB", flush=True)


def main() -> None:
    jobs.start(execute, jobs.parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
