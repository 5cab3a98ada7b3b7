"""How parameters get from a trainer to a sampler: shared in place, or gathered and received in buckets."""
