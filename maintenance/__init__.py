"""How the book itself is tested: ``python -m maintenance``; see ``maintenance/README.md``."""
