"""What a run leaves behind and shows: the run folder, trackers, console, curves, clock, summary."""

# ruff: noqa: F401
from rondo.tracking.checks import AHEAD, Health
from rondo.tracking.clock import Clock
from rondo.tracking.console import Console
from rondo.tracking.curves import matplotlib_available, plot_curves
from rondo.tracking.metrics import build_summary, read_metrics
from rondo.tracking.pictures import Picture, looked_at, named
from rondo.tracking.run_folder import RunFolder, logged_to
from rondo.tracking.shown import BeforeAfter, Found, Header, Kind, Report, Sample
from rondo.tracking.timeline import Timeline
from rondo.tracking.trackers import Tracker, TrackerContext, check_trackers, make_trackers, metric_names
