"""Is the run well, and why did it fail?"""
