"""What is to be done for one job, given all that is seen of it. Pure."""
