"""Imported last by a process that others are forked from: collections of garbage in them leave alone what
it has imported, a million objects and no garbage.
"""

import gc

gc.freeze()
