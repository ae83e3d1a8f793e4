"""Ours against the plain way, pair by pair, in one run."""

import os

from workflow.jobs import THREADS

for _name in THREADS:  # before numpy is imported: its BLAS would use all cores, and CPU time counts what they spin
    os.environ.setdefault(_name, "1")
