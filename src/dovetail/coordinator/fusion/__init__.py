"""Inter-stage fusion (RLHFuse section 4): what is measured, decided and done in the tail of each iteration."""
