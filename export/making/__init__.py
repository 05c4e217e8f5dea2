"""The whole way from a trained classifier to a bundle that leaves early, in steps that outlive a kill."""
