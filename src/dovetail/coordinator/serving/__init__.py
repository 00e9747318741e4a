"""What the coordinator serves to the job's other processes over HTTP."""
