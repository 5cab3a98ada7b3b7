"""One RL run: prompts in, groups out, steps, publishes, checkpoints, reports."""

# ruff: noqa: F401
from rondo.trainers.loop.branches import At, Branching, BranchNumbers, ValuesOfSteps, trees_of
from rondo.trainers.loop.buffer import Buffer, Group, Ledger, failures
from rondo.trainers.loop.canary import Canary
from rondo.trainers.loop.checkpoints import Checkpoints
from rondo.trainers.loop.engine_side import EngineSide, RolloutSide, restarted
from rondo.trainers.loop.evaluation import EvaluationResult, evaluate
from rondo.trainers.loop.feeder import EpisodeFeeder, Episodes
from rondo.trainers.loop.finish import finish, show_finished
from rondo.trainers.loop.journal import JOURNAL_FILE, JOURNAL_FORMAT, RunJournal
from rondo.trainers.loop.named import changed_files, found_again, named_files, refuse_changed
from rondo.trainers.loop.publish import Mender
from rondo.trainers.loop.report import Reporter
from rondo.trainers.loop.resume import already_finished, config_of, differences, read_summary
from rondo.trainers.loop.rl import RLRun, RLTrainer, StepStream
from rondo.trainers.loop.routes import Route, remove_files, what_to_send
from rondo.trainers.loop.served import OtherPolicy, ServedPolicy
from rondo.trainers.loop.speed import PlannedRun, Speed
