"""What a kind of device is: the CPU, CUDA, and one of your own (docs/hardware.md). No other room compares
with a device's kind, or names what only one of them has.
"""

# ruff: noqa: F401
from rondo.platform.base import Numbers, Platform, Shared, SideStream
from rondo.platform.choose import (
    built_in,
    hidden,
    named_in_environment,
    on_host,
    planned,
    platform_of,
)
from rondo.platform.profile import Profiler, ProfileTurn
from rondo.platform.residency import (
    Phase,
    Residency,
    Resting,
    cache_share,
    give_back,
)
