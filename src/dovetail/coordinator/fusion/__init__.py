"""Inter-stage fusion at work (RLHFuse section 4): what is measured, decided, and done in each iteration's tail."""
