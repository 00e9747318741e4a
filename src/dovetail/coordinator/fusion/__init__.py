"""Inter-stage fusion (RLHFuse section 4): it measures, decides and acts in the tail of each iteration."""
