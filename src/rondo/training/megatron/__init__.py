"""megatron-core's layers and pipelines: see `training.backend`. Only `stage` imports megatron-core."""
