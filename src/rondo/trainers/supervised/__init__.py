"""Supervised fine-tuning, preference pairs and reward models: one loop, three tasks."""
