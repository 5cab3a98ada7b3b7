"""An earlier run again: its journal followed, or its recorded rollouts trained on."""

# ruff: noqa: F401
from rondo.trainers.replay.journal import FollowedJournal, check_replay, followed_journal, open_journal
from rondo.trainers.replay.offline import RecordedSide, check_own_folder, recorded_rollouts
from rondo.trainers.replay.replay import ReplayedSide
