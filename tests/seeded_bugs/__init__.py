"""Known bugs put back one at a time: a test must fail for each. `make seeded-bugs` runs them."""
