"""Command-line tools. Each is thin; the logic is in the package."""
