"""The planner: which layout and schedule for this model on these machines, by simulating the programs themselves.

>>> found = plan(Workload(published_model("llama3-8b"), 4096, 8), Cluster.named("h100", 8))
>>> found.best[0].peak_bytes < 80 * 2**30
True
"""

from penstock.planner.calibrate import MeasuredRun, calibrate, candidate_of, median_step_s
from penstock.planner.cluster import Cluster, ClusterError, Device, DeviceLink, hosts
from penstock.planner.estimate import Candidate, Estimate, Workload, estimate
from penstock.planner.explain import comparison
from penstock.planner.search import NothingFits, Plan, plan, settings_of
from penstock.planner.shape import ModelShape, models, published_model
from penstock.planner.times import Constants

__all__ = [
    "Candidate",
    "Cluster",
    "ClusterError",
    "Constants",
    "Device",
    "DeviceLink",
    "Estimate",
    "MeasuredRun",
    "ModelShape",
    "NothingFits",
    "Plan",
    "Workload",
    "calibrate",
    "candidate_of",
    "comparison",
    "estimate",
    "hosts",
    "median_step_s",
    "models",
    "plan",
    "published_model",
    "settings_of",
]
