"""What releases cost: charges, accountants, calibration, and the arithmetic of the ledger."""
