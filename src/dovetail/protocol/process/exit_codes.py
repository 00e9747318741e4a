"""Exit codes of a job's processes. The local launcher and Kubernetes' Jobs act on them. 0 means done. A code that is
not listed here is a crash, and the process is restarted. One of these is 1, which Python itself uses."""

# A wrong configuration: a restart does not help, and the job fails.
BAD_CONFIGURATION = 2
# The coordinator's word that the job failed; the reason is in summary.json.
JOB_FAILED = 3
# A trainer rank that was stuck in a generation that is over.
SUPERSEDED = 75
