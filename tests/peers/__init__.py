"""The same batch through TRL's and verl's own code and through ours; `make test-peers` brings both.
Formulas of two others in `test_formulas.py`."""
