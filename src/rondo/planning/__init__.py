"""Pure planners: they compute plans from numbers and never touch a device, a process or the environment."""

# ruff: noqa: F401
from rondo.planning.admission import (
    AdmittedGroups,
    OnUpdate,
    Order,
    effective_on_update,
    last_of_first,
    may_admit,
    select,
)
from rondo.planning.batches import mini_batch_orders, plan_mini_batches
from rondo.planning.placement import Phase, Placement, SameDevices, plan_placement
from rondo.planning.roles import (
    effective_correction,
    engine_of,
    in_flight,
    like_of,
    one_update,
    parallel_of,
    placement_of,
    reference_in_actor,
    roles_of,
)
from rondo.planning.weights import (
    WeightPlan,
    adapters_of,
    carried,
    plan_hop,
    plan_weights,
    rollout_dtype,
    runs_in_own_process,
)
