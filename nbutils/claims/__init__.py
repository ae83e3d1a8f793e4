"""Claims of a chapter: checks with their bands, the records that checks leave, and the verdict that follows."""

from nbutils.claims.ledger import KINDS, MIME, OF_CHANCE, ROLES, VERDICTS, Ledger, verdict

__all__ = ["KINDS", "MIME", "OF_CHANCE", "ROLES", "VERDICTS", "Ledger", "verdict"]
