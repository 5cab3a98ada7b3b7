"""What everybody must know: errors, types, the table of rows and its columns, the roles of a run.

Imports nothing of rondo; `errors`, `roles` and `masking` the standard library only.
"""
