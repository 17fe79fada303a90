"""Power: how small an error each law still finds, measured by planting errors of known size in honest runs."""
