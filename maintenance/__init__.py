"""How the book itself is tested; see ``maintenance/README.md``."""
