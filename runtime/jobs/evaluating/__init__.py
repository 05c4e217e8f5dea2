"""The evaluating job: a bundle's operating points on labelled rows, against what they promise."""
