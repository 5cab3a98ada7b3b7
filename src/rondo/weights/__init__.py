"""How parameters get from a trainer to a sampler: shared in place, gathered in buckets, box by box along a
plan, or by way of files; and the checksums that prove it.
"""
