"""The same batch through TRL's and verl's own code and through ours. `make test-peers` brings both."""
