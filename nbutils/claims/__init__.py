"""What a chapter claims: checks with their bands, the records that they leave, and the verdict that follows."""

from nbutils.claims.ledger import KINDS, MIME, ROLES, VERDICTS, Ledger, verdict

__all__ = ["KINDS", "MIME", "ROLES", "VERDICTS", "Ledger", "verdict"]
