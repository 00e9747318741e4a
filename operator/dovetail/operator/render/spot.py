"""Labels and taints of the usual clouds for nodes that the cloud takes back after a short notice."""

from __future__ import annotations

from dovetail.operator.render.context import Object

# GKE and Azure give a notice of 30 s, and AWS of 120 s. A pod that has not ended by then is killed.
GRACE_SECONDS = 25
# The taints that clouds and tools put on a node that will end soon. Administrators may name more (`noticeTaints`).
NOTICES = frozenset(
    {
        "cloud.google.com/impending-node-termination",  # GKE
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "aws-node-termination-handler/scheduled-maintenance",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",  # before version 1
        "remediator.aks.microsoft.com/unschedulable",
        "remediator.kubernetes.azure.com/unschedulable",
        "ToBeDeletedByClusterAutoscaler",
    }
)
# Labels of spot nodes, with their value. GKE's older preemptible nodes are among them.
LABELS = {
    "cloud.google.com/gke-spot": "true",
    "cloud.google.com/gke-preemptible": "true",
    "eks.amazonaws.com/capacityType": "SPOT",
    "karpenter.sh/capacity-type": "spot",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
# AKS taints spot nodes with their label. Elsewhere an administrator may do so, and usually does with the label.
TOLERATIONS: list[Object] = [
    {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"} for key, value in LABELS.items()
]
# Other nodes are suitable as well, because a job that waits for cheap nodes wastes its trainers.
AFFINITY: Object = {
    "nodeAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {
                "weight": 100,
                "preference": {"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]},
            }
            for key, value in LABELS.items()
        ]
    }
}
