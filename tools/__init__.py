"""Command-line front doors. Each is thin; the logic is in the package."""
