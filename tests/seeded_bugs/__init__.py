"""Known defects put back one at a time: a test must fail for each. `make teeth` runs them."""
