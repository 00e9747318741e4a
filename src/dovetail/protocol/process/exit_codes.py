"""Exit codes of a job's processes, which the local launcher and Kubernetes' Jobs act on.

0: done. Any code that is not here is a crash, 1 among them, which Python itself uses: the process is started again."""

# A wrong configuration: a restart does not help, and the job fails.
BAD_CONFIGURATION = 2
# The coordinator's word that the job failed; the reason is in summary.json.
JOB_FAILED = 3
# A trainer rank that was stuck in a generation that is over.
SUPERSEDED = 75
