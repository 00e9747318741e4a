"""Inter-stage fusion (RLHFuse section 4). It measures, decides and acts in the tail of each iteration."""
