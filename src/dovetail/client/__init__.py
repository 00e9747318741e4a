"""Jobs on a cluster, from Python.

    from dovetail.client import Cluster

    with Cluster("lab", kubernetes="http://127.0.0.1:8001", api="http://127.0.0.1:8080", api_token=token) as cluster:
        name = cluster.submit("job.yaml")
        job = cluster.wait(name, on_change=print)
        print([row.metrics["reward"] for row in cluster.metrics(name, stage="ppo")])

It reads the state of jobs from the status API, which changes nothing. It makes, stops and deletes jobs through the
Kubernetes API."""

from dovetail.client.cluster_client import ClientError, Cluster, ClusterJob, MetricsRow, SampleRow

__all__ = ["ClientError", "Cluster", "ClusterJob", "MetricsRow", "SampleRow"]
