"""Several algorithms from one cold start, side by side: running them, their statistics, and the
report.
"""
