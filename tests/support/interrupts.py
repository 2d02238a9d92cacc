"""Programs that are interrupted."""

import signal


def hear_interrupts() -> None:
    """To be called in a new process. A shell that starts the tests in the background has them
    ignore SIGINT; inherited, that can't be trapped.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
