"""Known bugs, inserted one at a time: a test must fail for each. `make seeded-bugs` runs them."""
