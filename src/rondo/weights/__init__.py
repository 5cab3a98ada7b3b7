"""How parameters get from a trainer to a sampler: shared in place, gathered in buckets, box by box along a
plan, or by way of files; and the checksums that prove it.
"""

# ruff: noqa: F401
from rondo.weights.disk import remove_weights
from rondo.weights.exchange import SendReport, Transfer
from rondo.weights.layout import Layout
from rondo.weights.sync import Sent, SyncReport
