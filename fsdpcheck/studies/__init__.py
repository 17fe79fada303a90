"""Studies: claims about sharded training measured, and how many planted faults the laws see."""
