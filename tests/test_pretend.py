"""Every line of the path to a GPU runs on the pretend device of ``maintenance/pretend.py``."""

import subprocess
import sys
from pathlib import Path


def test_the_path_runs_on_the_pretend_device():
    """In a process of its own: torch cannot forget a device."""
    cases = Path(__file__).with_name("on_pretend.py")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", cases]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
