"""The controller: resource pools, worker groups, dispatch. Two backends, one behaviour. Knows nothing of
models."""

from rondo.controller.cluster import Cluster
from rondo.controller.group import WorkerGroup, together
from rondo.controller.mesh import Mesh
from rondo.controller.start import start_cluster
from rondo.controller.worker import Worker, WorkerContext, dispatch

__all__ = [
    "Cluster",
    "Mesh",
    "Worker",
    "WorkerContext",
    "WorkerGroup",
    "dispatch",
    "start_cluster",
    "together",
]
