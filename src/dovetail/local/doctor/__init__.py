"""`dovetail doctor`: whether a machine can run jobs, and how to mend what is wrong."""
