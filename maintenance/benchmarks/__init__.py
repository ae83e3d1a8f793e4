"""Ours against the plain way, pair by pair: ``python -m benchmarks``."""

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before numpy is imported: CPU time would count what the others spin
