"""Supervised fine-tuning, preference pairs and reward models: one loop, three tasks."""

# ruff: noqa: F401
from rondo.trainers.supervised.tasks import PREFERENCE, REWARD_MODEL, SFT, RowStream, Task
from rondo.trainers.supervised.trainer import SupervisedTrainer
