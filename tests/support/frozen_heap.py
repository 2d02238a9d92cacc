"""Imported last by the fork server: its children's garbage collector leaves alone what it holds.

A collection in a child would walk through millions of objects, and copy the memory that it shares.
"""

import gc

gc.freeze()
