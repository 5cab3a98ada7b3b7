"""Hugging Face models under FSDP2, along tensor, expert and context too: see `training.backend`."""
