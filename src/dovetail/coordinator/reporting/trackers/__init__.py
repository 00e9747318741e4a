"""Sends a run's metrics and timelines to trackers such as W&B and MLflow. Each tracker has its own process."""
