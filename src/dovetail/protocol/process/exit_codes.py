"""Exit codes of a job's processes. The local launcher and Kubernetes' Jobs act on them. 0 means done. Any code that is
not listed here is a crash, and the process is restarted. Python itself uses 1 for a crash."""

# The configuration is wrong. A restart does not help, and the job fails.
BAD_CONFIGURATION = 2
# The coordinator says that the job failed. The reason is in summary.json.
JOB_FAILED = 3
# A trainer rank was stuck in a generation that is over.
SUPERSEDED = 75
