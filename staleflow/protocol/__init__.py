"""The global consistency protocol: one pure ledger that bounds how old the data of a training step may be."""

from staleflow.protocol.interface import Ledger
from staleflow.protocol.ledger import REDUNDANT, LedgerError, StalenessLedger

__all__ = ["REDUNDANT", "Ledger", "LedgerError", "StalenessLedger"]
